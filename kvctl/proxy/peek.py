"""What the choice among several engines needs of a body before it is read: the model and the prefix.

Law 5: bytes pass unchanged. Where a caller used an alias, ``renamed`` replaces the value of ``model`` and not
another byte; that is the only rewriting there is, and a response header tells of it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from kvctl.core.claim import Prefix

_MOST_MARKS = 256  # of one body
_STEP = 2048  # bytes of a plain text between two marks
_BYTES_PER_TOKEN = 4  # roughly; affinity weighs shares of one prompt, so only the proportion counts
_ABSENT = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    """The fields that are looked at, as raw JSON of any type; the rest of the body is skipped, not built."""

    model: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    system: msgspec.Raw = _ABSENT
    instructions: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    inputs: msgspec.Raw = _ABSENT
    text: msgspec.Raw = _ABSENT
    previous_response_id: msgspec.Raw = _ABSENT


_HEAD = ("model", "tools", "system", "instructions")
_PROMPTS = ("messages", "prompt", "input", "inputs", "text")
_decoder = msgspec.json.Decoder(_Body)
_items = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Peek:
    """``model`` is "" where none is named. ``previous``: the stored response that the request continues."""

    model: str = ""
    previous: str = ""
    prefixes: tuple[Prefix, ...] = ()


def peek(body: bytes) -> Peek:
    """A first look at a JSON body. Never raises; of anything but a JSON object it tells nothing."""
    try:
        seen = _decoder.decode(body)
        return Peek(
            model=_text(_value(seen.model)),
            previous=_text(_value(seen.previous_response_id)),
            prefixes=_prefixes(seen),
        )
    except (msgspec.MsgspecError, ValueError, RecursionError):  # what was skipped may nest too deep, too
        return _slow_look(body)


def _slow_look(body: bytes) -> Peek:
    """What msgspec refuses and the engines' parser may take: NaN, a BOM, UTF-16."""
    try:
        seen = json.loads(body)
    except (ValueError, RecursionError):
        return Peek()
    if not isinstance(seen, dict):
        return Peek()
    return Peek(model=_text(seen.get("model")), previous=_text(seen.get("previous_response_id")))


def _value(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _prefixes(seen: _Body) -> tuple[Prefix, ...]:
    """The prompt's prefix by its bytes: one chain of (tokens so far, hash of all so far)."""
    chain = blake2b(digest_size=8)
    size = 0
    for name in _HEAD:
        part = bytes(getattr(seen, name))
        chain.update(part)
        size += len(part)
    marks = []
    for part in _pieces(
        next((raw for name in _PROMPTS if (raw := getattr(seen, name)) is not _ABSENT), _ABSENT)
    ):
        chain.update(part)
        size += len(part)
        marks.append((size // _BYTES_PER_TOKEN, int.from_bytes(chain.digest(), "big")))
        if len(marks) == _MOST_MARKS:
            break
    return (tuple(marks),) if marks else ()


def _pieces(raw: msgspec.Raw) -> Iterator[bytes]:
    """Whole messages of a list, or whole steps of a text: the units that another request may share."""
    data = bytes(raw)
    if data[:1] == b"[":
        yield from map(bytes, _items.decode(raw))
    else:
        yield from (data[at : at + _STEP] for at in range(0, len(data) - _STEP + 1, _STEP))


_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")


def renamed(body: bytes, model: str) -> bytes | None:
    """The body with ``model`` as the value of its top-level ``model``; None where there is no such text."""
    span = _model_span(body)
    if span is None:
        return None
    return body[: span[0]] + json.dumps(model, ensure_ascii=False).encode() + body[span[1] :]


def _model_span(body: bytes) -> tuple[int, int] | None:
    """Where the value of the top-level ``model`` stands, its quotes included."""
    depth = 0
    for token in _TOKEN.finditer(body):
        text = token[0]
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and _is_model(text):
            colon = _COLON.match(body, token.end())
            value = _TOKEN.match(body, colon.end()) if colon else None
            if colon and value and value[0].startswith(b'"'):
                return value.span()
            if colon:
                return None
    return None


def _is_model(text: bytes) -> bool:
    if text == b'"model"':
        return True
    try:
        return b"\\" in text and len(text) < 64 and json.loads(text) == "model"
    except ValueError:
        return False
