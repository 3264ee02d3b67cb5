"""Writes state and audit in a thread of its own, in the order of the changes.

Law 6: nothing slow on the loop. Law 8: a disk that takes nothing is a state, with one log line when it begins
and one when it ends; changes stay in force meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvctl import logs
from kvctl.admin.audit import Audit
from kvctl.admin.state import StateFile

log = logs.get("admin")
DEADLINE_S = 5.0


class Keeper:
    """Writes the state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.state = StateFile(state_dir / "overrides.json")
        self.drains = StateFile(state_dir / "drains.json")
        self.audit = Audit(state_dir / "audit.jsonl")
        self._thread = ThreadPoolExecutor(1, "kvctl-state")
        self._fault = ""

    @property
    def fault(self) -> str:
        """Why the last write failed; empty: it succeeded."""
        return self._fault

    def submit(
        self, line: Mapping[str, Any], state: object = None, file: StateFile | None = None
    ) -> "Future[bool]":
        """Write an audit line, and the state where one is given; the result: whether both are on the disk.

        ``file`` is that of the overrides unless another is named.
        """
        return self._thread.submit(self._write, line, state, file or self.state)

    async def keep(
        self, line: Mapping[str, Any], state: object = None, file: StateFile | None = None
    ) -> bool:
        """``submit``, waited for, but not for longer than ``DEADLINE_S``."""
        written = asyncio.wrap_future(self.submit(line, state, file))
        done, _ = await asyncio.wait([written], timeout=DEADLINE_S)
        return bool(done) and written.result()

    async def close(self) -> None:
        """Wait for what is still to be written."""
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    def _write(self, line: Mapping[str, Any], state: object, file: StateFile) -> bool:
        # separately: who made a change is recorded even where the change cannot be stored
        fault = "" if state is None else self._tried(lambda: file.write(state))
        fault = self._tried(lambda: self.audit.append(line)) or fault
        self._note(fault)
        return not fault

    def _tried(self, write: Callable[[], None]) -> str:
        """Why ``write`` failed; empty: it succeeded."""
        try:
            write()
        except OSError as error:
            return f"{error.strerror or error} ({error.filename or self.state.path.parent})"
        return ""

    def _note(self, fault: str) -> None:
        if fault and not self._fault:
            what = "Overrides, drains and audit cannot be written"
            sentence = f"{what}, and would not outlive a restart: {fault}"
            logs.event(log, logging.WARNING, "state_unwritable", sentence)
        elif self._fault and not fault:
            logs.event(log, logging.INFO, "state_writable", "Overrides, drains and audit are written again")
        self._fault = fault
