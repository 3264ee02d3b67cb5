"""How many parts a JSON body has, before anything is built of them.

Law 6: nothing slow on the loop. Each object, array, pair and string costs its reader as much as a hundred
bytes of text, and a parser that builds them holds the interpreter all the while: a body of 64 MiB may have
twenty million. No prompt that fits any context has so many, so they are refused unread. Numbers are not
counted: prompts of token ids are made of them.
"""

import re
from collections.abc import Iterator

from kvctl.proxy.limits import BadRequest

MOST_PARTS = 1_000_000
"""A message of a chat has seven, so this is more than a hundred thousand messages."""

_SLICE = 64 * 1024  # bytes that are searched at once: no other thread gets a turn meanwhile
_IN_STRING = rb'[^"\\]*+(?:\\.[^"\\]*+)*+("?)'  # up to the quote that ends it, or to the end of the slice
_PART = re.compile(rb'"' + _IN_STRING + rb"|[{\[:]", re.DOTALL)
_REST = re.compile(_IN_STRING, re.DOTALL)


def has_too_many_parts(body: bytes) -> bool:
    """Whether ``body`` has more than ``MOST_PARTS``. Seconds for the worst of bodies: call it in a thread."""
    quotes, *others = (_times(mark, body) for mark in (b'"', b"{", b"[", b":"))
    if quotes // 2 + 1 + sum(others) <= MOST_PARTS:
        return False
    return any(number > MOST_PARTS for number, _ in enumerate(parts(body), 1))


def _times(mark: bytes, body: bytes) -> int:
    return sum(body.count(mark, start, start + _SLICE) for start in range(0, len(body), _SLICE))


def parts(body: bytes, step: int = _SLICE) -> Iterator[bytes]:
    """What each part is or begins with; a string that does not end takes all the rest.

    At most ``step`` bytes (two or more) are searched at once.
    """
    start, inside = 0, False
    while start < len(body):
        stop = start + step
        if inside and (rest := _REST.match(body, start, stop)):  # it always matches
            inside, next_start = not rest[1], rest.end()
        else:
            inside, next_start = False, stop
            for part in _PART.finditer(body, start, stop):
                yield part[0]
                inside = part[1] == b""
                next_start = part.end() if inside else stop
        if inside and stop >= len(body):
            return  # nor does it go on from a backslash that is the last of all
        start = next_start


def too_many_parts() -> BadRequest:
    """The answer to such a body."""
    return BadRequest(
        status=413,
        message=(
            f"The request body has more than {MOST_PARTS} strings, keys, objects and arrays, the most that "
            "this server reads. Nothing was sent to the engine. Send fewer messages or items."
        ),
        type="request_too_large",
        code="request_too_large",
    )
