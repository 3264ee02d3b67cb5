"""The poller of the cards beside a metrics page that many ask for."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from kvctl.control.cards import CardPoller
from kvctl.core.events import Event, GpuReadFailed, GpusRead
from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.base import GpuReading
from kvctl.gpu.faults import CardEvent
from kvctl.metrics import Metrics, SourceView


class Slow:
    """A driver whose readings come when they are let through."""

    def __init__(self) -> None:
        self.reads = 0
        self.let = asyncio.Event()
        self.fault: SourceFault | None = None

    async def read(self) -> GpuReading:
        self.reads += 1
        await self.let.wait()
        if self.fault is not None:
            return GpuReading(fault=self.fault)
        return GpuReading(samples=(GpuSample(uuid="GPU-a", at=1.0, free_bytes=7),), seconds=0.8)

    async def pause(self, seconds: float) -> tuple[CardEvent, ...]:
        await asyncio.sleep(seconds)
        return ()

    async def close(self) -> None:
        self.let.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0.002)


async def test_scrapes_ask_no_driver() -> None:
    """D15: while a reading takes its time, twenty scrapes show the last one, with its age, and start none."""
    source, events = Slow(), list[Event]()
    poller = CardPoller(source, 0.0, events.append)
    metrics = Metrics(version="t", routes=(), wall=lambda: 1000.0, monotonic=asyncio.get_running_loop().time)
    metrics.gpu = lambda: poller.latest
    metrics.sources["nvml"] = lambda: SourceView(up=poller.read_at is not None, read_at=poller.read_at)
    poller.start()
    assert b'kvctl_telemetry_up{source="nvml"} 0' in metrics.render()
    source.let.set()
    await until(lambda: poller.read_at is not None)
    source.let.clear()
    await asyncio.sleep(0)
    before = source.reads
    pages = await asyncio.gather(*(asyncio.to_thread(metrics.render) for _ in range(20)))
    assert source.reads <= before + 1  # the poller's own next one
    assert all(b'kvctl_gpu_memory_free_bytes{gpu="GPU-a"} 7' in page for page in pages)
    assert all(b'kvctl_telemetry_timestamp_seconds{source="nvml"}' in page for page in pages)
    assert isinstance(events[0], GpusRead)
    await poller.close()


@pytest.mark.parametrize("fault", [SourceFault.DRIVER_MISMATCH, SourceFault.LIBRARY_MISSING])
async def test_a_fault_is_a_line_when_it_begins_and_one_when_it_ends(
    fault: SourceFault, caplog: pytest.LogCaptureFixture
) -> None:
    """D10, D22: no driver to speak with is one clear line, and so is the end of that."""
    caplog.set_level(logging.INFO, logger="kvctl")
    source, events = Slow(), list[Event]()
    source.fault = fault
    source.let.set()
    poller = CardPoller(source, 0.001, events.append)
    poller.start()
    await until(lambda: source.reads > 20)
    assert all(isinstance(event, GpuReadFailed) for event in events)
    source.fault = None
    await until(lambda: any(isinstance(event, GpusRead) for event in events))
    await poller.close()
    assert [fault in record.getMessage() for record in caplog.records] == [True, True]
