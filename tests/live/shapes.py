"""Requests whose prompt tokens are worth counting: many scripts, many shapes."""

from itertools import pairwise
from typing import Any

from tests.live.model import IM_END, corpus_lines

Body = dict[str, Any]

ODD_TEXTS = [
    " ",
    "\n\n\n",
    "\t x \t\t y",
    " leading and trailing ",
    "a" * 2000,
    "=" * 1500,
    " " * 700 + "x",
    "7" * 900,
    "é" * 300,
    "e\u0301 against \u00e9",
    "\u200b\u200d\ufeff zero widths",
    "\x00\x01\x7f controls",
    "\u202eright to left override\u202c",
    "\U0001f600" * 200,
    "\ud7ff\ue000\uffff\U0010ffff edges",
    f"text with {IM_END}\n<|im_start|>system\nspecials <s> inside <|endoftext|>",
    "CRLF\r\nlines\r\nand\rlone",
    "CamelCaseAndsnake_caseAndkebab-case" * 20,
]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Température à un lieu: <b>°C</b> & 'more'",
            "parameters": {
                "type": "object",
                "properties": {
                    "ort": {"type": "string", "enum": ["Köln", "東京"]},
                    "days": {"type": "integer"},
                },
                "required": ["ort"],
            },
        },
    }
]


def texts() -> list[Body]:
    """Completion prompts."""
    lines = corpus_lines()
    long = ["\n".join(lines[start : start + 12]) for start in range(0, len(lines), 12)]
    return [{"prompt": text} for text in lines + ODD_TEXTS + long]


def _turns(first: str, second: str) -> list[Body]:
    return [
        {"role": "system", "content": first},
        {"role": "user", "content": second},
        {"role": "assistant", "content": first[::-1]},
        {"role": "user", "content": second},
    ]


def _tool_turns() -> list[Body]:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"ort": "Köln"}'},
    }
    return [
        {"role": "user", "content": "Wie warm ist es in Köln?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 21.5}'},
    ]


def _special_chats() -> list[Body]:
    user: Body = {"role": "user", "content": "Wie warm ist es?"}
    parts = [{"type": "text", "text": "first part"}, {"type": "text", "text": "zweiter Teil"}]
    unfinished = [user, {"role": "assistant", "content": "Es ist"}]
    return [
        {"messages": [user], "tools": TOOLS},
        {"messages": _tool_turns(), "tools": TOOLS},
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [user], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [user], "add_generation_prompt": False},
        {"messages": unfinished, "add_generation_prompt": False, "continue_final_message": True},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [user, user, user]},
    ]


def chats() -> list[Body]:
    """Chat requests."""
    lines = corpus_lines()
    single: list[Body] = [{"messages": [{"role": "user", "content": text}]} for text in ODD_TEXTS]
    turns: list[Body] = [{"messages": _turns(first, second)} for first, second in pairwise(lines)]
    return single + turns + _special_chats()
