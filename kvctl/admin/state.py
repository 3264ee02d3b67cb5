"""Overrides that survive a crash: a JSON document in the state directory.

Everything here blocks; callers run it in a thread.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from pathlib import Path

from kvctl.admin.listeners import BusyError

STATE_MAX = 2**20  # bytes; ours has a few hundred for each override


class StateFile:
    """One JSON document, replaced whole: a crash leaves the old one or the new one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> object:
        """The document; None where there is none. Raises OSError, ValueError."""
        try:
            # a pipe would wait for its writer for ever
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                text = file.read(STATE_MAX + 1) or b""
        except FileNotFoundError:
            return None
        if len(text) > STATE_MAX:
            raise ValueError(f"is larger than {STATE_MAX} bytes")
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError("is nested too deeply") from None

    def write(self, document: object) -> None:
        """Replace the document, on the disk when this returns. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        draft = self.path.with_name(self.path.name + ".new")
        with draft.open("w", encoding="utf-8") as file:
            json.dump(document, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        sync_folder(self.path.parent)

    def put_away(self) -> str:
        """Keep an unreadable document under another name; returns where, in words."""
        aside = self.path.with_name(f"{self.path.name}.refused-{int(time.time())}")
        with contextlib.suppress(OSError):
            return f"as {self.path.rename(aside)}"
        return "where it was"


class OwnedFolder:
    """Holds the state directory for this process alone: two daemons would overwrite each other's overrides.

    The lock goes with its process, however that ended. A folder that cannot be written needs none.
    """

    def __init__(self, folder: Path) -> None:
        """Raises BusyError."""
        self._handle: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o750)
            handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return  # a file system without locks
            remedy = "stop that one, or give each a state_dir of its own"
            raise BusyError(f"state_dir {folder}: another kvctl runs with it; {remedy}") from None
        self._handle = handle

    def close(self) -> None:
        """Release it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def sync_folder(folder: Path) -> None:
    """Make a rename within ``folder`` last. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
