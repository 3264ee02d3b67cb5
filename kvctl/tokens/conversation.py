"""Messages and tools of a chat body, in the form in which vLLM 0.32 hands them to the template.

The engine validates and rebuilds every message before the template sees it: unknown keys fall away, null
content becomes empty, parts are joined (or wrapped, where the template iterates over them), arguments of tool
calls are parsed, keys come in the order of the engine's own types, and tools get their defaults. Templates
that print JSON show all of this, so a count is exact only when it is repeated here. Whatever is not known
for certain raises ``Uncountable``: the engine, or a bound, then has to tell.
"""

import json
from collections.abc import Mapping
from typing import Any

from kvctl.tokens.source import Uncountable, Why

Message = dict[str, Any]

_BILLING_HEADER = "x-anthropic-billing-header"  # dropped by the engine from system texts
_TEXT_KEY = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Keys of parts that the engine knows, and drops from the wrapped form; others stay.
_KNOWN_PART_KEYS = frozenset(
    {
        *("type", "text", "refusal", "thinking", "closed", "image_url", "image_embeds", "image_pil", "uuid"),
        *("input_audio", "audio_url", "audio_embeds", "video_url", "video_embeds", "prompt_embeds", "data"),
        *("file", "name", "detail", "prompt_cache_breakpoint"),
    }
)
_CALL_KEYS = ("id", "function", "type")
_FUNCTION_KEYS = ("arguments", "name")


def _unsure(detail: str) -> Uncountable:
    return Uncountable(Why.SHAPE, detail)


def conversation(messages: Any, *, wrap: bool) -> list[Message]:
    """The messages as the template gets them. ``wrap``: it wants lists of parts. Raises Uncountable."""
    if not isinstance(messages, list) or not messages:
        raise _unsure("messages is no list, or empty")
    return [_message(message, wrap=wrap) for message in messages]


def _message(message: Any, *, wrap: bool) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _unsure("a message without a role")
    role, content = message["role"], message.get("content")
    if len(message) == 2 and not wrap and isinstance(content, str) and _stays(role, content):
        return {"role": role, "content": content}  # by far the most common
    texts = _parts(content)
    if role == "system":
        texts = _without_billing_header(texts)
    result: Message = {"role": role, "content": texts if wrap else _joined(texts)}
    if role == "assistant":
        result |= _assistant(message)
    elif role == "tool":
        result |= _tool_result(message, texts)
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    if role == "developer":
        result["tools"] = message.get("tools")
    return result


def _stays(role: str, text: str) -> bool:
    """Whether a message with only these two is passed to the template as it is."""
    return role in ("user", "assistant") or (role == "system" and not text.startswith(_BILLING_HEADER))


def _parts(content: Any) -> list[Message]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _unsure("content is neither text nor a list")
    return [part for item in content if (part := _part(item)) is not None]


def _part(item: Any) -> Message | None:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind == "tool_reference" or not isinstance(kind, str) or kind not in _TEXT_KEY or item.get("uuid"):
        raise _unsure("a content part that is no plain text")
    text = item.get(_TEXT_KEY[kind])
    if text is None and kind in ("text", "refusal"):
        return None
    if not isinstance(text, str):
        raise _unsure("a text part without text")
    extra = {key: value for key, value in item.items() if key not in _KNOWN_PART_KEYS}
    return {"type": "text", "text": text, **extra}


def _joined(parts: list[Message]) -> str:
    return "\n".join(part["text"] for part in parts)


def _without_billing_header(parts: list[Message]) -> list[Message]:
    kept = []
    for part in parts:
        if not part["text"].startswith(_BILLING_HEADER):
            kept.append(part)
        elif rest := part["text"].partition("\n")[2]:
            kept.append({**part, "text": rest})
    return kept


def _assistant(message: Mapping[str, Any]) -> Message:
    result: Message = {}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _unsure("tool_calls is no list")
    if calls:
        result["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return result


def _call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if (
        not isinstance(function, Mapping)
        or call.get("type") != "function"
        or not isinstance(call.get("id"), str)
    ):
        raise _unsure("a tool call of another form")
    if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str):
        raise _unsure("a tool call without name or arguments")
    ordered = {"arguments": _arguments(function["arguments"]), "name": function["name"]}
    ordered |= {key: value for key, value in function.items() if key not in _FUNCTION_KEYS}
    result = {"id": call["id"], "function": ordered, "type": "function"}
    return result | {key: value for key, value in call.items() if key not in _CALL_KEYS}


def _arguments(text: str) -> dict[str, Any]:
    """Templates want a mapping; the engine turns everything else into an empty one."""
    try:
        parsed = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _tool_result(message: Mapping[str, Any], parts: list[Message]) -> Message:
    result: Message = {"content": _joined(parts)}
    if "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    return result


def as_system(messages: list[Message]) -> list[Message]:
    """Developer messages as system ones, merged into the first: for templates that know no such role."""
    if "developer" not in [message["role"] for message in messages]:
        return messages
    renamed = [
        {k: v for k, v in m.items() if k != "tools"} | {"role": "system"} if m["role"] == "developer" else m
        for m in messages
    ]
    places = [i for i, message in enumerate(renamed) if message["role"] == "system"]
    if places == [0]:
        return renamed
    contents = (_system_text(renamed[i]["content"]) for i in places)
    merged = {"role": "system", "content": "\n\n".join(text for text in contents if text)}
    return [merged, *(message for message in renamed if message["role"] != "system")]


def _system_text(content: Any) -> str:
    return content if isinstance(content, str) else _joined(content)


def tool_list(tools: Any) -> list[Message] | None:
    """The tools with the engine's defaults and key order; None when there are none. Raises Uncountable."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise _unsure("tools is no list, or empty")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> Message:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise _unsure("a tool that is no function")
    described, parameters = function.get("description"), function.get("parameters")
    if (
        not isinstance(function.get("name"), str)
        or not isinstance(described, str | None)
        or not isinstance(parameters, dict | None)
        or not isinstance(function.get("strict"), bool | None)
        or tool.get("defer_loading") is not None
        or function.get("defer_loading") is not None
    ):
        raise _unsure("a function of another form")
    dumped = {"name": function["name"], "description": described, "parameters": parameters}
    if function.get("strict") is not None:
        dumped["strict"] = function["strict"]
    return {"type": "function", "function": dumped}
