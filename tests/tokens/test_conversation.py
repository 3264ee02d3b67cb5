"""Expected values: what vLLM 0.32 hands to the template for the same messages."""

from typing import Any

import pytest

from kvctl.tokens.conversation import as_system, conversation, tool_list
from kvctl.tokens.source import Uncountable, Why

Json = dict[str, Any]


def call(**function: Any) -> Json:
    return {"id": "a", "type": "function", "function": {"name": "f", **function}}


def called(arguments: Json) -> Json:
    return {"id": "a", "function": {"arguments": arguments, "name": "f"}, "type": "function"}


CASES: list[tuple[Json, Json]] = [
    ({"role": "user", "content": "hi", "name": "bob", "extra": 1}, {"content": "hi", "name": "bob"}),
    ({"role": "user"}, {"content": ""}),
    ({"role": "user", "content": []}, {"content": ""}),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"content": "a\nb"},
    ),
    (
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "d"},
                {"type": "refusal", "refusal": "no"},
                {"type": "text", "text": None},
            ],
        },
        {"content": "d\nno"},
    ),
    ({"role": "assistant", "content": "", "tool_calls": []}, {"content": ""}),
    ({"role": "assistant", "content": [], "tool_calls": None}, {"content": ""}),
    (
        {"role": "assistant", "content": None, "tool_calls": [call(arguments='{"b":1,"a":2}')]},
        {"content": "", "tool_calls": [called({"b": 1, "a": 2})]},
    ),
    (
        {"role": "assistant", "content": "x", "tool_calls": [call(arguments="null")]},
        {"content": "x", "tool_calls": [called({})]},
    ),
    ({"role": "assistant", "tool_calls": [call(arguments="")]}, {"content": "", "tool_calls": [called({})]}),
    ({"role": "assistant", "tool_calls": [call(arguments="{")]}, {"content": "", "tool_calls": [called({})]}),
    (
        {"role": "assistant", "tool_calls": [call(arguments="[1]")]},
        {"content": "", "tool_calls": [called({})]},
    ),
    (
        {"role": "assistant", "content": "x", "reasoning_content": "r", "refusal": "no"},
        {"content": "x", "reasoning": "r", "reasoning_content": "r"},
    ),
    (
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "x"}],
        },
        {"content": "t\nx"},
    ),
    (
        {
            "role": "tool",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "tool_call_id": "a",
        },
        {"content": "a\nb", "tool_call_id": "a"},
    ),
    ({"role": "developer", "content": "d"}, {"content": "d", "tools": None}),
    ({"role": "system", "content": "x-anthropic-billing-header: a\nrest"}, {"content": "rest"}),
    ({"role": "system", "content": "x-anthropic-billing-header: a"}, {"content": ""}),
    ({"role": "weird", "content": "d", "task": "t", "prefix": True}, {"content": "d", "task": "t"}),
]


@pytest.mark.parametrize(("message", "expected"), CASES)
def test_messages_become_what_the_engine_renders(message: Json, expected: Json) -> None:
    assert conversation([message], wrap=False) == [{"role": message["role"]} | expected]


def test_key_order_is_the_engines() -> None:
    message = {"role": "assistant", "tool_calls": [call(arguments="{}", more=1) | {"index": 0}]}
    (rebuilt,) = conversation([message], wrap=False)[0]["tool_calls"]
    assert list(rebuilt) == ["id", "function", "type", "index"]
    assert list(rebuilt["function"]) == ["arguments", "name", "more"]


WRAPPED: list[tuple[Any, Any]] = [
    ("hi", [{"type": "text", "text": "hi"}]),
    (None, []),
    (
        [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    ),
    ([{"type": "refusal", "refusal": "no"}], [{"type": "text", "text": "no"}]),
]


@pytest.mark.parametrize(("content", "expected"), WRAPPED)
def test_templates_that_iterate_get_parts(content: Any, expected: Any) -> None:
    assert conversation([{"role": "user", "content": content}], wrap=True)[0]["content"] == expected


def test_tool_results_are_text_even_for_templates_that_iterate() -> None:
    message = {"role": "tool", "content": "r", "tool_call_id": "a"}
    assert conversation([message], wrap=True)[0]["content"] == "r"


ODD: list[Any] = [
    [],
    None,
    "hi",
    [None],
    ["hi"],
    [{"content": "x"}],
    [{"role": 3, "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": {"text": "x"}}],
    [{"role": "user", "content": ["a"]}],
    [{"role": "user", "content": [{"type": "text", "text": 7}]}],
    [{"role": "user", "content": [{"text": "no type"}]}],
    [{"role": "user", "content": [{"type": "tool_reference", "name": "x"}]}],
    [{"role": "assistant", "tool_calls": {"a": 1}}],
    [{"role": "assistant", "tool_calls": ["a"]}],
    [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {}}]}],
    [{"role": "assistant", "tool_calls": [call()]}],
    [{"role": "assistant", "tool_calls": [call(arguments={"b": 1})]}],
]


@pytest.mark.parametrize("messages", ODD)
def test_what_is_not_certain_is_not_counted(messages: Any) -> None:
    with pytest.raises(Uncountable) as raised:
        conversation(messages, wrap=False)
    assert raised.value.why is Why.SHAPE


def test_developer_becomes_system_and_systems_merge() -> None:
    messages: list[Json] = [
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "d", "tools": None},
        {"role": "system", "content": "s"},
    ]
    assert as_system(messages) == [{"role": "system", "content": "d\n\ns"}, {"role": "user", "content": "u"}]
    first: list[Json] = [
        {"role": "developer", "content": "d", "tools": None},
        {"role": "user", "content": "u"},
    ]
    assert as_system(first) == [{"role": "system", "content": "d"}, {"role": "user", "content": "u"}]


def test_tools_get_the_engines_defaults() -> None:
    assert tool_list([{"type": "function", "function": {"name": "f"}}]) == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
    ]
    shuffled = {"function": {"parameters": {"b": 1}, "name": "f", "x": 1, "strict": True}, "y": 2}
    (tool,) = tool_list([shuffled]) or []
    assert list(tool) == ["type", "function"]
    assert list(tool["function"]) == ["name", "description", "parameters", "strict"]
    assert tool_list(None) is None


@pytest.mark.parametrize(
    "tools",
    [
        [],
        {},
        ["f"],
        [{"type": "custom", "function": {"name": "f"}}],
        [{"type": "function", "function": {"name": 3}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        [{"type": "function", "function": {"name": "f"}, "defer_loading": True}],
    ],
)
def test_odd_tools_are_not_counted(tools: Any) -> None:
    with pytest.raises(Uncountable):
        tool_list(tools)
