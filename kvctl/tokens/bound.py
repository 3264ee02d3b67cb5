"""Upper bounds on prompt tokens from bytes: the last resort, and never proof of a 400 (law 4).

A token stands for at least one byte in byte-level BPE and in SentencePiece with byte fallback, so a text has
at most as many tokens as UTF-8 bytes, plus the special tokens that are added. What breaks this is a
normaliser that expands (NFKC turns some ligatures of 3 bytes into 33), so non-ASCII text is measured in its
decomposed form, up to ``NORMALISE_BYTES``; beyond that its own bytes have to do.
"""

import unicodedata
from collections.abc import Mapping
from typing import Any

SPECIALS_PER_TEXT = 8
TOKENS_PER_MESSAGE = 16
"""Role, turn markers and line breaks that a template puts around one message."""
TOKENS_PER_REQUEST = 1024
"""Default system prompt, tool instructions and generation prompt that templates add by themselves."""
TOKENS_PER_SCALAR = 24
"""A number or literal of a tool schema, as JSON."""
NORMALISE_BYTES = 256 * 1024


SCALARS = frozenset({int, float, bool, type(None)})


def text_bound(text: str) -> int:
    """Most tokens that ``text`` can have, special tokens not counted. Lone surrogates count 3 bytes."""
    if text.isascii():
        return len(text)
    raw = len(text.encode("utf-8", "surrogatepass"))
    if raw > NORMALISE_BYTES:
        return raw
    return max(raw, len(unicodedata.normalize("NFKD", text).encode("utf-8", "surrogatepass")))


def json_bound(value: Any) -> int:
    """Most tokens of all text in a JSON value. Iterative: nesting cannot exhaust the stack."""
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += text_bound(item) + 2
        elif isinstance(item, Mapping):
            total += 2
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            total += 2 + len(item)
            if SCALARS.issuperset(map(type, item)):  # token ids, say: there may be millions
                total += TOKENS_PER_SCALAR * len(item)
            else:
                stack.extend(item)
        else:
            total += TOKENS_PER_SCALAR
    return total


CHAT_KEYS = ("messages", "tools", "documents", "chat_template_kwargs", "chat_template", "reasoning_effort")
"""The keys of a chat body that can reach the prompt."""


def chat_bound(body: Mapping[str, Any]) -> int:
    """Most prompt tokens of a chat body, media parts apart."""
    messages = body.get("messages")
    turns = len(messages) if isinstance(messages, list) else 1
    written = sum(json_bound(body[key]) for key in CHAT_KEYS if body.get(key) is not None)
    return written + turns * TOKENS_PER_MESSAGE + TOKENS_PER_REQUEST
