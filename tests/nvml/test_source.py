import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from kvctl.core.outcomes import SourceFault
from kvctl.gpu.binding import Code
from kvctl.gpu.nvml import NvmlSource
from kvctl.gpu.select import parse_selector
from tests.nvml.conftest import Clock, Install
from tests.nvml.fake_library import FakeLibrary, cards, installed

Said = Callable[[], list[str]]
ALL = [parse_selector("all")]
PATIENCE_S, SHORT_S = 60.0, 0.05  # deadlines of readings that come, and of one that hangs


@pytest.fixture
async def source(clock: Clock) -> AsyncIterator[NvmlSource]:
    made = NvmlSource(ALL, timeout_s=PATIENCE_S, clock=clock)
    yield made
    await made.close()


@pytest.fixture
def stuck(install: Install) -> Iterator[tuple[FakeLibrary, threading.Event]]:
    """A library whose memory call does not return before the event is set."""
    library = install(*cards(1))
    event = threading.Event()
    yield library, event
    event.set()


def nvml_threads() -> int:
    return sum(thread.name == "kvctl-nvml" for thread in threading.enumerate())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - threads end without telling the loop
            await asyncio.sleep(0.002)


async def test_reads_from_a_thread_of_its_own(install: Install, source: NvmlSource) -> None:
    """D15: NVML is called from one thread of its own and never from the loop."""
    library = install(*cards(2))
    for _ in range(3):
        assert len((await source.read()).samples) == 2
    assert len(library.threads) == 1
    assert threading.get_ident() not in library.threads
    assert (await source.read()).driver == "580.95.05"
    assert source.binding_version != "unknown"


async def test_close_shuts_the_driver_down_and_ends_the_thread(install: Install) -> None:
    library = install(*cards(1))
    before = nvml_threads()
    made = NvmlSource(ALL)
    await made.read()
    await made.close()
    assert library.open == 0
    await until(lambda: nvml_threads() == before)


async def test_no_library_is_a_fault_and_no_noise(source: NvmlSource, clock: Clock, said: Said) -> None:
    """D22: no library: a fault, and no line per reading."""
    with installed(None):
        for _ in range(50):
            assert (await source.read()).fault is SourceFault.LIBRARY_MISSING
            clock.now += 1
    assert said() == []


async def test_a_fault_ends_without_a_restart(install: Install, source: NvmlSource, clock: Clock) -> None:
    """D10: after the reboot of the driver the cards are back by themselves."""
    library = install(*cards(1))
    library.errors["nvmlInitWithFlags"] = Code.LIB_RM_VERSION_MISMATCH
    assert (await source.read()).fault is SourceFault.DRIVER_MISMATCH
    library.errors.clear()
    clock.now += 5
    assert len((await source.read()).samples) == 1


async def test_a_lost_card_is_told_when_it_goes_and_when_it_returns(
    install: Install, source: NvmlSource, said: Said
) -> None:
    library = install(*cards(2))
    await source.read()
    library.cards[1].errors["nvmlDeviceGetMemoryInfo_v2"] = Code.GPU_IS_LOST
    for _ in range(5):
        await source.read()
    library.cards[1].errors.clear()
    await source.read()
    lines = [line for line in said() if not line.startswith("watching")]
    assert lines == [f"card {library.cards[1].uuid} is lost", f"card {library.cards[1].uuid} is back"]


async def test_a_call_that_never_returns_is_left_behind(
    stuck: tuple[FakeLibrary, threading.Event], source: NvmlSource, clock: Clock
) -> None:
    """D15: a call that hangs is left behind; at most one thread more."""
    library, event = stuck
    assert (await source.read()).fault is None
    library.hang["nvmlDeviceGetMemoryInfo_v2"] = event
    source._timeout = SHORT_S
    before = nvml_threads()
    for _ in range(40):
        assert (await source.read()).fault is SourceFault.HUNG
        clock.now += 10
    assert nvml_threads() == before + 1  # one replacement, which hangs too, and no more
    del library.hang["nvmlDeviceGetMemoryInfo_v2"]
    event.set()
    await until(lambda: nvml_threads() == before - 1)
    clock.now += 60
    source._timeout = PATIENCE_S
    assert (await source.read()).fault is None
    assert library.open == 1  # the ones that came back shut their own sessions


async def test_a_replacement_waits_for_its_pause(
    stuck: tuple[FakeLibrary, threading.Event], source: NvmlSource, clock: Clock
) -> None:
    library, event = stuck
    library.hang["nvmlDeviceGetMemoryInfo_v2"] = event
    source._timeout = SHORT_S
    await source.read()
    source._timeout = PATIENCE_S
    del library.hang["nvmlDeviceGetMemoryInfo_v2"]
    assert (await source.read()).fault is SourceFault.HUNG
    clock.now += 1
    assert (await source.read()).fault is None


async def test_close_does_not_wait_for_a_hung_call(stuck: tuple[FakeLibrary, threading.Event]) -> None:
    library, event = stuck
    made = NvmlSource(ALL, timeout_s=0.02)
    library.hang["nvmlInitWithFlags"] = event
    await made.read()
    async with asyncio.timeout(PATIENCE_S):
        await made.close()


async def test_a_cancelled_read_leaves_the_source_usable(
    stuck: tuple[FakeLibrary, threading.Event], clock: Clock
) -> None:
    library, event = stuck
    made = NvmlSource(ALL, timeout_s=PATIENCE_S, clock=clock)
    library.hang["nvmlDeviceGetMemoryInfo_v2"] = event
    task = asyncio.create_task(made.read())
    await until(lambda: "nvmlDeviceGetMemoryInfo_v2" in library.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    event.set()
    assert len((await made.read()).samples) == 1
    await made.close()


async def test_closing_gives_the_card_back_until_the_next_reading(
    install: Install, source: NvmlSource
) -> None:
    """D16: every handle is given back, and taken again when it is read again."""
    library = install(*cards(1))
    await source.read()
    await source.close()
    assert library.open == 0
    assert await source.pause(0.01) == ()
    assert library.open == 0
    assert len((await source.read()).samples) == 1
