"""Who changed what, when and why: the audit log of the state directory.

One JSON object a line, described in docs/admin-api.md. What was refused is in it too. Writing blocks; callers
do it in a thread.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvctl import logs
from kvctl.admin.peers import Actor
from kvctl.control.appending import append

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
        stamped = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **line}
        data = json.dumps(stamped, allow_nan=False, default=str).encode() + b"\n"
        append(self.path, data, max_bytes=self._max_bytes, kept=AUDIT_KEPT, sync=True)
