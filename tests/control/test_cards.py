"""The poller of the cards beside a metrics page that many ask for."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from kvctl.control.cards import _AFTER_FATAL, CardPoller
from kvctl.control.slowdown import Slowdowns
from kvctl.core.events import CardsFailed, Event, GpuReadFailed, GpusRead
from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.base import GpuReading
from kvctl.gpu.faults import CardEvent, EventKind
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
    async with asyncio.timeout(60):
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


class Telling(Slow):
    """A driver that tells of errors by itself."""

    def __init__(self, *events: CardEvent) -> None:
        super().__init__()
        self.let.set()
        self.events = list(events)
        self.closed = 0

    async def pause(self, seconds: float) -> tuple[CardEvent, ...]:
        await asyncio.sleep(seconds)
        told, self.events = tuple(self.events), []
        return told

    async def close(self) -> None:
        self.closed += 1


FATAL = CardEvent(uuids=("GPU-a",), kind=EventKind.XID_FATAL, xid=79)
APPLICATION = CardEvent(uuids=("GPU-a",), kind=EventKind.XID_APPLICATION, xid=31)
NAMELESS = CardEvent(uuids=(), kind=EventKind.XID_FATAL, xid=79)


async def test_what_the_driver_tells_is_told_on_and_only_the_fatal_acted_upon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="kvctl")
    source, events, happened = Telling(APPLICATION, FATAL, NAMELESS), list[Event](), list[CardEvent]()
    poller = CardPoller(source, 0.001, events.append, happened=happened.append)
    poller.start()
    await until(lambda: len(happened) == 3)
    await poller.close()
    assert [event for event in events if isinstance(event, CardsFailed)] == [CardsFailed(("GPU-a",))]
    levels = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert levels == [
        ("WARNING", "GPU-a: Xid 31, a program touched memory that is not its own"),
        ("ERROR", f"GPU-a: Xid 79, the card fell off the bus{_AFTER_FATAL}"),
        ("ERROR", "a card that the driver does not name: Xid 79, the card fell off the bus"),
    ]


async def test_let_go_of_for_a_while() -> None:
    """D16: nothing is read while the driver is let go of; then it is taken up by itself, or when asked."""
    source, events, faults = Telling(), list[Event](), list[SourceFault]()
    poller = CardPoller(source, 0.001, events.append, failing=faults.append)
    poller.start()
    await until(lambda: source.reads > 2)
    await poller.release(600)
    assert source.closed == 1
    before = source.reads
    await asyncio.sleep(0.01)
    assert source.reads <= before + 1
    assert poller.latest is not None
    assert poller.latest.fault is SourceFault.RELEASED
    assert events[-1] == GpuReadFailed(SourceFault.RELEASED)
    before = source.reads
    poller.acquire()
    await until(lambda: source.reads > before)
    await until(lambda: isinstance(events[-1], GpusRead))
    await poller.release(0.05)
    before = source.reads
    await until(lambda: source.reads > before + 2)
    await until(lambda: isinstance(events[-1], GpusRead))
    assert faults == [SourceFault.RELEASED] * 2
    await poller.close()


def slowed(*reasons: str) -> list[GpuSample]:
    return [GpuSample(uuid="GPU-a", at=1.0, index=0, temperature_c=91.0, throttle_reasons=reasons)]


def test_a_slowdown_is_told_when_it_lasts_and_when_it_is_over() -> None:
    slow = Slowdowns()
    assert [slow.observe(slowed("hw_thermal")) for _ in range(2)] == [[], []]
    assert slow.observe(slowed("hw_thermal", "sw_power_cap")) == [
        (True, "card 0 is slowed down (hw_thermal, 91 C): answers may come slower")
    ]
    assert slow.observe(slowed("hw_thermal", "hw_power_brake")) == []
    assert slow.remark == "card 0 is slowed down (hw_thermal, hw_power_brake, 91 C)"
    over = [slow.observe(slowed()) for _ in range(10)]
    assert over == [[]] * 9 + [[(False, "card 0 is not slowed down any more")]]
    assert slow.remark == ""


def test_what_is_usual_or_unknown_is_no_slowdown() -> None:
    slow = Slowdowns()
    for _ in range(20):
        assert slow.observe(slowed("sw_power_cap")) == []
        assert slow.observe([GpuSample(uuid="GPU-a", at=1.0)]) == []
