"""How prompts begin: hashes at borders, by which the gate knows what requests share.

A chain hash over the token ids at every ``BORDER`` tokens, keyed anew in each process: where two of these
64-bit values are equal, so are all tokens up to there, and they tell nothing else of the prompt. The ids are
hashed in short runs, so that a long prompt in a worker thread lets the loop go on between them.
"""

import asyncio
import hashlib
import secrets
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvctl.core.claim import Prefix

BORDER = 128
RUN = 32 * BORDER
INLINE = 4096  # ids that are hashed on the loop: a tenth of a millisecond
_ID_BYTES = array("Q").itemsize
_KEY = secrets.token_bytes(16)

_SCORES = ("prompt_logprobs", "prompt_logprob_token_ids")


def own_key() -> bytes:
    """The key of this process's hashes."""
    return _KEY


def use_key(key: bytes) -> None:
    """Use the key of another process that counts for the same gate; call it before anything is hashed."""
    global _KEY  # noqa: PLW0603 - one a process, by design
    _KEY = key


class Tokens(int):
    """A number of prompt tokens that knows how the prompt begins."""

    prefix: Prefix = ()

    def __new__(cls, count: int, prefix: Prefix = ()) -> Self:
        """``count`` tokens; an empty ``prefix``: shorter than a border."""
        made = super().__new__(cls, count)
        made.prefix = prefix
        return made


def prefix_of(ids: Sequence[int]) -> Prefix:
    """``(tokens, hash)`` at every border before the last token, which no engine takes from its cache.

    Ids that no engine would accept (negative, or beyond 64 bits) share with nothing.
    """
    if len(ids) <= BORDER:
        return ()
    chain, borders = hashlib.blake2b(digest_size=8, key=_KEY), []
    last = (len(ids) - 1) // BORDER * BORDER
    try:
        for start in range(0, last, RUN):
            run = memoryview(array("Q", ids[start : min(start + RUN, last)])).cast("B")
            for end in range(BORDER, len(run) // _ID_BYTES + 1, BORDER):
                chain.update(run[(end - BORDER) * _ID_BYTES : end * _ID_BYTES])
                borders.append((start + end, int.from_bytes(chain.digest(), "big")))
    except (TypeError, OverflowError):
        return ()
    return tuple(borders)


async def prefixes_of_lists(lists: Sequence[Sequence[int]]) -> tuple[Prefix, ...]:
    """One prefix for each prompt of ids; long ones in a thread."""

    def hashed() -> tuple[Prefix, ...]:
        return tuple(map(prefix_of, lists))

    return hashed() if sum(map(len, lists)) <= INLINE else await asyncio.to_thread(hashed)


def prefixes_of(counts: Sequence[int]) -> tuple[Prefix, ...]:
    """One prefix per prompt; empty where the beginning of any of them is not known."""
    known = [count.prefix for count in counts if isinstance(count, Tokens)]
    return tuple(known) if len(known) == len(counts) else ()


def as_cached(prefixes: tuple[Prefix, ...], body: Mapping[str, Any]) -> tuple[Prefix, ...]:
    """The prefixes as far as the engine's cache knows them for this body.

    ``cache_salt`` keeps callers apart, and the cache is not read where log-probabilities of the prompt are
    asked for.
    """
    if not prefixes:
        return ()
    scored = body.get("echo") and body.get("logprobs") is not None
    if scored or any(body.get(field) is not None for field in _SCORES):
        return ()
    salt = body.get("cache_salt")
    if salt is None:
        return prefixes
    mixed = hashlib.blake2b(str(salt).encode("utf-8", "surrogatepass"), digest_size=8, key=_KEY).digest()
    mask = int.from_bytes(mixed, "big")
    return tuple(tuple((tokens, known ^ mask) for tokens, known in prefix) for prefix in prefixes)
