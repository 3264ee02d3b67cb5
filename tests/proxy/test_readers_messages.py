"""Anthropic's Messages. That counts are the engine's is shown by the live suite; here is what it rests on."""

from pathlib import Path
from typing import Any

import pytest

from kvctl.engines.base import Api
from kvctl.engines.sglang import SGLang
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Reader
from kvctl.proxy.readers.anthropic_chat import as_chat
from kvctl.proxy.readers.base import OddShapeError
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.load import load_counter
from kvctl.tokens.media import MediaBounds
from tests.proxy.reading import Json, refusal, route_of, shape
from tests.tokens.tiny import write

MESSAGES = route_of(VLLM(), "/v1/messages")
CHAT = route_of(VLLM(), "/v1/chat/completions")
USER: Json = {"role": "user", "content": "hi"}
USE: Json = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}
RESULT: Json = {"type": "tool_result", "tool_use_id": "t1", "content": "21"}
IMAGE: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 90_000}}
BODY: Json = {"model": "m", "max_tokens": 100, "messages": [USER]}


def turn(role: str, *blocks: Json) -> Json:
    return {"role": role, "content": list(blocks)}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def chat_of(*messages: Json, **more: Any) -> list[Json]:
    converted: list[Json] = as_chat({"messages": list(messages)} | more, merge_system=False)["messages"]
    return converted


# --- the conversation that the engine makes of it ---------------------------------------------------


def test_system_texts_are_one_message_without_billing_headers() -> None:
    """A28: a list of system blocks becomes one system message; what a coding agent bills with is dropped."""
    blocks = [text("a"), text("x-anthropic-billing-header: 7"), text(""), text("b")]
    assert chat_of(USER, system=blocks) == [{"role": "system", "content": "ab"}, USER]
    assert chat_of(USER, system="s")[0] == {"role": "system", "content": "s"}
    assert chat_of(USER, system=[]) == [USER]


def test_tool_use_and_its_result() -> None:
    """A28: a call with its arguments as text; the result goes before the words that came with it."""
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\u00e9"}'}}
    assert chat_of(USER, turn("assistant", text("I look"), USE), turn("user", RESULT, text("and?"))) == [
        USER,
        {"role": "assistant", "tool_calls": [call], "content": "I look"},
        {"role": "tool", "tool_call_id": "t1", "content": "21"},
        {"role": "user", "content": "and?"},
    ]


def test_a_message_of_results_alone_is_none_of_its_own() -> None:
    parts = RESULT | {"content": [text("a"), text("b"), IMAGE]}
    assert chat_of(turn("user", parts)) == [
        {"role": "tool", "tool_call_id": "t1", "content": "a\nb"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]},
    ]


def test_thinking_is_the_reasoning_of_its_message() -> None:
    """A34: what was thought goes back to the template; what was redacted does not."""
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "redacted_thinking", "data": "x"}, text("so")]
    assert chat_of(turn("assistant", *blocks)) == [{"role": "assistant", "reasoning": "hm", "content": "so"}]


def test_tools_get_their_schema_as_parameters() -> None:
    tools = [{"name": "f", "description": "d", "input_schema": {"properties": {}}}]
    (tool,) = as_chat({"messages": [USER], "tools": tools}, merge_system=False)["tools"]
    parameters = {"properties": {}, "type": "object"}
    assert tool == {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": parameters},
    }


def test_system_messages_inside_are_kept_or_merged() -> None:
    inside = {"system": "s", "messages": [USER, {"role": "system", "content": "r"}, USER]}
    kept = as_chat(inside, merge_system=False)["messages"]
    merged = as_chat(inside, merge_system=True)["messages"]
    assert [m["role"] for m in kept] == ["system", "user", "system", "user"]
    assert merged == [{"role": "system", "content": "sr"}, USER, USER]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [7]},
        {"messages": [turn("user", {"type": "video"})]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [turn("user", RESULT | {"content": [{"type": "tool_reference", "tool_name": "f"}]})]},
        {"messages": [USER], "tools": [{"name": "f"}]},
        {"messages": [USER], "tools": "x"},
        {"messages": [USER], "system": 7},
    ],
)
async def test_shapes_that_are_not_known_are_bounded_and_left_to_the_engine(
    tiny_reader: Reader, body: Json
) -> None:
    with pytest.raises(OddShapeError):
        as_chat(body, merge_system=False)
    asked = await shape(tiny_reader, MESSAGES, BODY | body)
    assert not asked.exact
    assert asked.asked_output == 100


# --- limits and counts ------------------------------------------------------------------------------


async def test_it_is_counted_as_the_chat_that_it_is(tiny_reader: Reader) -> None:
    """A28: the same conversation, asked for by either API, has the same claim."""
    system = {"role": "system", "content": "be brief"}
    chat = await shape(tiny_reader, CHAT, {"messages": [system, USER], "max_tokens": 100})
    asked = await shape(tiny_reader, MESSAGES, BODY | {"system": "be brief"})
    assert (asked.prompts, asked.exact, asked.asked_output) == (chat.prompts, True, 100)


async def test_thinking_is_inside_max_tokens(tiny_reader: Reader) -> None:
    """A34: max_tokens 16384 with a thinking budget of 5120 claims 16384 output tokens, not their sum."""
    thinking = {"type": "enabled", "budget_tokens": 5120}
    asked = await shape(tiny_reader, MESSAGES, BODY | {"max_tokens": 16384, "thinking": thinking})
    assert asked.asked_output == 16384


async def test_disabled_thinking_is_counted_as_the_template_hears_it(tiny_reader: Reader) -> None:
    """A template that does not listen renders the same prompt, and then the count is exact."""
    off = await shape(tiny_reader, MESSAGES, BODY | {"thinking": {"type": "disabled"}})
    plain = await shape(tiny_reader, MESSAGES, BODY)
    assert off.prompts >= plain.prompts


async def test_images_are_bounded_and_their_base64_is_no_text(tiny_counter: ChainCounter) -> None:
    reader = Reader(tiny_counter, VLLM(), media=MediaBounds(image=5000))
    plain = await shape(reader, MESSAGES, BODY)
    for blocks in ([IMAGE, text("hi")], [RESULT | {"content": [IMAGE]}, text("hi")]):
        asked = await shape(reader, MESSAGES, BODY | {"messages": [turn("user", *blocks)]})
        assert not asked.exact
        assert 16_384 <= asked.prompts[0] - plain.prompts[0] < 17_500
    odd = await shape(reader, MESSAGES, BODY | {"messages": [turn("user", IMAGE, {"type": "new"})]})
    assert 5000 <= odd.prompts[0] < 8000


async def test_its_refusals_have_anthropics_form(tiny_reader: Reader) -> None:
    """A28: max_tokens is required, and positive; the 400 is Anthropic's object in the engine's words."""
    for body, words in (
        ({"model": "m", "messages": [USER]}, "'loc': 'body.max_tokens', 'msg': 'Field required'"),
        (BODY | {"max_tokens": None}, "int_type"),
        (BODY | {"max_tokens": 7.5}, "int_from_float"),
        (BODY | {"max_tokens": -1}, "max_tokens must be positive"),
        ({"model": "m", "max_tokens": 5}, "body.messages"),
    ):
        answer = await refusal(tiny_reader, MESSAGES, body)
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert words in answer["error"]["message"]
    assert (await shape(tiny_reader, MESSAGES, BODY | {"max_tokens": "7"})).asked_output == 7


@pytest.mark.parametrize("limit", [None, -1, "x", 7.5])
async def test_another_engine_judges_its_limits_itself(tiny_counter: ChainCounter, limit: Any) -> None:
    """What cannot be read claims all that is left of the context."""
    reader = Reader(tiny_counter, SGLang())
    asked = await shape(reader, route_of(SGLang(), "/v1/messages"), BODY | {"max_tokens": limit})
    assert (asked.asked_output, asked.default_output) == (None, None)
    assert not asked.exact  # it converts the conversation in a way of its own


def test_the_route_speaks_anthropics_errors() -> None:
    assert MESSAGES.api is Api.ANTHROPIC


LISTENS = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role }} {{ m.content }} {% endfor %}{{ reasoning_effort }}"
    "{% if enable_thinking is defined and not enable_thinking %} do not think at all {% endif %}"
)


async def test_a_template_that_wants_the_system_first_and_hears_of_thinking(tmp_path: Path) -> None:
    """What it refuses where it stands is merged into the front, and then the count is exact again."""
    counter = load_counter(str(write(tmp_path, {"chat_template": LISTENS})))
    reader = Reader(counter, VLLM())
    reminder = {"role": "system", "content": "remember"}
    inside = BODY | {"system": "s", "messages": [USER, reminder, USER]}
    front = BODY | {"system": "sremember", "messages": [USER, USER]}
    asked, known = await shape(reader, MESSAGES, inside), await shape(reader, MESSAGES, front)
    assert (asked.prompts, asked.exact) == (known.prompts, True)
    off = await shape(reader, MESSAGES, front | {"thinking": {"type": "disabled"}})
    assert off.exact
    assert off.prompts > known.prompts
    await counter.close()


async def test_a_system_message_inside_that_a_template_takes_is_no_proof(tiny_reader: Reader) -> None:
    """The engine may merge it all the same: the larger of both counts is the claim."""
    body = BODY | {"system": "s", "messages": [USER, {"role": "system", "content": "remember"}, USER]}
    asked = await shape(tiny_reader, MESSAGES, body)
    plain = await shape(tiny_reader, MESSAGES, BODY)
    assert not asked.exact
    assert asked.prompts > plain.prompts
