"""Files of the state directory: the overrides that outlive a crash, and the audit log.

Everything here blocks; callers run it in a thread.
"""

import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

AUDIT_BYTES = 4 * 2**20
AUDIT_KEPT = 4  # rotated files beside the current one


class StateFile:
    """One JSON document, replaced whole: a crash leaves the old one or the new one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> object:
        """The document; None where there is none. Raises OSError, ValueError."""
        try:
            return json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None

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

    def set_aside(self) -> Path:
        """Keep a document that nobody could read under another name, for people. Raises OSError."""
        aside = self.path.with_name(f"{self.path.name}.refused-{int(time.time())}")
        return self.path.rename(aside)


def sync_folder(folder: Path) -> None:
    """Make a rename within ``folder`` last. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Audit:
    """Who changed what: one JSON object a line, appended and synced, rotated by size."""

    def __init__(self, path: Path, max_bytes: int = AUDIT_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one line. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._rotate()
        stamped = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **entry}
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            # one write, so that a crash tears at most the last line and never mixes two
            os.write(handle, json.dumps(stamped, allow_nan=False, default=str).encode() + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)

    def _rotate(self) -> None:
        if not self.path.exists() or self.path.stat().st_size < self._max_bytes:
            return
        names = [self.path, *(self.path.with_name(f"{self.path.name}.{n}") for n in range(1, AUDIT_KEPT + 1))]
        for newer, older in reversed(list(pairwise(names))):
            if newer.exists():
                newer.replace(older)
