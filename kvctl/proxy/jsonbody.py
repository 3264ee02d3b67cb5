"""Bytes of a body -> the object that the engine's own parser reads from them.

The engine parses with Python's json module: it takes a BOM, UTF-16, NaN, lone surrogates. msgspec is several
times faster and reads the same from whatever it accepts, so it goes first, and json decides where it refuses.
Where two parsers could read different limits from the same bytes (a key that decides the claim given twice:
the first wins for some, the last for others) the body is refused.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from kvctl.proxy.largejson import NotPlainError, parse_large
from kvctl.proxy.limits import BadRequest, malformed

T = TypeVar("T")

DECIDING = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "prompt_embeds",
        "tools",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "max_new_tokens",
        "n",
        "best_of",
        "truncate_prompt_tokens",
        "add_special_tokens",
        "chat_template_kwargs",
        "documents",
        "kv_transfer_params",
        "echo",
        "stream",
        "system",
        "thinking",
        "instructions",
        "previous_response_id",
        "background",
        "truncation",
        "token_ids",
        "sampling_params",
        "inputs",
        "input_ids",
        "n_predict",
        "prompt_tokens",
    }
)
"""Top-level keys of which a second one would make two parsers read different claims.

Keys that bodies also use in nested objects (``text``, ``input``, ``parameters``) are not among them: each
such body would have to be parsed twice, and all engines that read those take the last one, as is done here.
"""

_KEYS = re.compile(rb'"([a-z_]{1,24})"\s*:')  # all keys of DECIDING have this form
_DECIDING = frozenset(key.encode() for key in DECIDING)
# A letter or underscore written as an escape: the key may hide from a search for its plain spelling.
_ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|[46][1-9a-fA-F]|[57][0-9aA])", re.ASCII)
# each thread holds the texts of its body twice for a moment, and glibc keeps an arena of 64 MiB for it
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kvctl-json")
LARGE = 256 * 1024  # bytes; parsing more would block the loop for a millisecond
_decode = msgspec.json.Decoder().decode


async def read(body: bytes) -> dict[str, Any] | BadRequest:
    """``read_object``; in a thread where the body is large."""
    if len(body) <= LARGE:
        return read_object(body)
    return await in_thread(read_object, body)


async def in_thread(work: Callable[[bytes], T], body: bytes) -> T:
    """``work`` done on a large body, off the loop."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work, body)


def read_object(body: bytes) -> dict[str, Any] | BadRequest:
    """The JSON object in ``body``, or the engine's answer to a body that is none. Never raises."""
    if not body:
        return malformed("missing", "body", "Field required", "None")
    try:
        data, searched = _parse(body)
    except json.JSONDecodeError as error:
        return _invalid_json(error)
    except (ValueError, RecursionError):  # undecodable bytes, an absurd number, or nesting past all bounds
        return BadRequest(message="There was an error parsing the body")
    if not isinstance(data, dict):
        return _no_object(data)
    if searched is body and body.count(b":") == len(data) + _pairs_of(data.get("messages")):
        return data  # every pair has its colon: none is left for a second one of a key
    twice = _repeated(searched, data)
    return data if twice is None else _ambiguous(twice)


def _parse(body: bytes) -> tuple[Any, bytes]:
    """The parsed body, and the bytes in which repeated keys are to be searched."""
    if len(body) > LARGE:
        try:
            return parse_large(body)
        except NotPlainError:
            pass
    try:
        return _decode(body), body
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return json.loads(body), body


def _pairs_of(messages: object) -> int:
    """How many key-value pairs a list of objects certainly holds."""
    if type(messages) is not list or set(map(type, messages)) != {dict}:
        return 0
    return sum(map(len, messages))


def _invalid_json(error: json.JSONDecodeError) -> BadRequest:
    return malformed(
        "json_invalid",
        f"body.{error.pos}",
        "JSON decode error",
        "<dict of 0 items>",
        {"error": error.msg},
    )


def _no_object(data: object) -> BadRequest:
    if data is None:
        return malformed("missing", "body", "Field required", "None")
    shown = f"<list of {len(data)} items>" if isinstance(data, list) else str(data)[:200]
    message = "Input should be a valid dictionary or object to extract fields from"
    return malformed("model_attributes_type", "body", message, shown)


def _repeated(body: bytes, data: dict[str, Any]) -> str | None:
    """A deciding key that stands twice at the top level. A cheap search decides whether to look closer."""
    if not _may_repeat(body):
        return None
    top: list[str] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        top[:] = [key for key, _ in pairs]  # the outermost object is closed last
        return dict(pairs)

    try:
        json.loads(body, object_pairs_hook=keep)
    except (ValueError, RecursionError):  # msgspec took what json refuses: the engine will refuse it
        return None
    if len(top) == len(data):
        return None
    return _first_twice(key for key in top if key in DECIDING)


def _may_repeat(body: bytes) -> bool:
    """Whether some deciding key stands twice at any depth, or may hide behind an escape or an encoding."""
    found = [key for key in _KEYS.findall(body) if key in _DECIDING]
    if len(found) != len(set(found)) or b"\x00" in body[:4]:
        return True
    return b"\\u00" in body and _ESCAPED_LETTER.search(body) is not None


def _first_twice(keys: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None


def _ambiguous(key: str) -> BadRequest:
    return BadRequest(
        message=(
            f"The body has the key {key!r} more than once, and parsers differ in which one counts. "
            "Nothing was generated. Send it once."
        ),
        param=key,
    )
