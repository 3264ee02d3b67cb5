"""OpenAI's Responses: ``input``, ``instructions``, ``tools``; ``max_output_tokens``.

A conversation that only the engine has (``previous_response_id``) cannot be counted: the prompt is then
bounded by the context, which is the most that the engine takes. Tools that the engine runs by itself make it
generate in several turns, each over a longer prompt: the claim is then the rest of the context.
"""

from typing import Any

from kvctl.engines.base import Route
from kvctl.proxy.limits import BadRequest, Fields, malformed, too_small, validation_errors
from kvctl.proxy.readers.base import (
    UNKNOWN_CONTEXT,
    Asked,
    Body,
    Counted,
    Facts,
    OddShapeError,
    bounded,
    bounded_by_all,
    model_of,
    no_proof,
)
from kvctl.proxy.readers.responses_chat import as_chat

_HISTORY = ("previous_response_id", "previous_input_messages", "conversation", "prompt")


async def read_responses(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """Counted as the chat that the engine makes of the items."""
    del route
    if Fields(data).flag("background"):
        return _background()
    asked = _limits(facts, data)
    if isinstance(asked, BadRequest):
        return asked
    if bad := _no_input(data):
        return bad
    try:
        chat = as_chat(data)
    except OddShapeError:
        count = bounded_by_all(facts, data)
    else:
        count = await facts.counter.count_chat(model_of(data), chat, size)
        count = count if facts.strict else no_proof(count)  # other engines convert in ways of their own
    if any(data.get(key) for key in _HISTORY):
        count = bounded(_history(facts, count.prompts[0]))
    return asked, count


def _background() -> BadRequest:
    return BadRequest(
        message=(
            "background=true lets the answer be generated after the request has ended, where nothing would "
            "account for its KV cache. Nothing was generated. Send the request without background; "
            "stream=true keeps a long answer flowing. (parameter=background)"
        ),
        param="background",
    )


def _limits(facts: Facts, data: Body) -> Asked | BadRequest:
    fields = Fields(data)
    output = fields.integer("max_output_tokens")
    truncate = -1 if data.get("truncation", "disabled") != "disabled" else None
    low = output is not None and output < 1
    if facts.strict and fields.wrongs:
        return validation_errors(fields.wrongs)
    if facts.strict and low and output is not None:
        return too_small("max_tokens", output)
    odd = low or bool(fields.wrongs)
    unlimited = odd or _runs_tools(data.get("tools"))
    return Asked(output=None if unlimited else output, truncate=truncate, unlimited=unlimited)


def _runs_tools(tools: Any) -> bool:
    """Whether the engine may call a tool by itself and go on."""
    kinds = [tool.get("type") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return any(kind not in ("function", "custom") for kind in kinds)


def _no_input(data: Body) -> BadRequest | None:
    if data.get("input") is None and not data.get("previous_input_messages"):
        shown = f"<dict of {len(data)} items>" if "input" not in data else "None"
        return malformed("missing", "body.input", "Field required", shown)
    return None


def _history(facts: Facts, own: int) -> int:
    context = facts.context()
    return max(own, context if context is not None else own + UNKNOWN_CONTEXT)
