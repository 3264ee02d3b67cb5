"""OpenAI's response items as the chat conversation that vLLM 0.32 makes of them.

Instructions become the system message; a text input one user message. Items of an assistant that follow
each other (reasoning, text, function calls) are merged into one message; outputs of functions become tool
messages; messages of other roles stay as they are. A kept conversation comes before the new items, without
its system messages, and its answers as one message for each text.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvctl.proxy.readers.base import OddShapeError

Message = dict[str, Any]

_PARTIAL = ("in_progress", "incomplete")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict", "defer_loading")
# the engine hands these to no template
_UNRENDERED_TOOLS = frozenset(
    {
        *("web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11"),
        *("file_search", "computer_use_preview", "code_interpreter", "image_generation", "local_shell"),
    }
)


def as_chat(data: Mapping[str, Any], before: Iterable[Mapping[str, Any]] = ()) -> Message:
    """The chat body of a responses body. ``before``: the conversation that it continues.

    Raises OddShapeError.
    """
    given = data.get("input")
    messages, new = list[Message](), list[Message]()
    if data.get("instructions"):
        messages.append({"role": "system", "content": data["instructions"]})
    messages += [dict(message) for message in before if message["role"] != "system"]
    if isinstance(given, str):
        new.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            _convert(item, new)
    else:
        raise OddShapeError("input")
    resumes = isinstance(given, list) and _is_partial(given)
    chat: Message = {
        "model": data.get("model"),
        "messages": messages + new,
        "add_generation_prompt": not resumes,
        "continue_final_message": resumes,
        "add_special_tokens": True,  # beside those that the template prints
    }
    if tools := _tools(data.get("tools")):
        chat["tools"] = tools
    if data.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = data["chat_template_kwargs"]
    reasoning = data.get("reasoning")
    if isinstance(reasoning, Mapping) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _is_partial(items: list[Any]) -> bool:
    last = items[-1] if items else None
    if not isinstance(last, Mapping) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in _PARTIAL


def _convert(item: Any, messages: list[Message]) -> None:
    if not isinstance(item, Mapping):
        raise OddShapeError("an item that is no object")
    kind = item.get("type")
    if kind == "function_call":
        _call(item, messages)
    elif kind == "reasoning":
        _join(messages, "reasoning", _reasoning(item))
    elif kind == "function_call_output":
        messages.append(_tool_result(item))
    elif item.get("role") == "assistant" and kind in (None, "message"):
        _join(messages, "content", _assistant_text(item))
    elif isinstance(item.get("role"), str) and kind in (None, "message"):
        messages.append(dict(item))
    else:
        raise OddShapeError("an item of an unknown type")


def _join(messages: list[Message], key: str, value: Any) -> None:
    """Add ``key`` to the assistant's message before, if it has none yet; else begin a new message."""
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant" and last.get(key) is None:
        last[key] = value
    else:
        messages.append({"role": "assistant", key: value})


def _call(item: Mapping[str, Any], messages: list[Message]) -> None:
    texts = [item.get(key) for key in ("name", "arguments", "call_id")]
    if not all(isinstance(text, str) for text in texts):
        raise OddShapeError("a function call of another form")
    name = f"{item['namespace']}__{item['name']}" if item.get("namespace") else item["name"]
    function = {"name": name, "arguments": item["arguments"]}
    call = {"id": item["call_id"], "function": function, "type": "function"}
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant":
        last.setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _reasoning(item: Mapping[str, Any]) -> str:
    """The first text of the item's content, else of its summary."""
    content, summary = item.get("content"), item.get("summary")
    if item.get("encrypted_content") or not isinstance(summary, list):
        raise OddShapeError("reasoning of another form")
    texts = content or summary
    return _first_text(texts) if texts else ""


def _assistant_text(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    return content if isinstance(content, str) else _first_text(content)


def _first_text(parts: Any) -> str:
    first = parts[0] if isinstance(parts, list) and parts else None
    text = first.get("text") if isinstance(first, Mapping) else None
    if not isinstance(text, str):
        raise OddShapeError("a part without text")
    return text


def _tool_result(item: Mapping[str, Any]) -> Message:
    if not isinstance(item.get("call_id"), str):
        raise OddShapeError("an output without its call")
    return {"role": "tool", "content": item.get("output"), "tool_call_id": item["call_id"]}


def _tools(tools: Any) -> list[Message]:
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise OddShapeError("tools")
    shown = []
    for tool in tools:
        if tool.get("type") == "function":
            function = {key: tool[key] for key in _FUNCTION_KEYS if tool.get(key) is not None}
            shown.append({"type": "function", "function": function})
        elif tool.get("type") not in _UNRENDERED_TOOLS:
            raise OddShapeError("a tool of another type")
    return shown
