"""``python -m tests.gpu.report``: one table of what NVML tells of the cards here, and how fast.

Without a card it says so and exits 0. Anything that contradicts itself is a line that begins with FAIL, and
the exit status is 1.
"""

import asyncio
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvctl.core.telemetry import GpuSample
from kvctl.gpu.base import GpuReading
from kvctl.gpu.binding import Nvml, NvmlFailure, load_binding
from kvctl.gpu.enumerate import enumerate_cards
from kvctl.gpu.nvml import NvmlSource
from kvctl.gpu.select import Card, parse_selector
from kvctl.gpu.worker import Isolation
from tests.gpu import sandbox
from tests.gpu.cuda import Cuda, CudaError

MIB = 1 << 20
GIB = 1 << 30
READS = 200
FIELDS = (
    "total_bytes",
    "free_bytes",
    "used_bytes",
    "reserved_bytes",
    "temperature_c",
    "throttle_reasons",
    "ecc_uncorrected_total",
)


class Report:
    """Lines of the table, and what failed."""

    def __init__(self, out: Callable[[str], object] = print) -> None:
        self._out = out
        self.failures = 0

    def line(self, what: str, value: object, note: str = "") -> None:
        """One row."""
        self._out(f"{what:<44} {value!s:<40} {note}".rstrip())

    def check(self, what: str, *, good: bool, value: object) -> None:
        """One row that can fail."""
        self.failures += not good
        self.line(("ok   " if good else "FAIL ") + what, value)


def source(*selectors: str, isolation: Isolation = Isolation.THREAD) -> NvmlSource:
    """The source as the daemon makes it."""
    chosen = [parse_selector(text) for text in selectors or ("all",)]
    return NvmlSource(chosen, timeout_s=10, isolation=isolation)


async def run(report: Report, *, apart: bool = True) -> GpuReading:
    """The whole report; its first reading. ``apart``: with what is seen from processes of their own."""
    cards = source()
    first = await cards.read()
    if first.fault is not None:
        report.line("no card", first.fault, first.detail)
        await cards.close()
        return first
    report.line("binding, driver", f"{load_binding().version}, {first.driver}")
    report.line("first read (init, enumerate)", milliseconds(first.seconds))
    for sample in first.samples:
        _readings(report, sample)
    await _latency(report, cards)
    await cards.close()
    _calls(report)
    for sample in first.samples:
        await _selection(report, sample)
    _smi(report, (await _once()).samples)
    await _events(report)
    await _memory(report)
    if apart:
        await _isolated(report, first)
        sandbox.line(report, [sample.uuid for sample in first.samples])
    return first


async def _once(*selectors: str) -> GpuReading:
    cards = source(*selectors)
    try:
        return await cards.read()
    finally:
        await cards.close()


def milliseconds(seconds: float) -> str:
    """As shown."""
    return f"{seconds * 1000:.3f} ms"


def _readings(report: Report, sample: GpuSample) -> None:
    report.line(f"card {sample.index}", sample.name, sample.uuid)
    for name in FIELDS:
        value = getattr(sample, name)
        report.line(f"  {name}", f"absent: {sample.absent[name]}" if value is None else value)
        report.check(
            f"{name} is a value or has its word", good=(value is None) == (name in sample.absent), value=""
        )
    parts = (sample.used_bytes, sample.free_bytes, sample.reserved_bytes)
    if sample.total_bytes is not None and None not in parts:
        total = sum(part or 0 for part in parts)
        report.check(
            "used + free + reserved is total", good=abs(total - sample.total_bytes) <= MIB, value=total
        )


async def _latency(report: Report, cards: NvmlSource) -> None:
    seconds = sorted([(await cards.read()).seconds for _ in range(READS)])
    shown = f"p50 {milliseconds(statistics.median(seconds))}, p99 {milliseconds(seconds[int(READS * 0.99)])}"
    report.line(f"read of all cards, {READS} times", shown, f"max {milliseconds(seconds[-1])}")


def _calls(report: Report) -> None:
    """Each call by itself, on the first card."""
    nvml = Nvml(load_binding().module)
    began = time.perf_counter()
    nvml.call("nvmlInit")
    report.line("nvmlInit", milliseconds(time.perf_counter() - began))
    try:
        for card in enumerate_cards(nvml)[:1]:
            for name, arguments in _one_by_one(nvml.module, card):
                _timed(report, nvml, name, arguments)
    finally:
        nvml.call("nvmlShutdown")


def _one_by_one(module: Any, card: Card) -> Iterator[tuple[str, tuple[Any, ...]]]:
    yield "nvmlDeviceGetMemoryInfo", (card.handle,)
    yield "nvmlDeviceGetMemoryInfo", (card.handle, module.nvmlMemory_v2)
    yield "nvmlDeviceGetTemperature", (card.handle, module.NVML_TEMPERATURE_GPU)
    yield "nvmlDeviceGetCurrentClocksEventReasons", (card.handle,)
    errors = (module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, module.NVML_VOLATILE_ECC)
    yield "nvmlDeviceGetTotalEccErrors", (card.handle, *errors)
    yield "nvmlDeviceGetMigMode", (card.handle,)
    yield "nvmlDeviceGetComputeRunningProcesses", (card.handle,)


def _timed(report: Report, nvml: Nvml, name: str, arguments: tuple[Any, ...]) -> None:
    seconds, answer = [], ""
    for _ in range(READS):
        began = time.perf_counter()
        try:
            answer = str(nvml.call(name, *arguments))
        except NvmlFailure as failure:
            answer = f"{failure.absence}: {failure}"
        seconds.append(time.perf_counter() - began)
    shown = f"p50 {milliseconds(statistics.median(seconds))}, max {milliseconds(max(seconds))}"
    report.line(name + ("_v2" if len(arguments) == 2 and "MemoryInfo" in name else ""), shown, answer[:120])


async def _selection(report: Report, sample: GpuSample) -> None:
    for text in (sample.uuid, sample.uuid[:12], str(sample.index)):
        found = [each.uuid for each in (await _once(text)).samples]
        report.check(f"gpus = {text} means this card", good=sample.uuid in found, value=", ".join(found))


def _smi(report: Report, samples: tuple[GpuSample, ...]) -> None:
    """The same numbers as nvidia-smi's, to a MiB (free may move between the two)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        report.line("nvidia-smi", "not here")
        return
    fields = "uuid,memory.total,memory.reserved,memory.free"
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=30
    ).stdout.splitlines()
    told = {
        words[0]: words[1:] for words in ([w.strip() for w in line.split(",")] for line in lines) if words
    }
    for sample in samples:
        for name, text in zip(
            ("total_bytes", "reserved_bytes", "free_bytes"), told.get(sample.uuid, ()), strict=False
        ):
            value = getattr(sample, name)
            if value is not None and text.isdigit():
                room = 64 if name == "free_bytes" else 1
                good = abs(value / MIB - int(text)) <= room
                report.check(f"{name} is nvidia-smi's", good=good, value=f"{value / MIB:.1f} MiB, {text} MiB")


async def _memory(report: Report) -> None:
    """How long after an allocation NVML shows it."""
    try:
        cuda = Cuda()
        with contextlib.ExitStack() as stack:
            stack.enter_context(cuda.context())
            cards = source(cuda.uuid)
            before = (await cards.read()).samples[0].free_bytes or 0
            stack.enter_context(cuda.taken(4 * GIB))
            began = time.perf_counter()
            fallen = 0
            while fallen < 4 * GIB - MIB and time.perf_counter() - began < 5:
                fallen = before - ((await cards.read()).samples[0].free_bytes or 0)
            lag = time.perf_counter() - began
            report.check(
                "4 GiB taken are seen", good=fallen >= 4 * GIB - MIB, value=f"after {milliseconds(lag)}"
            )
            await cards.close()
            await _ourselves(report, cuda.uuid)
    except CudaError as error:
        report.line("allocation", "not tried", str(error))


async def _ourselves(report: Report, uuid: str) -> None:
    """Whether a process that computes finds its own pid: what gpus = auto needs."""
    found = (await _once(uuid)).processes.get(uuid)
    if found is None:
        report.line("processes on this card", "not told")
        return
    pids = ", ".join(f"{each.pid} ({each.used_bytes})" for each in found)
    own = any(each.pid == os.getpid() for each in found)
    note = (
        "this process is among them"
        if own
        else "this process is not: another pid namespace, gpus = auto fails"
    )
    report.line("processes on this card", pids or "none", note)


async def _events(report: Report) -> None:
    """What the driver would tell of itself, and how well it keeps a wait's time."""
    cards = source()
    first = await cards.read()
    for sample in first.samples:
        report.line(f"events of {sample.uuid}", sample.absent.get("events", "registered"))
    began = time.perf_counter()
    events = await cards.pause(1.0)
    waited = milliseconds(time.perf_counter() - began)
    report.line("a pause of 1 s", waited, "; ".join(event.sentence for event in events) or "nothing was told")
    await cards.close()


async def _isolated(report: Report, first: GpuReading) -> None:
    """The same reading from a process of its own: what it costs, and that nothing is held afterwards."""
    cards = source(isolation=Isolation.PROCESS)
    began = time.perf_counter()
    reading = await cards.read()
    report.line("process: first read", milliseconds(time.perf_counter() - began))
    same = [sample.uuid for sample in reading.samples] == [sample.uuid for sample in first.samples]
    report.check("process: reads the same cards", good=same, value=reading.fault or "")
    if reading.fault is None:
        seconds = []
        for _ in range(READS):
            began = time.perf_counter()
            await cards.read()
            seconds.append(time.perf_counter() - began)
        shown = f"p50 {milliseconds(statistics.median(seconds))}, max {milliseconds(max(seconds))}"
        report.line(f"process: read, {READS} times, as the loop sees it", shown)
        report.line("process: private memory", sandbox.private_memory())
    await cards.close()
    held = sandbox.devices_held(sandbox.children())
    report.check("process: nothing is held after closing", good=not held, value=", ".join(held))
    ours = sandbox.devices_held(["self"])  # where NVML was shut down in a thread, and maybe CUDA was used
    report.line("thread: held after closing", ", ".join(ours) or "nothing")


def main() -> int:
    """Print the table."""
    report = Report()
    asyncio.run(run(report))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
