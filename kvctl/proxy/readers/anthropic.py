"""Anthropic's Messages: ``max_tokens`` is required, and covers the thinking."""

import functools
from collections.abc import Mapping
from typing import Any

from kvctl.engines.base import Route
from kvctl.proxy.limits import BadRequest, Fields, Wrong, malformed, validation_errors
from kvctl.proxy.readers.anthropic_chat import as_chat, has_inline_system
from kvctl.proxy.readers.base import (
    Asked,
    Body,
    Counted,
    Facts,
    OddShapeError,
    bounded_by_all,
    model_of,
    no_proof,
)
from kvctl.proxy.readers.openai import no_messages
from kvctl.tokens.base import Count

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_PROBE = {"messages": [{"role": "user", "content": "Hi"}]}


async def read_messages(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """``system``, ``messages``, ``tools``, ``thinking``; counted as the chat that the engine makes of it."""
    del route
    asked = _limits(facts, data)
    if isinstance(asked, BadRequest):
        return asked
    if bad := no_messages(data, ids_given=True):
        return bad
    try:
        count = await _count(facts, data, size)
    except OddShapeError:
        return asked, bounded_by_all(facts, data)
    return asked, count if facts.strict else no_proof(count)  # other engines convert in ways of their own


def _limits(facts: Facts, data: Body) -> Asked | BadRequest:
    fields = Fields(data)
    output = fields.integer("max_tokens", nullable=False)
    if not facts.strict:
        known = output is not None and output > 0
        return Asked(output=output if known else None, unlimited=not known)
    if "max_tokens" not in data:
        shown = f"<dict of {len(data)} items>"
        fields.wrongs.append(Wrong("missing", "body.max_tokens", "Field required", shown))
    if fields.wrongs:
        return validation_errors(fields.wrongs)
    if output is not None and output < 1:
        message = "Value error, max_tokens must be positive"
        return malformed("value_error", "body.max_tokens", message, str(output))
    return Asked(output=output)


async def _count(facts: Facts, data: Body, size: int) -> Count:
    counts = [await _rendered(facts, data, size, options) for options in await _options(facts, data)]
    return functools.reduce(_larger, counts)


async def _options(facts: Facts, data: Body) -> list[Mapping[str, Any]]:
    """Template options that the engine may derive from ``thinking``; several where that is not certain."""
    thinking = data.get("thinking")
    if not isinstance(thinking, Mapping) or thinking.get("type") != "disabled":
        return [{}]
    none, low = {"reasoning_effort": "none"}, {"reasoning_effort": "low"}
    return [none] if await _none_is_heard(facts, model_of(data)) else [none, low]


async def _rendered(facts: Facts, data: Body, size: int, options: Mapping[str, Any]) -> Count:
    """Count with system messages where they stand, or in front where the template refuses them there.

    Which of the two the engine does cannot be known for certain from here.
    """
    kept = await _chat(facts, data, size, options, merge_system=False)
    if not has_inline_system(data):
        return kept
    merged = await _chat(facts, data, size, options, merge_system=True)
    return merged if merged.exact and not kept.exact else _larger(kept, merged)


async def _chat(
    facts: Facts, data: Body, size: int, options: Mapping[str, Any], *, merge_system: bool
) -> Count:
    chat = as_chat(data, merge_system=merge_system) | dict(options)
    return await facts.counter.count_chat(model_of(data), chat, size)


def _larger(first: Count, second: Count) -> Count:
    """The larger of two counts either of which may be right; exact only where they agree."""
    if first.prompts == second.prompts:
        return first
    return no_proof(max(first, second, key=lambda count: count.prompts))


async def _none_is_heard(facts: Facts, model: str) -> bool:
    """Whether the template treats ``reasoning_effort: none`` differently; the engine then sends it."""
    if model not in facts.efforts:
        none, *others = [
            await facts.counter.count_chat(model, _PROBE | {"reasoning_effort": effort}, 64)
            for effort in ("none", *_EFFORTS)
        ]
        if not none.exact or len(facts.efforts) >= 64:
            return False
        facts.efforts[model] = none.prompts not in [other.prompts for other in others]
    return facts.efforts[model]
