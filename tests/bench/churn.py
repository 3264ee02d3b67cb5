"""``python -m tests.bench.churn --minutes N``: a daemon under faults at random, and what is left behind.

Callers leave at any moment, send halves, garbage, requests too large or none, read slowly or not at all; the
way to the simulated engine cuts, resets and delays at random. Afterwards nothing may be left: no lease, no
descriptor, no request in the engine, and no memory that grows. JSON on standard output; exit 1 if any is.
"""

import argparse
import asyncio
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.live.daemon import Daemon, eventually
from tests.live.engine import http_get
from tests.ports import free_port

PAGE = os.sysconf("SC_PAGE_SIZE")
SETTINGS = {
    "TOKENIZER": "bound",
    "GPUS": "none",
    "HEADER_TIMEOUT": "500ms",
    "BODY_TIMEOUT": "500ms",
    "CLIENT_WRITE_TIMEOUT": "1s",
    "MAX_BODY_BYTES": "1MiB",
    "QUEUE_MAX_WAIT": "500ms",
    "LOG_LEVEL": "warning",
    "DECISION_LOG_SIZE": "1000",  # full, and no longer growing, within the first minute
}
SMALL_MOVE_BYTES = 1 << 20


@dataclass
class Report:
    """What was done and what was left; sizes in bytes."""

    seconds: float = 0.0
    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    faults_on_the_way: Counter[str] = field(default_factory=Counter)
    leases_left: int = -1
    claimed_tokens_left: int = -1
    in_engine_left: int = -1
    descriptors: tuple[int, int] = (0, 0)
    rss_by_minute: list[int] = field(default_factory=list)  # the median of each minute (or tenth) of the run
    rss_moved_late: int = 0  # between the tenths of the second half of the run
    defects: list[str] = field(default_factory=list)  # lines of the daemon's log

    def wrongs(self, *, judge_memory: bool) -> Iterator[str]:
        """What must not be."""
        left = {"leases": self.leases_left, "claimed tokens": self.claimed_tokens_left}
        left["requests in the engine"] = self.in_engine_left
        yield from (f"{count} {what} left" for what, count in left.items() if count)
        if self.descriptors[0] != self.descriptors[1]:
            yield f"descriptors before and after: {self.descriptors}"
        if judge_memory and self.rss_moved_late > SMALL_MOVE_BYTES:
            yield f"memory moved by {self.rss_moved_late} bytes in the second half"
        yield from self.defects


class Way:
    """The way from the daemon to the engine: carries bytes, and at random does not."""

    def __init__(self, target: int, dice: random.Random, seen: Counter[str]) -> None:
        self._target, self._dice, self._seen = target, dice, seen
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Close everything."""
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dice = self._dice
        there: asyncio.StreamWriter | None = None
        try:
            first = await reader.read(1 << 16)
            polled = first.startswith(b"GET ")
            act = "none" if polled else dice.choices(("none", "cut", "reset", "slow"), (76, 8, 8, 8))[0]
            self._seen[act] += not polled
            back, there = await asyncio.open_connection("127.0.0.1", self._target)
            there.write(first)
            up = asyncio.create_task(_pump(reader, there, None, 0.0))
            after = dice.randrange(3000) if act in ("cut", "reset") else None
            down = asyncio.create_task(_pump(back, writer, after, 0.02 if act == "slow" else 0.0))
            try:
                await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (up, down):
                    task.cancel()
                await asyncio.gather(up, down, return_exceptions=True)
            if act == "reset":
                reset(writer)
        except (ConnectionError, OSError):
            pass
        finally:
            for each in (writer, there):
                if each is not None:
                    each.transport.abort() if each is there else each.close()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stop_after: int | None, delay: float
) -> None:
    sent = 0
    while data := await reader.read(1 << 16):
        if stop_after is not None and sent + len(data) > stop_after:
            writer.write(data[: stop_after - sent])
            return
        sent += len(data)
        await asyncio.sleep(delay)
        writer.write(data)
        await writer.drain()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset."""
    sock = writer.get_extra_info("socket")
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Callers:
    """Callers of all kinds, until the time is over."""

    def __init__(self, port: int, dice: random.Random, report: Report) -> None:
        self._port, self._dice, self._report = port, dice, report

    async def run(self, seconds: float, count: int) -> None:
        """``count`` at once for ``seconds``."""
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._one(until) for _ in range(count)))

    async def _one(self, until: float) -> None:
        acts: dict[Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], int] = {
            self._whole: 50,
            self._leaves: 20,
            self._half: 8,
            self._garbage: 4,
            self._too_large: 4,
            self._slow_reader: 6,
            self._says_nothing: 2,
        }
        while time.monotonic() < until:
            act = self._dice.choices(list(acts), list(acts.values()))[0]
            self._report.acts[act.__name__.strip("_")] += 1
            self._report.requests += 1
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            try:
                async with asyncio.timeout(20):
                    await act(reader, writer)
            except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
                self._report.statuses["broken"] += 1
            finally:
                reset(writer) if self._dice.random() < 0.3 else writer.close()

    def _request(self) -> bytes:
        dice = self._dice
        body = json.dumps(
            {
                "model": "sim",
                "messages": [{"role": "user", "content": "word " * dice.choice((1, 20, 400, 3000))}],
                "max_tokens": dice.choice((1, 4, 16, 64)),
                "stream": dice.random() < 0.6,
            }
        ).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def _answer(self, reader: asyncio.StreamReader, pause: float = 0.0) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self._report.statuses[head[9:12].decode()] += 1
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if length is not None:
            await reader.readexactly(int(length[1]))
            return
        while (size := int(await reader.readuntil(b"\r\n"), 16)) or pause < 0:
            await reader.readexactly(size + 2)
            await asyncio.sleep(pause)
        await reader.readexactly(2)

    async def _whole(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(self._dice.choice((1, 1, 3))):
            writer.write(self._request())
            await self._answer(reader)

    async def _leaves(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._request())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._dice.choice((0.0, 0.01, 0.05, 0.2, 0.5))):
                await self._answer(reader)

    async def _half(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = self._request()
        writer.write(request[: self._dice.randrange(len(request))])
        if self._dice.random() < 0.3:
            await self._answer(reader)
        await asyncio.sleep(self._dice.choice((0, 0.05)))

    async def _garbage(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._dice.randbytes(200) + b"\r\n\r\n")
        await self._answer(reader)

    async def _too_large(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._request().replace(b"Content-Length: ", b"Content-Length: 99999999", 1))
        await self._answer(reader)

    async def _slow_reader(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._request())
        await self._answer(reader, 0.03)

    async def _says_nothing(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del writer
        await reader.read()


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - a count of names is all that is wanted


async def _watch(pid: int, seconds: float, into: list[int]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        into.append(rss(pid))
        await asyncio.sleep(0.25)


@contextmanager
def simulated(port: int) -> Iterator[str]:
    """The simulated engine as a process; its URL."""
    command = [
        sys.executable,
        "-m",
        "kvctl.sim",
        "--port",
        str(port),
        "--profile",
        "8b-h200",
        "--blocks",
        "6000",
    ]
    with subprocess.Popen(
        [*command, "--with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            eventually(lambda: http_get(f"{url}/v1/models")[0] == 200, 20, "the simulated engine answers")
            yield url
        finally:
            process.terminate()


async def _churn(report: Report, way: Way, folder: Path, *, seconds: float, count: int, seed: int) -> None:
    daemon = Daemon(f"http://127.0.0.1:{way.port}", folder, SETTINGS)
    await asyncio.to_thread(daemon.start)
    if daemon.process is None:
        raise AssertionError("no process")
    pid, samples = daemon.process.pid, list[int]()
    try:
        await asyncio.to_thread(daemon.wait_ready)
        callers = Callers(daemon.port, random.Random(seed), report)
        await callers.run(min(3.0, seconds / 4), count)  # what is made once is made before the count
        before = await _settled(daemon, pid)
        began = time.monotonic()
        await asyncio.gather(callers.run(seconds, count), _watch(pid, seconds, samples))
        report.seconds = round(time.monotonic() - began, 1)
        report.descriptors = before, await _settled(daemon, pid)
        report.leases_left = int(await asyncio.to_thread(daemon.metric, "leases"))
        report.claimed_tokens_left = int(await asyncio.to_thread(daemon.metric, "claimed_tokens"))
    finally:
        await asyncio.to_thread(daemon.stop)
    tenth = max(len(samples) // 10, 1)
    report.rss_by_minute = [int(median(samples[at : at + tenth])) for at in range(0, len(samples), tenth)][
        :10
    ]
    late = report.rss_by_minute[5:] or [0]
    report.rss_moved_late = max(late) - min(late)
    words = ("Traceback", "defect", "without being counted", "never awaited", "was destroyed")
    lines = (folder / "log").read_text(errors="replace").splitlines()
    report.defects = [line for line in lines if any(word in line for word in words)][:20]


async def _settled(daemon: Daemon, pid: int) -> int:
    """Descriptors once nothing runs and idle connections have aged."""
    await asyncio.to_thread(daemon.wait_empty, 30)
    await asyncio.sleep(5.5)
    seen = []
    for _ in range(20):
        await asyncio.sleep(0.05)
        seen.append(descriptors(pid))
    return min(seen)  # a poll or a look at /metrics may be under way


async def run(seconds: float, count: int = 32, seed: int = 1) -> Report:
    """Churn for so long, with so many callers at once."""
    report, dice = Report(), random.Random(seed + 1)
    with tempfile.TemporaryDirectory() as folder, simulated(free_port()) as url:
        way = Way(int(url.rpartition(":")[2]), dice, report.faults_on_the_way)
        await way.start()
        try:
            await _churn(report, way, Path(folder), seconds=seconds, count=count, seed=seed)
        finally:
            await way.close()
        await asyncio.to_thread(eventually, lambda: _in_engine(url) == 0, 20, "the engine runs nothing")
        report.in_engine_left = _in_engine(url)
    return report


def _in_engine(url: str) -> int:
    page = http_get(f"{url}/metrics")[1]
    found = re.findall(
        r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", page, re.MULTILINE
    )
    return int(sum(map(float, found))) if found else -1


def _plain(report: Report) -> dict[str, Any]:
    return vars(report) | {"requests_per_second": round(report.requests / max(report.seconds, 1), 1)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.churn", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    report = asyncio.run(run(options.minutes * 60, options.callers, options.seed))
    wrongs = list(report.wrongs(judge_memory=True))
    sys.stdout.write(json.dumps(_plain(report) | {"wrong": wrongs}, indent=2) + "\n")
    sys.exit(1 if wrongs else 0)


if __name__ == "__main__":
    main()
