"""The NVML source: readings of real cards, from a thread or a process of their own.

Law 6: nothing slow on the loop. NVML calls can take seconds and can fail to return at all; a read that passes
its deadline abandons its worker, and the source is HUNG. A replacement may be started, with growing pauses,
but never while two workers hang already. Law 8: degraded is a state. No exception leaves ``read``: a poll
without a reading carries a word for why. A lost card gets one log line when it goes and one when it is back.
A crash inside NVML ends the process that called it; with ``Isolation.PROCESS`` that is a state too, CRASHED.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvctl.core.outcomes import SourceFault
from kvctl.gpu.base import Backoff, GpuReading, GpuSource
from kvctl.gpu.binding import Nvml, load_binding
from kvctl.gpu.faults import CardEvent
from kvctl.gpu.remote import ProcessWorker
from kvctl.gpu.select import Selector, parse_selector
from kvctl.gpu.session import NvmlSession
from kvctl.gpu.worker import Isolation, ThreadWorker, Worker, WorkerGoneError

log = logging.getLogger("kvctl.gpu")

NONE = "none"
AUTO = "auto"  # every card is read; an engine's processes show which of them are its own

_MOST_HUNG = 2
_SLICE_S = 0.25  # longest wait in one piece: closing waits no longer than that
_ANEW = frozenset(
    {SourceFault.LIBRARY_MISSING, SourceFault.DRIVER_MISMATCH}
)  # cured by another library alone


class NvmlSource:
    """Reads the selected cards on demand, one read at a time.

    Args:
        selectors: Which cards, see ``kvctl.gpu.select``.
        timeout_s: Deadline of one read over all cards.
        isolation: Where NVML is called.
        module: The binding, for ``Isolation.THREAD``; None: found with ``load_binding``.
        clock: Monotonic seconds.

    ``restarts`` counts the workers that were given up, by fault.
    """

    def __init__(
        self,
        selectors: Sequence[Selector],
        *,
        timeout_s: float = 2.0,
        isolation: Isolation = Isolation.THREAD,
        module: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selectors = tuple(selectors)
        self._timeout = timeout_s
        self._isolation = isolation
        self._module = module
        self._clock = clock
        self._worker: Worker | None = None
        self._hung: list[Worker] = []
        self._backoff = Backoff()
        self._given_up: GpuReading | None = None
        self._lock = asyncio.Lock()
        self._lost = _Lost()
        self.restarts: Counter[SourceFault] = Counter()
        self.binding_version = "unknown"

    async def read(self) -> GpuReading:
        """Read the selected cards once, within the deadline."""
        async with self._lock:
            reading = await self._read()
        self._lost.tell(reading)
        return reading

    async def pause(self, seconds: float) -> tuple[CardEvent, ...]:
        """Wait for messages of the driver; where it sends none, let the time pass."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0:
            async with self._lock:
                events = await self._wait(min(left, _SLICE_S))
            if events is None:
                await asyncio.sleep(max(until - loop.time(), 0.0))
            elif events:
                return events
        await asyncio.sleep(0)
        return ()

    async def close(self) -> None:
        """Release the driver and end the worker; one that hangs is left behind. A later read starts anew."""
        async with self._lock:
            worker, self._worker = self._worker, None
            if worker is not None:
                with contextlib.suppress(TimeoutError):
                    await worker.close(self._timeout)
            for hung in self._hung:
                if isinstance(hung, ProcessWorker):
                    await hung.close(self._timeout)

    async def _read(self) -> GpuReading:
        try:
            worker = self._worker or self._replacement()
        except ImportError as error:
            return GpuReading(fault=SourceFault.LIBRARY_MISSING, detail=str(error))
        if worker is None:
            return self._meanwhile()
        try:
            reading = await worker.read(self._timeout)
        except TimeoutError:
            return self._give_up(worker, SourceFault.HUNG, f"no answer within {self._timeout:g} s")
        except (WorkerGoneError, OSError) as error:
            return self._give_up(worker, SourceFault.CRASHED, str(error))
        except Exception as error:  # a defect: it must not end the polling
            log.exception("reading cards failed")
            return GpuReading(fault=SourceFault.FAILED, detail=f"{type(error).__name__}: {error}")
        if reading.fault in _ANEW and self._isolation is Isolation.PROCESS:
            await self._end_for_now(worker, reading)
        elif reading.fault is None:
            self._backoff.reset()
        return reading

    async def _wait(self, seconds: float) -> tuple[CardEvent, ...] | None:
        """Wait in the existing worker; none is started for this."""
        worker = self._worker
        if worker is None:
            return None
        try:
            return await worker.wait(math.ceil(seconds * 1000), seconds + self._timeout)
        except TimeoutError:
            self._give_up(worker, SourceFault.HUNG, f"no answer within {self._timeout:g} s")
        except (WorkerGoneError, OSError) as error:
            self._give_up(worker, SourceFault.CRASHED, str(error))
        return None

    def _replacement(self) -> Worker | None:
        """A worker to read from, or None while too many hang or the pause is not over."""
        self._hung = [worker for worker in self._hung if worker.alive]
        if len(self._hung) >= _MOST_HUNG or not self._backoff.due(self._clock()):
            return None
        if self._isolation is Isolation.PROCESS:
            self._worker = ProcessWorker([selector.text for selector in self._selectors])
        else:
            self._worker = ThreadWorker(NvmlSession(Nvml(self._binding()), self._selectors, self._clock))
        return self._worker

    def _binding(self) -> Any:
        if self._module is None:
            binding = load_binding()
            self._module, self.binding_version = binding.module, binding.version
            if binding.shadowed:
                log.warning("%s", binding.shadowed)
        return self._module

    def _meanwhile(self) -> GpuReading:
        """The reading while there is no worker."""
        if self._given_up is None or len(self._hung) >= _MOST_HUNG:
            return GpuReading(fault=SourceFault.HUNG, detail=f"{len(self._hung)} calls have not returned")
        return self._given_up

    def _give_up(self, worker: Worker, fault: SourceFault, detail: str) -> GpuReading:
        worker.leave()
        self._hung.append(worker)
        self._worker = None
        self._backoff.failed(self._clock())
        self.restarts[fault] += 1
        self._given_up = GpuReading(fault=fault, detail=detail, seconds=self._timeout)
        return self._given_up

    async def _end_for_now(self, worker: Worker, reading: GpuReading) -> None:
        """End the worker: a library stays loaded, so only a new process finds one that fits the driver."""
        self._worker = None
        self._backoff.failed(self._clock())
        self._given_up = reading
        await worker.close(self._timeout)


class _Lost:
    """Logs lost cards: one line when a card goes, one when it returns."""

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()

    def tell(self, reading: GpuReading) -> None:
        """Log what is new in ``reading``; a fault of the whole reading is logged by the poller."""
        if reading.fault is not None:
            return
        lost = frozenset(sample.uuid for sample in reading.samples if sample.lost)
        for uuid in sorted(lost - self._told):
            log.error("card %s is lost", uuid)
        for uuid in sorted(self._told - lost):
            log.info("card %s is back", uuid)
        self._told = lost


def make_source(
    gpus: Sequence[str], *, timeout_s: float, isolation: Isolation = Isolation.PROCESS
) -> GpuSource | None:
    """The source that ``gpus`` names: selectors (kvctl.gpu.select), auto, or none for no source.

    ``timeout_s`` bounds one read. Raises SelectorError for what names no card. Opens nothing yet.
    """
    if list(gpus) == [NONE]:
        return None
    names = ["all"] if list(gpus) == [AUTO] else gpus
    return NvmlSource([parse_selector(name) for name in names], timeout_s=timeout_s, isolation=isolation)
