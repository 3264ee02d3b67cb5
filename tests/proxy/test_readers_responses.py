"""OpenAI's Responses. That counts are the engine's is shown by the live suite; here is what it rests on."""

import json
from typing import Any

import pytest

from kvctl.engines.sglang import SGLang
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Parsed, Reader
from kvctl.proxy.readers.base import OddShapeError
from kvctl.proxy.readers.responses_chat import as_chat
from kvctl.tokens.chain import ChainCounter
from tests.proxy.reading import Json, refusal, route_of, shape

RESPONSES = route_of(VLLM(), "/v1/responses")
CHAT = route_of(VLLM(), "/v1/chat/completions")
USER: Json = {"role": "user", "content": "hi"}
CALL: Json = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT: Json = {"type": "function_call_output", "call_id": "c", "output": "21"}
THOUGHT: Json = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
TOOL: Json = {"type": "function", "name": "f", "description": "d", "parameters": {}, "strict": True}


def said(words: str, **more: Any) -> Json:
    return {
        "role": "assistant",
        "type": "message",
        "content": [{"type": "output_text", "text": words}],
    } | more


def chat_of(*items: Json, **more: Any) -> list[Json]:
    messages: list[Json] = as_chat({"input": list(items)} | more)["messages"]
    return messages


def test_items_of_the_assistant_are_one_message() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert chat_of(USER, THOUGHT, said("so"), CALL, CALL, OUTPUT, said("a"), said("b")) == [
        USER,
        {"role": "assistant", "reasoning": "hm", "content": "so", "tool_calls": [call, call]},
        {"role": "tool", "content": "21", "tool_call_id": "c"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_instructions_and_text() -> None:
    assert as_chat({"instructions": "s", "input": "hi"})["messages"] == [
        {"role": "system", "content": "s"},
        USER,
    ]
    assert chat_of({"role": "developer", "content": "d"}, USER)[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("last", "resumes"),
    [
        (said("a", status="in_progress"), True),
        (said("a", status="incomplete"), True),
        (said("a", status="completed"), False),
        (THOUGHT | {"status": "incomplete"}, True),
        (CALL | {"status": "in_progress"}, False),
        (USER, False),
    ],
)
def test_an_unfinished_last_message_is_continued(last: Json, resumes: bool) -> None:
    chat = as_chat({"input": [USER, last]})
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (resumes, not resumes)


def test_tools_and_effort() -> None:
    chat = as_chat({"input": "hi", "tools": [TOOL, {"type": "web_search"}], "reasoning": {"effort": "low"}})
    (tool,) = chat["tools"]
    assert tool["function"] == {"name": "f", "description": "d", "parameters": {}, "strict": True}
    assert chat["reasoning_effort"] == "low"


ODD: list[Json] = [
    {"input": 7},
    {"input": [7]},
    {"input": [{"type": "item_reference", "id": "x"}]},
    {"input": [CALL | {"arguments": {}}]},
    {"input": [THOUGHT | {"encrypted_content": "x"}]},
    {"input": [{"role": "assistant", "content": []}]},
    {"input": [OUTPUT | {"call_id": None}]},
    {"input": "hi", "tools": [{"type": "custom", "name": "c"}]},
    {"input": "hi", "tools": {}},
]


@pytest.mark.parametrize("body", [odd for odd in ODD if odd.get("tools") != {}])
async def test_shapes_that_are_not_known_are_bounded(tiny_reader: Reader, body: Json) -> None:
    with pytest.raises(OddShapeError):
        as_chat(body)
    assert not (await shape(tiny_reader, RESPONSES, body)).exact


async def test_it_is_counted_as_the_chat_that_it_is(tiny_reader: Reader) -> None:
    """One special token more than the chat: the engine adds those of the tokenizer to the template's."""
    chat = await shape(tiny_reader, CHAT, {"messages": [USER], "add_special_tokens": True})
    asked = await shape(tiny_reader, RESPONSES, {"input": "hi", "max_output_tokens": "70"})
    assert (asked.prompts, asked.exact, asked.asked_output) == (chat.prompts, True, 70)
    assert asked.default_output is None


@pytest.mark.parametrize("key", ["previous_response_id", "previous_input_messages", "conversation"])
async def test_a_history_that_only_the_engine_has_is_bounded_by_the_context(
    tiny_reader: Reader, tiny_counter: ChainCounter, key: str
) -> None:
    body = {"input": "hi", key: "resp_1"}
    asked = await shape(tiny_reader, RESPONSES, body)
    assert (asked.prompts, asked.exact) == ((8192,), False)
    blind = await shape(Reader(tiny_counter, VLLM()), RESPONSES, body)
    assert blind.prompts[0] > 32_768


async def test_truncation(tiny_reader: Reader) -> None:
    """auto cuts to the context, so a long input is no proof; null is read as auto by the engine."""
    long = {"input": "hello " * 9000}
    for value in ("auto", None):
        asked = await shape(tiny_reader, RESPONSES, long | {"truncation": value})
        assert (asked.prompts, asked.exact) == ((8192,), False)
    asked = await shape(tiny_reader, RESPONSES, long | {"truncation": "disabled"})
    assert asked.exact
    assert asked.prompts[0] > 8192


async def test_tools_that_the_engine_runs_claim_the_rest_of_the_context(tiny_reader: Reader) -> None:
    body = {"input": "hi", "max_output_tokens": 10, "tools": [{"type": "code_interpreter", "container": {}}]}
    assert (await shape(tiny_reader, RESPONSES, body)).asked_output is None
    body["tools"] = [TOOL]
    assert (await shape(tiny_reader, RESPONSES, body)).asked_output == 10


@pytest.mark.parametrize("wish", [True, "yes", 1])
async def test_background_is_claimed_and_moves_by_time(tiny_reader: Reader, wish: object) -> None:
    """Whoever reads its stream along may leave: its lease is told of no tokens."""
    body = {"input": "hi", "background": wish, "stream": True, "max_output_tokens": 9}
    read = await tiny_reader.read(RESPONSES, {"Content-Type": "application/json"}, json.dumps(body).encode())
    assert isinstance(read, Parsed)
    assert (read.background, read.turns, read.stream) == (True, False, True)
    assert (read.shape.stream, read.shape.asked_output) == (False, 9)


async def test_turns_are_told(tiny_reader: Reader) -> None:
    body = {"input": "hi", "tools": [{"type": "code_interpreter", "container": {}}]}
    read = await tiny_reader.read(RESPONSES, {"Content-Type": "application/json"}, json.dumps(body).encode())
    assert isinstance(read, Parsed)
    assert (read.background, read.turns) == (False, True)


@pytest.mark.parametrize("limit", [7.5, "x", [1], 0, -1])
async def test_limits(tiny_reader: Reader, tiny_counter: ChainCounter, limit: Any) -> None:
    body = {"input": "hi", "max_output_tokens": limit}
    assert (await refusal(tiny_reader, RESPONSES, body))["error"]["code"] == 400
    lenient = Reader(tiny_counter, SGLang())
    assert (await shape(lenient, route_of(SGLang(), "/v1/responses"), body)).asked_output is None


@pytest.mark.parametrize("body", [{}, {"input": None}])
async def test_nothing_to_answer(tiny_reader: Reader, body: Json) -> None:
    assert (await refusal(tiny_reader, RESPONSES, body))["error"]["param"] == "body.input"
