"""The NVML source: readings of real cards, from a thread of their own.

Law 6: nothing slow on the loop. NVML calls can take seconds and can fail to return at all. They run in a
daemon thread that nothing else uses; a read that passes its deadline abandons the thread, and the source
is HUNG. A replacement may be started, with growing pauses, but never while two threads hang already.
Law 8: degraded is a state. No exception leaves ``read``: a poll without a reading has a word for it. A
lost card has one log line when it goes and one when it is back.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvctl.core.outcomes import SourceFault
from kvctl.gpu.backoff import Backoff
from kvctl.gpu.base import GpuReading
from kvctl.gpu.binding import Nvml, load_binding
from kvctl.gpu.select import Selector
from kvctl.gpu.session import NvmlSession
from kvctl.gpu.thread import CallThread

log = logging.getLogger("kvctl.gpu")

_MOST_HUNG = 2


class NvmlSource:
    """Reads the selected cards on demand, one read at a time.

    Args:
        selectors: Which cards, see ``kvctl.gpu.select``.
        timeout_s: Deadline of one read over all cards.
        module: The binding; None: found with ``load_binding``.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        selectors: Sequence[Selector],
        *,
        timeout_s: float = 2.0,
        module: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selectors = tuple(selectors)
        self._timeout = timeout_s
        self._module = module
        self._clock = clock
        self._thread: CallThread[NvmlSession] | None = None
        self._hung: list[CallThread[NvmlSession]] = []
        self._backoff = Backoff()
        self._lock = asyncio.Lock()
        self._released = False
        self._lost = _Lost()
        self.binding_version = "unknown"

    @property
    def driver_version(self) -> str | None:
        """The driver's version as last seen; None: not known."""
        return self._thread.state.driver_version if self._thread else None

    async def read(self) -> GpuReading:
        """Read the selected cards once, within the deadline."""
        async with self._lock:
            reading = await self._read()
        self._lost.tell(reading)
        return reading

    async def release(self) -> None:
        """Give the driver back, so that cards can be reset or partitioned; no reading until ``acquire``."""
        async with self._lock:
            self._released = True
            await self._stop()

    def acquire(self) -> None:
        """Read again from the next ``read`` on."""
        self._released = False

    async def close(self) -> None:
        """Give the driver back and end the thread; a thread that hangs is left behind."""
        async with self._lock:
            await self._stop()

    async def _read(self) -> GpuReading:
        if self._released:
            return GpuReading(fault=SourceFault.FAILED, detail="released on request")
        try:
            thread = self._thread or self._replacement()
        except ImportError as error:
            return GpuReading(fault=SourceFault.LIBRARY_MISSING, detail=str(error))
        if thread is None:
            return GpuReading(fault=SourceFault.HUNG, detail=f"{len(self._hung)} calls have not returned")
        try:
            reading = await thread.call(NvmlSession.read, self._timeout)
        except TimeoutError:
            return self._abandon(thread)
        except Exception as error:  # a defect: it must not end the polling
            log.exception("reading cards failed")
            return GpuReading(fault=SourceFault.FAILED, detail=f"{type(error).__name__}: {error}")
        self._backoff.reset()
        return reading

    def _replacement(self) -> CallThread[NvmlSession] | None:
        """A thread to read from, or None while too many hang or the pause is not over."""
        self._hung = [thread for thread in self._hung if thread.alive]
        if len(self._hung) >= _MOST_HUNG or not self._backoff.due(self._clock()):
            return None
        session = NvmlSession(Nvml(self._binding()), self._selectors, self._clock)
        self._thread = CallThread(session, NvmlSession.close, name="kvctl-nvml")
        return self._thread

    def _binding(self) -> Any:
        if self._module is None:
            binding = load_binding()
            self._module, self.binding_version = binding.module, binding.version
            if binding.shadowed:
                log.warning("%s", binding.shadowed)
        return self._module

    def _abandon(self, thread: CallThread[NvmlSession]) -> GpuReading:
        thread.leave()
        self._hung.append(thread)
        self._thread = None
        self._backoff.failed(self._clock())
        detail = f"no answer within {self._timeout:g} s"
        return GpuReading(fault=SourceFault.HUNG, detail=detail, seconds=self._timeout)

    async def _stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(TimeoutError):
                await thread.call(NvmlSession.close, self._timeout)
            thread.leave()


class _Lost:
    """Which cards the log has been told are lost: one line when one goes, one when it returns."""

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()

    def tell(self, reading: GpuReading) -> None:
        """Tell what is new in ``reading``; the reading's own fault is told by whoever polls."""
        if reading.fault is not None:
            return
        lost = frozenset(sample.uuid for sample in reading.samples if sample.lost)
        for uuid in sorted(lost - self._told):
            log.error("card %s is lost", uuid)
        for uuid in sorted(self._told - lost):
            log.info("card %s is back", uuid)
        self._told = lost
