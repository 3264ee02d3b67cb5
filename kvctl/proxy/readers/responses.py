"""OpenAI's Responses: ``input``, ``instructions``, ``tools``; ``max_output_tokens``.

A conversation that only the engine has (``previous_response_id``) is counted, or bounded, where it passed
through here (``proxy.conversations``); else it is bounded by the context, which is the most that the engine
takes. Tools that the engine runs by itself make it generate in several turns, each over a longer prompt: the
claim is then the rest of the context.
"""

from typing import Any

from msgspec.structs import replace

from kvctl.core.claim import Shape
from kvctl.engines.base import Route
from kvctl.proxy.conversations import TOKENS_PER_ANSWER, Begun, Finished, Messages, Past
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
from kvctl.tokens.bound import text_bound

_HISTORY = ("previous_response_id", "previous_input_messages", "conversation", "prompt")


async def read_responses(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """Count the chat that the engine makes of the items."""
    del route
    asked = _limits(facts, data)
    if isinstance(asked, BadRequest):
        return asked
    if bad := _no_input(data):
        return bad
    past = _past(facts, data)
    known = None if past is None else past.messages
    weight = size + (past.weight if past is not None else 0)
    messages: Messages | None = None
    try:
        chat = as_chat(data, known or ())
    except OddShapeError:
        count = bounded_by_all(facts, data)
    else:
        count = await facts.counter.count_chat(model_of(data), chat, weight)
        count = count if facts.strict else no_proof(count)  # other engines convert in ways of their own
        messages = tuple(chat["messages"])
    if any(data.get(key) for key in _HISTORY) and not (known and messages):
        count, messages = bounded(_history(facts, count.prompts[0], past)), None
    return replace(asked, begun=_begun(facts, data, asked, messages, weight)), count


async def remember(facts: Facts, shape: Shape, begun: Begun, told: Finished, size: int) -> None:
    """Keep a conversation with its answer, for requests that continue it. ``size``: bytes of the answer.

    The messages are taken to be the engine's own if its prompt had as many tokens as were counted.
    """
    answers = tuple([{"role": "assistant", "content": text} for text in told.texts])
    proven = begun.messages is not None and shape.exact and shape.prompts == (told.prompt_tokens,)
    if proven:  # its token count will hardly be needed
        counted = sum(map(text_bound, told.texts))
    else:
        texts = await facts.counter.count_text(shape.model, told.texts, add_special_tokens=False)
        counted = sum(texts.prompts)
    most = max(counted, told.output_tokens)
    facts.conversations.keep(
        told.response_id,
        tokens=told.prompt_tokens + most + TOKENS_PER_ANSWER * max(len(answers), 1),
        messages=(*(begun.messages or ()), *answers) if proven else None,
        weight=begun.weight + size,
    )


def _past(facts: Facts, data: Body) -> Past | None:
    """What is known of the conversation that the request continues."""
    if not facts.strict or any(data.get(key) for key in _HISTORY[1:]):
        return None
    return facts.conversations.of(data.get("previous_response_id"))


def _begun(facts: Facts, data: Body, asked: Asked, messages: Messages | None, weight: int) -> Begun | None:
    """What the engine will keep. A prompt that it cuts to its context says nothing of the whole."""
    if data.get("store") is False or asked.truncate is not None or not facts.strict:
        return None
    return Begun(messages=messages, weight=weight)


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
    turns = _runs_tools(data.get("tools"))
    unlimited = odd or turns
    return Asked(
        output=None if unlimited else output,
        truncate=truncate,
        unlimited=unlimited,
        background=fields.flag("background"),
        turns=turns,
    )


def _runs_tools(tools: Any) -> bool:
    """Whether the engine may call a tool by itself and go on."""
    kinds = [tool.get("type") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return any(kind not in ("function", "custom") for kind in kinds)


def _no_input(data: Body) -> BadRequest | None:
    if data.get("input") is None and not data.get("previous_input_messages"):
        shown = f"<dict of {len(data)} items>" if "input" not in data else "None"
        return malformed("missing", "body.input", "Field required", shown)
    return None


def _history(facts: Facts, own: int, past: Past | None) -> int:
    context = facts.context()
    if past is not None:
        whole = own + past.tokens
        return whole if context is None else max(own, min(whole, context))
    return own + UNKNOWN_CONTEXT if context is None else max(own, context)
