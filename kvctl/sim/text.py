"""The simulated engine's tokenizer, template and answers: deterministic, reversible, and quick.

One token is four bytes of UTF-8 (the last one of a text may be shorter); its id holds the bytes and how
many they are. A completion prompt begins with a BOS unless ``add_special_tokens`` is false. A chat
message is rendered as ``<|role|>text<|end|>``, each marker one special token, and the generation prompt
is one marker more; so a chat of k messages has BOS + k x (2 + its text's tokens) + 1 tokens. Generated
tokens are four ASCII bytes each, so that answers count the same when they come back in the next prompt.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

TOKEN_BYTES = 4
BOS = 0
END = 1
GENERATE = 2
_ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6, "developer": 7}
_OTHER_ROLE = 8
_FIRST_TEXT_ID = 1 << 32
"""Ids of text tokens are (1 << 32) x number of bytes + the bytes as a big-endian number."""

_WORDS = (
    " the",
    " KV.",
    " of ",
    "pool",
    " and",
    " one",
    " is,",
    "full",
    " a b",
    "lock",
    " or ",
    "not:",
    " ask",
)


def encode(text: str) -> list[int]:
    """Token ids of a text, no specials."""
    data = text.encode("utf-8", "surrogatepass")
    pieces = (data[i : i + TOKEN_BYTES] for i in range(0, len(data), TOKEN_BYTES))
    return [_FIRST_TEXT_ID * len(piece) + int.from_bytes(piece, "big") for piece in pieces]


def count(text: str) -> int:
    """Number of tokens of a text, no specials."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return -(-size // TOKEN_BYTES)


def decode(tokens: Sequence[int]) -> str:
    """The text of token ids; specials have none. Raises ValueError on an id that no text has."""
    data = bytearray()
    for token in tokens:
        size, value = divmod(token, _FIRST_TEXT_ID)
        if size:
            if size > TOKEN_BYTES or value >= 1 << (8 * size):
                raise ValueError(f"no such token: {token}")
            data += value.to_bytes(size, "big")
    return data.decode("utf-8", "replace")


def chat_text(message: Mapping[str, Any]) -> str:
    """What a message contributes as text: its content, text parts joined, tool calls as JSON.

    Raises ValueError on a part that is not text.
    """
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise ValueError("only text content is understood")
        content = "".join(str(part.get("text", "")) for part in content)
    calls = message.get("tool_calls")
    return ("" if content is None else str(content)) + (json.dumps(calls) if calls else "")


def render_chat(body: Mapping[str, Any]) -> list[int]:
    """Token ids of a chat request, generation prompt included unless it is switched off."""
    tokens = [BOS]
    if body.get("tools"):
        tokens += [_ROLES["system"], *encode(json.dumps(body["tools"])), END]
    for message in body["messages"]:
        role = _ROLES.get(str(message.get("role")), _OTHER_ROLE)
        tokens += [role, *encode(chat_text(message)), END]
    return [*tokens, GENERATE] if body.get("add_generation_prompt", True) else tokens


def count_chat(body: Mapping[str, Any]) -> int:
    """``len(render_chat(body))`` without building it."""
    tokens = 1 + sum(2 + count(chat_text(message)) for message in body["messages"])
    if body.get("tools"):
        tokens += 2 + count(json.dumps(body["tools"]))
    return tokens + (1 if body.get("add_generation_prompt", True) else 0)


def block_hashes(tokens: Sequence[int], block_size: int, salt: str = "") -> tuple[int, ...]:
    """For each full block of a prompt a hash of all tokens up to its end."""
    known, hashes = hash(salt), []
    for end in range(block_size, len(tokens) + 1, block_size):
        known = hash((known, *tokens[end - block_size : end]))
        hashes.append(known)
    return tuple(hashes)


def word(position: int) -> str:
    """The text of the output token at ``position``: four ASCII bytes without anything JSON would escape."""
    return _WORDS[position % len(_WORDS)]
