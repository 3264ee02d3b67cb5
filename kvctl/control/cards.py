"""Polls a source of GPU readings and hands what it brings to the gate."""

import asyncio
import logging
from collections.abc import Callable

from kvctl import logs
from kvctl.core.events import Event, GpuReadFailed, GpusRead
from kvctl.core.outcomes import SourceFault
from kvctl.gpu.base import GpuReading, GpuSource

log = logs.get("control.cards")


class CardPoller:
    """Reads ``source`` every ``interval_s``; one log line when a fault begins and one when it ends.

    ``latest`` is the last reading, for metrics and status, and ``read_at`` the loop time of the last one that
    brought samples.
    """

    def __init__(self, source: GpuSource, interval_s: float, emit: Callable[[Event], object]) -> None:
        self._source = source
        self._interval = interval_s
        self._emit = emit
        self._fault: SourceFault | None = None
        self._task: asyncio.Task[None] | None = None
        self.latest: GpuReading | None = None
        self.read_at: float | None = None

    def start(self) -> None:
        """Begin to poll."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="kvctl-cards")

    async def close(self) -> None:
        """Stop polling and let go of the source."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._source.close()

    async def _run(self) -> None:
        while True:
            self._take(await self._source.read())
            await asyncio.sleep(self._interval)

    def _take(self, reading: GpuReading) -> None:
        self.latest = reading
        self._tell(reading)
        if reading.fault is not None:
            self._emit(GpuReadFailed(reading.fault))
            return
        self.read_at = asyncio.get_running_loop().time()
        self._emit(GpusRead(reading.samples))

    def _tell(self, reading: GpuReading) -> None:
        before, self._fault = self._fault, reading.fault
        if reading.fault is not None and reading.fault is not before:
            why = f"{reading.fault}: {reading.detail}" if reading.detail else str(reading.fault)
            sentence = (
                f"no GPU readings ({why}): GPU memory puts no pressure on the budget; the engine still does"
            )
            logs.event(log, logging.WARNING, "gpu_unreadable", sentence, reason=reading.fault)
        elif reading.fault is None and before is not None:
            logs.event(log, logging.INFO, "gpu_readable", f"GPU readings are back ({before} is over)")
