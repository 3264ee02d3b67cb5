"""Large JSON bodies, parsed in a thread that never holds the interpreter for long.

Law 6: nothing slow on the loop, and a thread that keeps the interpreter to itself blocks the loop just as
well. One parser call on 64 MB does that. So long strings, which are what makes bodies large, are cut out and
decoded piece by piece; what is left of the body is small. The result is the same: whatever is not understood
here is left to the parsers of ``jsonbody``.
"""

import re
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

LONG = 64 * 1024  # bytes of a string that is cut out, and of a piece of it
_UNITS = re.compile(rb'(?:[^\\"\x00-\x1f]+|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])*')
_ESCAPE = 12  # bytes of the longest escape: a pair of surrogates
_LOOKS = 64
_HIGH = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_decode = msgspec.json.Decoder().decode
_decode_text = msgspec.json.Decoder(str).decode


class NotPlainError(ValueError):
    """The body has a form that is not handled here."""


def parse_large(body: bytes) -> tuple[Any, bytes]:
    """The parsed ``body``, and its bytes without the long strings. Raises NotPlainError."""
    mark = secrets.token_hex(8)
    texts: dict[str, str] = {}
    rest: list[bytes] = []
    done = 0
    for start, end in _long_strings(body):
        name = f"{mark}:{len(texts)}"
        texts[name] = _text(body, start, end)
        rest += (body[done:start], name.encode())
        done = end
    rest.append(body[done:])
    bones = b"".join(rest)
    try:
        data = _decode(bones)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise NotPlainError(str(error)) from error
    if texts and not isinstance(data, (dict, list)):
        raise NotPlainError("a long string is all that there is")
    if texts and _filled(data, texts) != len(texts):
        raise NotPlainError("a long string is a key")
    return data, bones


def _long_strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Where the contents of long strings are: from behind the opening quote to the closing one."""
    start = body.find(b'"')
    while start >= 0:
        end = _closing(body, start + 1)
        if end - start > LONG:
            yield start + 1, end
        start = body.find(b'"', end + 1)


def _closing(body: bytes, start: int) -> int:
    """The quote that ends the string whose content begins at ``start``. Raises NotPlainError."""
    end = body.find(b'"', start)
    while end >= 0:
        slashes = end
        while slashes > start and body[slashes - 1] == 0x5C:
            slashes -= 1
        if (end - slashes) % 2 == 0:
            return end
        end = body.find(b'"', end + 1)
    raise NotPlainError("a string does not end")


def _text(body: bytes, start: int, end: int) -> str:
    pieces = []
    while start < end:
        stop = _border(body, start, min(start + LONG, end), end)
        try:
            pieces.append(_decode_text(b'"' + body[start:stop] + b'"'))
        except (msgspec.MsgspecError, ValueError) as error:
            raise NotPlainError(str(error)) from error
        start = stop
    return "".join(pieces)


def _border(body: bytes, start: int, stop: int, end: int) -> int:
    """The last place up to ``stop`` where no character and no escape is cut in two. Raises NotPlainError."""
    if stop == end:
        return end
    stop = _outside_escapes(body, start, stop)
    while stop > start and 0x80 <= body[stop] < 0xC0:
        stop -= 1
    if stop == start:
        raise NotPlainError("a string that cannot be cut")
    return stop


def _outside_escapes(body: bytes, start: int, stop: int) -> int:
    """The last place up to ``stop`` that is not inside an escape; where they are dense, all are matched."""
    place = stop
    for _ in range(_LOOKS):
        found = body.rfind(b"\\", max(start, place - _ESCAPE), place)
        if found < 0:
            return place
        place = found
    units = _UNITS.match(body, start, stop)
    place = start if units is None else units.end()
    return place - 6 if _HIGH.search(body, max(start, place - 6), place) else place


def _filled(data: Any, texts: dict[str, str]) -> int:
    """Put the texts back in place of their names; returns how many. Iterative: nesting exhausts no stack."""
    filled, stack = 0, [data]
    while stack:
        inside = stack.pop()
        places = inside.items() if isinstance(inside, dict) else enumerate(inside)
        for place, item in list(places):
            if isinstance(item, str) and item in texts:
                inside[place] = texts[item]
                filled += 1
            elif isinstance(item, (dict, list)):
                stack.append(item)
    return filled
