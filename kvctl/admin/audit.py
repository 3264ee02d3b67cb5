"""Who changed what, when and why: the audit log of the state directory.

One JSON object a line, described in docs/admin-api.md. What was refused is in it too. Writing blocks; callers
do it in a thread.
"""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvctl import logs
from kvctl.admin.peers import Actor

AUDIT_BYTES = 4 * 2**20
AUDIT_KEPT = 4  # rotated files beside the current one


def entry(actor: Actor, verb: str, **what: object) -> dict[str, Any]:
    """One line, without its time."""
    who = {"uid": actor.uid, "user": actor.user, "gid": actor.gid, "pid": actor.pid, "verb": verb}
    return who | {key: logs.plain(value) for key, value in what.items()}


class Audit:
    """The file: appended and synced, rotated by size."""

    def __init__(self, path: Path, max_bytes: int = AUDIT_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._rotate()
        stamped = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **line}
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
