"""Exact counts, or an exception that says why there is none.

A source answers with the true number or raises ``Uncountable``; what to do instead is the chain's business.
Law 4: a source that is not sure raises.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from kvctl.tokens.base import CountMethod


class Why(StrEnum):
    """Why a source has no exact count: metric label."""

    SHAPE = "shape"  # messages, tools or template options of a form it does not render for certain
    TEMPLATE = "template"  # no chat template, or the template raised
    TEXT = "text"  # the tokenizer refuses it (lone surrogates)
    TIMEOUT = "timeout"  # not done within the deadline
    BUSY = "busy"  # too many waiting already
    TOO_LARGE = "too_large"
    REFUSED = "refused"  # the engine's /tokenize answered an error
    UNREACHABLE = "unreachable"  # the engine's /tokenize did not answer


FINAL = frozenset({Why.TIMEOUT, Why.TOO_LARGE})
"""What one source could not do in time must not be asked of the engine: it would stall there."""


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
        """Let go of threads and connections."""
        ...
