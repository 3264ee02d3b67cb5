"""Polls a source of GPU readings, listens to the driver's messages in between, and hands both to the gate.

Failing readings are a state, with one log line at its beginning and one at its end (law 8). An error that
ends all work on a card is handed on at once, before the next reading.
"""

import asyncio
import logging
from collections.abc import Callable

from kvctl import logs
from kvctl.control.slowdown import Slowdowns
from kvctl.core.events import CardsFailed, Event, GpuReadFailed, GpusRead
from kvctl.core.outcomes import SourceFault
from kvctl.gpu.base import GpuReading, GpuSource
from kvctl.gpu.faults import CardEvent, EventKind

log = logs.get("control.cards")

_LEVELS = {
    EventKind.XID_FATAL: logging.ERROR,
    EventKind.ECC_UNCORRECTED: logging.ERROR,
    EventKind.XID_APPLICATION: logging.WARNING,
    EventKind.XID_OTHER: logging.WARNING,
    EventKind.ECC_CORRECTED: logging.INFO,
}
_AFTER_FATAL = ": engines known to be on it get no requests until they restart"


def _nothing(_: object) -> None:
    """The default of both callbacks: nobody is told."""


class CardPoller:
    """Reads ``source`` every ``interval_s`` and gives ``emit`` the events that follow.

    ``latest`` is the last reading, for metrics and status, and ``read_at`` the loop time of the last one that
    brought samples. ``happened`` is called with each message of the driver, ``failing`` with each fault that
    begins.
    """

    def __init__(
        self,
        source: GpuSource,
        interval_s: float,
        emit: Callable[[Event], object],
        *,
        happened: Callable[[CardEvent], object] = _nothing,
        failing: Callable[[SourceFault], object] = _nothing,
    ) -> None:
        self._source = source
        self._interval = interval_s
        self._emit = emit
        self._happened = happened
        self._failing = failing
        self._fault: SourceFault | None = None
        self._slow = Slowdowns()
        self._task: asyncio.Task[None] | None = None
        self._released_until: float | None = None
        self.latest: GpuReading | None = None
        self.read_at: float | None = None

    def start(self) -> None:
        """Begin to poll."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="kvctl-cards")

    async def close(self) -> None:
        """Stop polling and close the source."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._source.close()

    # --- what on-call may ask -----------------------------------------------------------------------

    async def release(self, seconds: float) -> None:
        """Release the driver for ``seconds``; when this returns, no handle is held."""
        self._released_until = asyncio.get_running_loop().time() + seconds
        await self._source.close()
        self._take(GpuReading(fault=SourceFault.RELEASED, detail=f"for up to {seconds:g} s"))

    def acquire(self) -> None:
        """Open the driver again, at the next poll."""
        self._released_until = None

    @property
    def released_s(self) -> float | None:
        """Seconds for which the driver is still released; None: it is not."""
        if self._released_until is None:
            return None
        return max(self._released_until - asyncio.get_running_loop().time(), 0.0)

    @property
    def remark(self) -> str:
        """How the cards explain slow answers; empty: they do not."""
        return self._slow.remark

    # --- polling ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            left = self.released_s
            if left:
                await asyncio.sleep(min(left, self._interval))
                continue
            self._released_until = None
            self._take(await self._source.read())
            for event in await self._source.pause(self._interval):
                self._tell_event(event)

    def _take(self, reading: GpuReading) -> None:
        if self.released_s and reading.fault is not SourceFault.RELEASED:
            return  # on-call released the driver while this reading was under way
        self.latest = reading
        self._tell(reading)
        if reading.fault is not None:
            self._emit(GpuReadFailed(reading.fault))
            return
        self.read_at = asyncio.get_running_loop().time()
        for begins, sentence in self._slow.observe(reading.samples):
            level, word = (logging.WARNING, "gpu_slowed") if begins else (logging.INFO, "gpu_not_slowed")
            logs.event(log, level, word, sentence)
        self._emit(GpusRead(reading.samples))

    def _tell_event(self, event: CardEvent) -> None:
        self._happened(event)
        after = _AFTER_FATAL if event.fatal and event.uuids else ""
        cards = ",".join(event.uuids)
        # an event word for each kind: a storm of corrected errors must not use up the log lines of the others
        logs.event(log, _LEVELS[event.kind], f"gpu_{event.kind}", f"{event.sentence}{after}", gpu=cards)
        if event.fatal and event.uuids:
            self._emit(CardsFailed(event.uuids))

    def _tell(self, reading: GpuReading) -> None:
        before, self._fault = self._fault, reading.fault
        if reading.fault is not None and reading.fault is not before:
            self._failing(reading.fault)
            why = f"{reading.fault}: {reading.detail}" if reading.detail else str(reading.fault)
            sentence = (
                f"no GPU readings ({why}): GPU memory puts no pressure on the budget; the engine still does"
            )
            logs.event(log, logging.WARNING, "gpu_unreadable", sentence, reason=reading.fault)
        elif reading.fault is None and before is not None:
            logs.event(log, logging.INFO, "gpu_readable", f"GPU readings are back ({before} is over)")
