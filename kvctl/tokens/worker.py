"""The process that counts for ``IsolatedCounter``; its arguments are FOLDER MAX_CHARS WORKERS.

Standard input is a socket to kvctl. Each message is its length (4 bytes, big-endian) and as many bytes of
``marshal``: what kvctl sends is ``(number, kind, arguments)``, what it gets back ``(number, answer, facts)``.
The first message in is the key for hashes of beginnings and which way to load the files, the first one out
tells that they are loaded.
The process ends when the socket does. It runs at a lower priority than kvctl: where cores are scarce, a long
prompt should wait for the streams, not the other way round.
"""

import marshal
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvctl.tokens.begin import Tokens, use_key
from kvctl.tokens.files import TokenizerError, load_files
from kvctl.tokens.source import Uncountable, View
from kvctl.tokens.tokeniser import Tokeniser

LENGTH = struct.Struct(">I")
COUNTS, FAILED = "counts", "failed"
NICER = 5  # a third of the share of a core; more would let a busy machine starve the counts


def read_message(read: Callable[[int], bytes]) -> Any:
    """The next message. ``read(n)`` gives n bytes, or fewer at the end. Raises EOFError."""
    head = read(LENGTH.size)
    body = read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
    if not body:
        raise EOFError
    return marshal.loads(body)  # noqa: S302 - between kvctl and its own child


def message(content: Any) -> bytes:
    """A message in bytes. Raises ValueError for what is not plain data."""
    body = marshal.dumps(content)
    return LENGTH.pack(len(body)) + body


def answer(tokeniser: Tokeniser, kind: str, given: tuple[Any, ...]) -> tuple[str, Any]:
    """The answer to one question."""
    try:
        counts = _KINDS[kind](tokeniser, *given)
    except Uncountable as reason:
        return FAILED, (reason.why.value, str(reason))
    return COUNTS, [(int(count), getattr(count, "prefix", None)) for count in counts]


def as_counts(found: list[tuple[int, Any]]) -> tuple[int, ...]:
    """The counts in an answer, as the tokeniser gave them."""
    return tuple([count if prefix is None else Tokens(count, prefix) for count, prefix in found])


def _texts(
    tokeniser: Tokeniser, prompts: list[str], specials: bool, view: tuple[Any, ...]
) -> tuple[int, ...]:
    return tokeniser.texts(prompts, specials, View(*view))


def _chat(tokeniser: Tokeniser, body: Mapping[str, Any], view: tuple[Any, ...]) -> tuple[int, ...]:
    return tokeniser.chat(body, View(*view))


def _other_way(tokeniser: Tokeniser) -> tuple[int, ...]:
    return (int(tokeniser.other_way()),)


_KINDS: Mapping[str, Callable[..., tuple[int, ...]]] = {
    "texts": _texts,
    "chat": _chat,
    "other_way": _other_way,
}


def _serve(channel: socket.socket, read: Callable[[int], bytes], tokeniser: Tokeniser, workers: int) -> None:
    lock = threading.Lock()

    def work(number: int, kind: str, given: tuple[Any, ...]) -> None:
        found = answer(tokeniser, kind, given)
        tally = tokeniser.tally
        facts = (tokeniser.keeps, tally.hits, tally.misses, tally.tokenised, tally.spared)
        with lock:
            channel.sendall(message((number, found, facts)))

    with ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                pool.submit(work, *read_message(read))
        except (EOFError, OSError):
            os._exit(0)  # nobody reads the rest


def main() -> None:
    """The command line."""
    folder, max_chars, workers = sys.argv[1:]
    os.nice(NICER)
    with socket.socket(fileno=os.dup(0)) as channel, channel.makefile("rb") as reader:
        key, turned = read_message(reader.read)
        use_key(key)
        try:
            files = load_files(Path(folder))
        except TokenizerError as error:
            channel.sendall(message((0, (FAILED, str(error)), ())))
            return
        tokeniser = Tokeniser(files, max_chars=int(max_chars))
        if turned:
            tokeniser.other_way()
        channel.sendall(message((0, (COUNTS, (files.vocab_size, sorted(files.templates))), ())))
        _serve(channel, reader.read, tokeniser, int(workers))


if __name__ == "__main__":
    main()
