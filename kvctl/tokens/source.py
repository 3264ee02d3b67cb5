"""Exact counts, or an exception that says why there is none.

A source answers with the true number or raises ``Uncountable``; what to do then is up to the chain.
Law 4: a source that is not sure raises.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from kvctl.tokens.base import CountMethod


class Why(StrEnum):
    """Why a source has no exact count: metric label."""

    SHAPE = "shape"  # messages, tools or template options that it cannot render with certainty
    TEMPLATE = "template"  # no chat template, or the template raised
    TEXT = "text"  # the tokenizer refuses the text (lone surrogates)
    TIMEOUT = "timeout"  # not done within the deadline
    BUSY = "busy"  # too many waiting already
    TOO_LARGE = "too_large"
    CRASHED = "crashed"  # the process that counts died from it
    REFUSED = "refused"  # the engine's /tokenize answered an error
    UNREACHABLE = "unreachable"  # the engine's /tokenize did not answer


FINAL = frozenset({Why.TIMEOUT, Why.TOO_LARGE, Why.CRASHED})
"""What one source could not do in time, or crashed on, is not asked of the engine: it would fare the same."""


class Uncountable(Exception):  # noqa: N818 - an answer, not an error
    """No exact count, and why."""

    def __init__(self, why: Why, detail: str = "") -> None:
        super().__init__(detail or why.value)
        self.why = why


class Source(Protocol):
    """One way to an exact count."""

    method: CountMethod

    async def text(self, model: str, prompts: Sequence[str], *, add_special_tokens: bool) -> tuple[int, ...]:
        """Tokens of each prompt. Raises Uncountable."""
        ...

    async def chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> int:
        """Prompt tokens of a chat body without media parts. Raises Uncountable."""
        ...

    async def close(self) -> None:
        """Release threads and connections."""
        ...


class View(msgspec.Struct, frozen=True):
    """What is known of the engine when a text is counted.

    ``context``: tokens, None where it is not known. ``begins``: whether prefixes are wanted.
    """

    context: int | None = None
    begins: bool = False


@dataclass(slots=True)
class Tally:
    """The work of a segment cache so far, in characters: ``tokenised`` and, known already, ``spared``."""

    hits: int = 0
    misses: int = 0
    tokenised: int = 0
    spared: int = 0


class OwnTokenizer(ABC):
    """A source that has the model's own tokenizer, wherever it runs.

    ``context`` may be set to a function that returns the engine's context length (None: not known), and
    ``begins`` to one that returns whether prefixes are wanted: counts are then ``Tokens``. ``lost(sentence)``
    is called when a process that counts has ended. ``templates``: the names of its chat templates.
    ``waiting``: counts that are queued or under way.
    """

    method = CountMethod.LOCAL

    def __init__(self, vocab_size: int | None, templates: Sequence[str]) -> None:
        self.vocab_size = vocab_size
        self.templates = tuple(templates)
        self.context: Callable[[], int | None] = lambda: None
        self.begins: Callable[[], bool] = lambda: False
        self.lost: Callable[[str], None] = lambda _: None
        self.waiting = 0

    def view(self) -> View:
        """What is known now."""
        return View(self.context(), self.begins())

    @abstractmethod
    async def text(self, model: str, prompts: Sequence[str], *, add_special_tokens: bool) -> tuple[int, ...]:
        """As of ``Source``."""

    @abstractmethod
    async def chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> int:
        """As of ``Source``."""

    @abstractmethod
    async def other_way(self) -> bool:
        """Load the tokenizer as other versions of the engine's libraries do, or back; False: they agree."""

    @property
    @abstractmethod
    def tally(self) -> Tally:
        """The work of the segment cache so far."""

    @property
    @abstractmethod
    def keeps(self) -> bool:
        """Whether counts of segments are cached; False: with this tokenizer they do not add up."""

    @abstractmethod
    async def close(self) -> None:
        """As of ``Source``."""
