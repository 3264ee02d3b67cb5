"""How many parts a JSON body has, before anything is built of them.

Law 6: nothing slow on the loop. Each object, array, pair and string costs its reader as much as a hundred
bytes of text, and a parser that builds them holds the interpreter all the while: a body of 64 MiB may have
twenty million. No prompt that fits any context has so many, so they are refused unread. Numbers are not
counted: prompts of token ids are made of them.
"""

import re

from kvctl.proxy.limits import BadRequest

MOST_PARTS = 1_000_000
"""A message of a chat has seven, so this is more than a hundred thousand messages."""

# a string that does not end takes all the rest: trying again from each quote inside it would take for ever
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[{\[:]', re.DOTALL)


def has_too_many_parts(body: bytes) -> bool:
    """Whether ``body`` has more than ``MOST_PARTS``. Seconds for the worst of bodies: call it in a thread."""
    at_most = body.count(b'"') // 2 + 1 + sum(map(body.count, (b"{", b"[", b":")))
    if at_most <= MOST_PARTS:
        return False
    return any(number >= MOST_PARTS for number, _ in enumerate(_PART.finditer(body)))


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
