"""NVML in a process of its own, over a real library that hangs, crashes, vanishes and comes back."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvctl.core.outcomes import SourceFault
from kvctl.gpu.base import GpuReading
from kvctl.gpu.faults import EventKind
from kvctl.gpu.nvml import NvmlSource
from kvctl.gpu.remote import ProcessWorker, environment
from kvctl.gpu.select import parse_selector
from kvctl.gpu.worker import Isolation, WorkerGoneError
from tests.nvml.conftest import Clock
from tests.nvml.drill import Drill

Said = Callable[[], list[str]]
UUID = "GPU-00000000-drill"
PATIENCE_S = 60.0


@pytest.fixture
async def source(drill: Drill, clock: Clock) -> AsyncIterator[NvmlSource]:  # noqa: ARG001 - it must be there
    made = NvmlSource([parse_selector("all")], timeout_s=PATIENCE_S, isolation=Isolation.PROCESS, clock=clock)
    yield made
    await made.close()


def pid_of(source: NvmlSource) -> int:
    worker = source._worker
    assert isinstance(worker, ProcessWorker)
    assert worker.pid is not None
    return worker.pid


async def steady(source: NvmlSource, fault: SourceFault | None) -> GpuReading:
    """Read until the pause after a fault is over; the fault is told within the second poll."""
    async with asyncio.timeout(PATIENCE_S):
        while (reading := await source.read()).fault is not fault:
            assert isinstance(source._clock, Clock)
            source._clock.now += 60
    return reading


async def hangs(source: NvmlSource) -> None:
    """The next reading never comes, and is not waited for longer than its deadline."""
    source._timeout = 0.5
    assert (await source.read()).fault is SourceFault.HUNG
    source._timeout = PATIENCE_S


def there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def descriptors(pid: int) -> set[int]:
    return {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}


def variables(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def gone(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while there(pid):  # noqa: ASYNC110 - a process that is not ours any more
            await asyncio.sleep(0.01)


async def test_it_reads_as_the_thread_does(source: NvmlSource, said: Said) -> None:
    reading = await steady(source, None)
    assert [sample.uuid for sample in reading.samples] == [UUID]
    assert reading.driver == "580.95.05"
    assert reading.samples[0].reserved_bytes == 1 << 30
    assert reading.samples[0].absent == {}
    assert f"watching card 0: {UUID}, NVIDIA H200 (gpus = all)" in said()
    before = pid_of(source)
    await source.read()
    assert pid_of(source) == before


async def test_nothing_is_inherited(source: NvmlSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipes, stderr, and no word of kvctl's settings."""
    monkeypatch.setenv("KVCTL_ENGINE_API_KEY", "secret")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        await steady(source, None)
        assert descriptors(pid_of(source)) == {0, 1, 2, 3}  # 3: answers; 1 leads to stderr by then
        own = variables(pid_of(source))
    finally:
        os.close(reader)
        os.close(writer)
    assert b"KVCTL_" not in own
    assert b"NOTIFY_SOCKET" not in own
    assert b"FAKE_NVML" in own
    assert environment({"CUDA_VISIBLE_DEVICES": "1", "KVCTL_X": ""}) == {"CUDA_VISIBLE_DEVICES": "1"}


async def test_a_crash_is_a_state(drill: Drill, source: NvmlSource, clock: Clock) -> None:
    await steady(source, None)
    drill.rule("nvmlDeviceGetMemoryInfo_v2 crash")
    reading = await source.read()
    assert reading.fault is SourceFault.CRASHED
    assert "signal 11" in reading.detail
    assert (await source.read()).fault is SourceFault.CRASHED  # it waits, with a pause
    drill.rule()
    clock.now += 2
    assert (await steady(source, None)).samples


async def test_a_hang_is_killed(drill: Drill, source: NvmlSource, clock: Clock) -> None:
    """D15: nothing is left of a call that never returned."""
    await steady(source, None)
    pid = pid_of(source)
    drill.rule("nvmlDeviceGetTemperature hang")
    await hangs(source)
    await gone(pid)
    drill.rule()
    clock.now += 2
    assert (await steady(source, None)).samples


async def test_a_driver_of_another_version_gets_another_process(
    drill: Drill, source: NvmlSource, clock: Clock
) -> None:
    """D10: a library once loaded stays loaded, so the one that fits is found by a fresh process alone."""
    await steady(source, None)
    before = pid_of(source)
    drill.rule("nvmlDeviceGetMemoryInfo_v2 18", "nvmlDeviceGetMemoryInfo 18", "nvmlInitWithFlags 18")
    assert (await source.read()).fault is SourceFault.DRIVER_MISMATCH
    await gone(before)
    assert (await source.read()).fault is SourceFault.DRIVER_MISMATCH
    drill.rule()
    clock.now += 2
    await steady(source, None)
    assert pid_of(source) != before


async def test_a_library_that_comes_late(drill: Drill, source: NvmlSource, clock: Clock) -> None:
    """D22, D24: none at first, there later; and no process waits for it meanwhile."""
    drill.remove()
    await steady(source, SourceFault.LIBRARY_MISSING)
    assert source._worker is None
    drill.install()
    clock.now += 60
    assert (await steady(source, None)).samples


async def test_what_the_driver_tells_ends_the_pause(drill: Drill, source: NvmlSource) -> None:
    await steady(source, None)
    drill.tell(0, xid=79)
    drill.tell(0, xid=31)
    drill.tell(0, kind=2)
    events = await source.pause(30)
    assert [event.kind for event in events] == [
        EventKind.XID_FATAL,
        EventKind.XID_APPLICATION,
        EventKind.ECC_UNCORRECTED,
    ]
    assert {event.uuids for event in events} == {(UUID,)}


async def test_a_crash_in_the_pause(drill: Drill, source: NvmlSource) -> None:
    await steady(source, None)
    drill.rule("nvmlEventSetWait_v2 crash")
    assert await source.pause(0.05) == ()
    assert (await source.read()).fault is SourceFault.CRASHED


async def test_no_events_are_a_named_absence(drill: Drill, source: NvmlSource) -> None:
    """D25: a guest's driver that tells nothing by itself is read all the same."""
    drill.rule("nvmlDeviceGetSupportedEventTypes 3")
    reading = await steady(source, None)
    assert reading.samples[0].absent == {"events": "not_supported"}
    assert await source.pause(0.01) == ()


async def test_a_stop_of_the_service_is_not_its_business(source: NvmlSource) -> None:
    await steady(source, None)
    pid = pid_of(source)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert (await source.read()).fault is None
    assert pid_of(source) == pid
    await source.close()
    await gone(pid)


@pytest.mark.usefixtures("drill")
async def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, signal\n"
        "from kvctl.gpu.remote import ProcessWorker\n"
        "async def main():\n"
        "    worker = ProcessWorker(['all'])\n"
        "    await worker.read(30)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(worker.pid))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await process.wait() == -signal.SIGKILL
    await gone(int((tmp_path / "pid").read_text()))


async def test_a_worker_that_was_left_answers_nothing(drill: Drill) -> None:  # noqa: ARG001
    worker = ProcessWorker(["all"])
    await worker.close(1)  # not started: nothing to close
    assert not worker.alive
    await worker.read(PATIENCE_S)
    worker.leave()
    async with asyncio.timeout(PATIENCE_S):
        while worker.alive:  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.01)
    with pytest.raises(WorkerGoneError, match="signal 9"):
        await worker.read(5)


async def test_a_driver_that_hangs_from_the_start(drill: Drill, source: NvmlSource) -> None:
    """Named at the first poll: the start of an interpreter has a time of its own."""
    drill.rule("nvmlInitWithFlags hang")
    await hangs(source)
    drill.rule()
    assert (await steady(source, None)).samples
