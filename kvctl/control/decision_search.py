"""Looks up a decision that is no longer in memory in the decision log's files, from their end and not far.

Everything here blocks; callers run it in a thread.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvctl.control import decision_documents as documents
from kvctl.core.outcomes import Decision

FARTHEST = 64 * 1024 * 1024  # bytes, counted from the end of the newest file
_BLOCK = 256 * 1024

Document = dict[str, Any]


def search(path: Path, kept: int, some_id: str, farthest: int = FARTHEST) -> Document | None:
    """The last decision on a request, by its X-Request-Id or lease id, as the API shows it; None: not there.

    ``path`` is the current file; ``path.1`` to ``path.kept`` are older. What cannot be read is skipped.
    """
    if not (some_id.isascii() and some_id.isprintable()):
        return None  # no id looks like that, and the file would have it escaped
    ends: dict[str, Document] = {}
    for line in _lines_with(path, kept, json.dumps(some_id).encode(), farthest):
        entry = _entry(line)
        if entry is None or some_id not in (entry.get("id"), entry.get("lease")):
            continue
        if entry.get("type") == "end":
            ends.setdefault(str(entry.get("lease")), entry)
        elif entry.get("type") == "decision":
            told = _told(entry, ends.get(str(entry.get("lease"))))
            if told is not None:
                return told
    return None


def _told(entry: Document, end: Document | None) -> Document | None:
    """The story that two lines tell; None: they have another format."""
    try:
        return documents.story_of_lines(entry, end if entry["decision"] != Decision.QUEUE else None)
    except (KeyError, TypeError, ValueError):
        return None


def _entry(line: bytes) -> Document | None:
    try:
        entry = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # torn by a crash
    return entry if isinstance(entry, dict) and entry.get("v") == documents.VERSION else None


def _lines_with(path: Path, kept: int, needle: bytes, farthest: int) -> Iterator[bytes]:
    """Lines that hold ``needle``, the latest first."""
    left = farthest
    for each in (path, *(path.with_name(f"{path.name}.{n}") for n in range(1, kept + 1))):
        size = 0  # of a file that cannot be read
        with contextlib.suppress(OSError), each.open("rb") as file:
            size = file.seek(0, 2)
            for piece in _pieces(file, size, max(size - left, 0)):
                if needle in piece:
                    yield from (line for line in reversed(piece.split(b"\n")) if needle in line)
        left -= size
        if left <= 0:
            return


def _pieces(file: Any, end: int, least: int) -> Iterator[bytes]:
    """Batches of whole lines from byte ``end`` back to ``least``, the last ones first."""
    torn = b""  # the end of a line that begins in the piece before it in the file
    while end > least:
        begin = max(end - _BLOCK, least)
        file.seek(begin)
        piece = file.read(end - begin) + torn
        cut = piece.find(b"\n") + 1 if begin > 0 else 0
        if begin > 0 and cut == 0:
            torn = piece
        else:
            torn = piece[: max(cut - 1, 0)]
            yield piece[cut:]
        end = begin
