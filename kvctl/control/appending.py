"""Append lines to a file so that every line in it stays whole, even if the disk fills or kvctl crashes.

Everything here blocks; callers run it in a thread.
"""

import contextlib
import os
from itertools import pairwise
from pathlib import Path


def append(path: Path, data: bytes, *, max_bytes: int, kept: int, sync: bool = False) -> None:
    """Append ``data``, whole lines with their ends; ``sync``: they are on the disk when this returns.

    Before the file grows beyond ``max_bytes`` it becomes ``path.1``, and so on up to ``kept`` of them.
    Raises OSError, with nothing appended.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    _rotate(path, len(data), max_bytes, kept)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"  # by a crash: it stays a line of its own
        try:
            _write(handle, b"\n" + data if torn else data)
            if sync:
                os.fsync(handle)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, size)  # a full disk may have taken half a line
            raise
    finally:
        os.close(handle)


def _write(handle: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


def _rotate(path: Path, more: int, max_bytes: int, kept: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        if size == 0 or size + more <= max_bytes:
            return
        names = [path, *(path.with_name(f"{path.name}.{n}") for n in range(1, kept + 1))]
        for newer, older in reversed(list(pairwise(names))):
            if newer.exists():
                newer.replace(older)
