"""The interface of a token counter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from kvctl.core.claim import Prefix


class CountMethod(StrEnum):
    """How a count came about: metric label and status field."""

    LOCAL = "local"  # the model's own tokenizer (and template), in this process
    ENGINE = "engine"  # the engine's /tokenize
    BOUND = "bound"  # an upper bound from bytes: never proof of a 400


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens of each prompt of a request. ``exact`` False: an upper bound.

    ``prefixes`` says how each prompt begins (one entry per prompt), or is empty. ``media``: how many of the
    tokens are the bound of images, audio and video.
    """

    prompts: tuple[int, ...]
    method: CountMethod
    seconds: float = 0.0
    prefixes: tuple[Prefix, ...] = ()
    media: int = 0

    @property
    def exact(self) -> bool:
        """Whether the count may prove a 400."""
        return self.method is not CountMethod.BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingStatus:
    """How an engine's prompts are counted now.

    ``doubted``: why the local tokenizer is not used; "": it is, or there is none. ``error_ratio``: miscounted
    tokens over true ones in the last comparisons with the engine; None: nothing was compared. ``compared``:
    comparisons so far. ``known_ratio``: the share of the characters of prompts whose tokens were known
    already; None: nothing was counted locally. ``splits``: whether counts of parts are cached.
    """

    method: CountMethod
    doubted: str
    error_ratio: float | None
    compared: int
    known_ratio: float | None
    splits: bool


class Counter(Protocol):
    """Counts prompts. Neither method raises on odd input: the answer is then a byte bound."""

    async def count_text(
        self, model: str, prompts: Sequence[str], *, add_special_tokens: bool = True
    ) -> Count:
        """Tokens of each plain prompt, as /v1/completions counts them."""
        ...

    async def count_chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> Count:
        """Tokens of a chat request (``messages``, ``tools``, template options), as the engine renders it."""
        ...
