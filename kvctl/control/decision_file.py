"""The decision log's file: JSON lines, written off the loop in batches, rotated by size.

Law 6: nothing slow on the loop: a record only goes into a bounded buffer; records that do not fit while the
disk is slow are counted, and the file itself tells how many. Law 8: a disk that takes nothing is a state,
with one log line when it begins and one when it ends.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvctl import logs
from kvctl.control import decision_documents as documents
from kvctl.control.appending import append
from kvctl.core.decisions import Kept, made

log = logs.get("decisions")

KEPT = 4  # rotated files beside the current one
BUFFERED = 20_000
EVERY_S = 1.0


class DecisionFile:
    """``put`` is a sink of decision records, between ``start`` and ``close``."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        wall_offset: Callable[[], float],
        buffered: int = BUFFERED,
        every_s: float = EVERY_S,
    ) -> None:
        """``wall_offset()`` is what to add to monotonic seconds for seconds since the epoch."""
        self.path = path
        self.dropped = 0
        self.written = 0
        self.fault = ""
        self._max_bytes = max_bytes
        self._offset = wall_offset
        self._buffered = buffered
        self._every_s = every_s
        self._buffer: list[tuple[Kept, float]] = []
        self._dropped_told = 0
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def put(self, kept: Kept) -> None:
        """Queue a record to be written; never waits."""
        if len(self._buffer) >= self._buffered:
            self.dropped += 1
        else:
            self._buffer.append((kept, self._offset()))

    def start(self) -> None:
        """Write from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="kvctl-decision-file")

    async def close(self) -> None:
        """Write what is there, and stop."""
        self._closing.set()
        if self._task is not None:  # not cancelled: a batch in its thread would be lost track of
            await asyncio.gather(self._task, return_exceptions=True)
        await self._flush()

    async def _run(self) -> None:
        while not self._closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._every_s)
            await self._flush()

    async def _flush(self) -> None:
        batch, self._buffer = self._buffer, []
        dropped = self.dropped - self._dropped_told
        if not batch and not dropped:
            return
        fault = await asyncio.to_thread(self._write, batch, dropped)
        if fault:
            self.dropped += len(batch)
        else:
            self._dropped_told += dropped
            self.written += len(batch)
        self._note(fault)

    def _write(self, batch: list[tuple[Kept, float]], dropped: int) -> str:
        """Append; returns why it could not. Blocks."""
        try:
            entries = [(made(kept), offset) for kept, offset in batch]
            lines = [documents.encoded(documents.line(each, each.at + offset)) for each, offset in entries]
        except (ValueError, OverflowError, OSError) as error:  # a wall clock beyond all calendars
            return f"a record has no date: {error}"
        if dropped:
            lines.append(documents.encoded({"v": documents.VERSION, "type": "dropped", "records": dropped}))
        data = b"\n".join(lines) + b"\n"
        try:
            append(self.path, data, max_bytes=self._max_bytes, kept=KEPT)
        except OSError as error:
            return f"{error.strerror or error} ({self.path})"
        return ""

    def _note(self, fault: str) -> None:
        if fault and not self.fault:
            remedy = "free the disk" if str(self.path) in fault else "look at the machine's clock"
            sentence = f"the decision log cannot be written, records are lost: {fault}; {remedy}"
            logs.event(log, logging.WARNING, "decisions_unwritable", sentence)
        elif self.fault and not fault:
            sentence = f"the decision log is written again; {self.dropped} records were lost"
            logs.event(log, logging.INFO, "decisions_writable", sentence)
        self.fault = fault
