"""An Anthropic conversation as the chat conversation that vLLM 0.32 makes of it.

System blocks become one system message, ``tool_use`` a tool call, ``tool_result`` a tool message that goes
before the message it stood in, ``thinking`` the reasoning of its message, images image parts, and tools get
``input_schema`` as their parameters. Billing headers that coding agents put into system texts are dropped.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from kvctl.proxy.readers.base import OddShapeError

Message = dict[str, Any]

_BILLING_HEADER = "x-anthropic-billing-header"
_NO_CALL_ID = "call_1700000000"  # as long as the id that the engine makes from the time
_IMAGE: Message = {"type": "image_url", "image_url": {"url": ""}}
_SILENT = frozenset({"redacted_thinking", "tool_reference"})
_TOOL_KEYS = ("strict", "defer_loading")


def as_chat(data: Mapping[str, Any], *, merge_system: bool) -> Message:
    """The chat body. ``merge_system``: the template wants one system message, in front.

    Raises OddShapeError.
    """
    messages = data.get("messages")
    if not isinstance(messages, list):
        raise OddShapeError("messages")
    system = _system_texts(data.get("system"))
    if merge_system:
        system += [text for m in messages if _role(m) == "system" and (text := _system_text(m))]
    converted: list[Message] = [{"role": "system", "content": "".join(system)}] if system else []
    for message in messages:
        _convert(message, converted, merge_system=merge_system)
    chat: Message = {"model": data.get("model"), "messages": converted}
    if tools := _tools(data.get("tools")):
        chat["tools"] = tools
    if data.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = data["chat_template_kwargs"]
    if (effort := _effort(data)) is not None:
        chat["reasoning_effort"] = effort
    return chat


def has_inline_system(data: Mapping[str, Any]) -> bool:
    """Whether a message of the conversation itself is a system message."""
    messages = data.get("messages")
    return isinstance(messages, list) and any(_role(message) == "system" for message in messages)


def _effort(data: Mapping[str, Any]) -> Any:
    config = data.get("output_config")
    return config.get("effort") if isinstance(config, Mapping) else None


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _blocks(content: Any) -> list[Mapping[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise OddShapeError("content is neither text nor a list of blocks")
    return content


def _system_texts(content: Any) -> list[str]:
    """Texts of a system prompt. A header in a plain system string stays, as the engine leaves it there."""
    if not content:
        return []
    return [content] if isinstance(content, str) else _block_texts(content)


def _block_texts(content: Any) -> list[str]:
    texts = [block.get("text") for block in _blocks(content) if block.get("type") == "text"]
    return [t for t in texts if isinstance(t, str) and t and not t.startswith(_BILLING_HEADER)]


def _system_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return "" if content.startswith(_BILLING_HEADER) else content
    if any(block.get("type") != "text" for block in _blocks(content)):
        raise OddShapeError("a system message that changes the tools")
    return "".join(_block_texts(content))


def _convert(message: Any, converted: list[Message], *, merge_system: bool) -> None:
    role = _role(message)
    if role == "system":
        text = "" if merge_system else _system_text(message)
        if text:
            converted.append({"role": "system", "content": text})
        return
    if role not in ("user", "assistant"):
        raise OddShapeError("role")
    content, result = message.get("content"), {"role": role}
    if isinstance(content, str):
        result["content"] = content
    else:
        blocks = _Blocks(str(role), converted)
        for block in _blocks(content):
            blocks.add(block)
        blocks.fill(result)
    if role == "assistant" or "content" in result:
        converted.append(result)


class _Blocks:
    """What the blocks of one message come to. Tool results go before it, into ``before``."""

    def __init__(self, role: str, before: list[Message]) -> None:
        self._role = role
        self._before = before
        self._parts: list[Message] = []
        self._calls: list[Message] = []
        self._thoughts: list[str] = []

    def add(self, block: Mapping[str, Any]) -> None:
        """One block more. Raises OddShapeError."""
        kind = block.get("type")
        if kind in _SILENT:
            return
        add = _ADD.get(kind) if isinstance(kind, str) else None
        if add is None:
            raise OddShapeError("a block of an unknown type")
        add(self, block)

    def fill(self, message: Message) -> None:
        """Everything into ``message``, in the engine's order of keys."""
        if self._thoughts:
            message["reasoning"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        if self._parts:
            alone = len(self._parts) == 1 and self._parts[0]["type"] == "text"
            message["content"] = self._parts[0]["text"] if alone else self._parts

    def text(self, block: Mapping[str, Any]) -> None:
        """A text block; empty ones are dropped."""
        if block.get("text"):
            self._parts.append({"type": "text", "text": block["text"]})

    def image(self, block: Mapping[str, Any]) -> None:
        """An image, whatever its source: it is bounded, not counted."""
        if block.get("source"):
            self._parts.append(_IMAGE)

    def thinking(self, block: Mapping[str, Any]) -> None:
        """Thinking, joined to the reasoning of the message."""
        if isinstance(block.get("thinking"), str):
            self._thoughts.append(block["thinking"])

    def tool_use(self, block: Mapping[str, Any]) -> None:
        """A tool call."""
        self._calls.append(_call(block))

    def tool_result(self, block: Mapping[str, Any]) -> None:
        """A tool result: a message of its own, or text where it is the assistant's."""
        if self._role == "assistant":
            self._parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        else:
            self._before += _tool_result(block)


_ADD: dict[str, Callable[[_Blocks, Mapping[str, Any]], None]] = {
    "text": _Blocks.text,
    "image": _Blocks.image,
    "thinking": _Blocks.thinking,
    "tool_use": _Blocks.tool_use,
    "tool_result": _Blocks.tool_result,
}


def _call(block: Mapping[str, Any]) -> Message:
    given = block.get("input") or {}
    if not isinstance(given, Mapping):
        raise OddShapeError("tool input")
    function = {"name": block.get("name") or "", "arguments": json.dumps(given)}
    return {"id": block.get("id") or _NO_CALL_ID, "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any]) -> list[Message]:
    """The tool's message, and a user's with the images that came with it."""
    content = block.get("content")
    items = [] if isinstance(content, str) or content is None else _blocks(content)
    if any(item.get("type") == "tool_reference" for item in items):
        raise OddShapeError("a reference to a tool")
    texts = [str(item.get("text", "")) for item in items if item.get("type") == "text"]
    text = content if isinstance(content, str) else "\n".join(texts)
    result: Message = {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text}
    images = [_IMAGE for item in items if item.get("type") == "image"]
    return [result, {"role": "user", "content": images}] if images else [result]


def _tools(tools: Any) -> list[Message]:
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise OddShapeError("tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> Message:
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise OddShapeError("a tool without a schema")
    function: Message = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": dict(schema) if "type" in schema else {**schema, "type": "object"},
    }
    function |= {key: tool[key] for key in _TOOL_KEYS if tool.get(key) is not None}
    return {"type": "function", "function": function}
