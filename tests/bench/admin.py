"""``python -m tests.bench.admin``: what a hundred admin clients cost the callers of the data plane.

Two kvctl in front of the mock engine of tests/bench/dataplane, 200 small chat requests a second through the
first. ``--clients`` ask an admin side without a pause (status, queue, overrides, decisions and a metrics page
over the unix socket; the metrics page, the status page's data and a probe over TCP), one more hangs in the
middle of its request, and one asks for page after page and reads none. Beside them on-call asks for the
status and makes a change, each time on a new connection.

Three kinds of windows take turns, each kind in every place: all of them ask the first kvctl (*here*), or the
second (*elsewhere*), or nobody asks (*rest*). *Elsewhere* burns the same CPU in the same processes, so *here*
less *elsewhere* is what they take from the callers of the first by being asked of the same loop; *here* less
*rest* has in it also what the machine's cores lose to them. The clients stand in for other machines: they run
at idle priority, where the system knows one. Told are the medians of the differences of p50 and p99, in ms,
admin answers a second, and how long on-call waited for a status and for a change, ms.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count, permutations
from pathlib import Path
from statistics import median, quantiles
from typing import IO

import uvloop

from tests.bench.dataplane.client import closed_loop, open_loop, request
from tests.bench.dataplane.engine import MODEL
from tests.bench.dataplane.peers import kvctl
from tests.bench.dataplane.running import engine, free_port, running
from tests.tokens.tiny import write

RATE = 200.0
MESSAGES = [{"role": "user", "content": "What is the capital of France, and why is it not Lyon? " * 4}]
CHAT = request(
    "/v1/chat/completions", json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 8}).encode()
)
SOCKET_ROUTES = ("status", "status", "queue", "overrides", "decisions?limit=20", "budget", "metrics")
BODY = b'{"value": 0.1, "ttl_s": 60, "reason": "bench"}'
MOVE = (
    b"PUT /v1/overrides/margin HTTP/1.1\r\nHost: k\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
TCP_ROUTES = ("/metrics", "/v1/page", "/readyz")


@dataclass(frozen=True, slots=True)
class Window:
    """One window of the measurement, ms; ``status`` and ``change``: each of on-call's waits."""

    p50: float
    p99: float
    answers: int
    status: tuple[float, ...]
    change: tuple[float, ...]


# --- the clients ------------------------------------------------------------------------------------------


class Clients:
    """Asks while it may; ``answers`` counts."""

    def __init__(self, number: int) -> None:
        self._socket, self._port, self._turned = "", 0, 0
        self._number = number
        self._may = asyncio.Event()
        self.answers = 0

    async def run(self, orders: asyncio.StreamReader) -> None:
        """Orders, one a line: which socket and port, or ``rest``; answers each with the answers so far."""
        tasks = [asyncio.create_task(self._client(number)) for number in range(self._number)]
        tasks += [asyncio.create_task(self._hangs()), asyncio.create_task(self._never_reads())]
        while order := await orders.readline():
            self._turned += 1
            if order == b"rest\n":
                self._may.clear()
            else:
                self._socket, _, port = order.decode().strip().rpartition(" ")
                self._port = int(port)
                self._may.set()
            sys.stdout.write(f"{self.answers}\n")
            sys.stdout.flush()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, number: int) -> None:
        while True:
            await self._may.wait()
            try:
                await self._ask_on(number)
            except (OSError, asyncio.IncompleteReadError, ValueError):
                await asyncio.sleep(0.05)

    async def _ask_on(self, number: int) -> None:
        tcp = number % 4 == 0
        reader, writer = await (
            asyncio.open_connection("127.0.0.1", self._port)
            if tcp
            else asyncio.open_unix_connection(self._socket)
        )
        path = TCP_ROUTES[number // 4 % 3] if tcp else f"/v1/{SOCKET_ROUTES[number % len(SOCKET_ROUTES)]}"
        turned = self._turned
        try:
            while self._may.is_set() and turned == self._turned:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: k\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
                )
                await reader.readexactly(int(length[15:]))
                self.answers += 1
        finally:
            writer.close()

    async def _hangs(self) -> None:
        """Says half of a request, for ever; comes again when it is cut."""
        while True:
            await self._may.wait()
            turned = self._turned
            reader, writer = await asyncio.open_unix_connection(self._socket)
            writer.write(b"PUT /v1/overrides/margin HTTP/1.1\r\nHost: k\r\nContent-Length: 900\r\n\r\n{")
            while turned == self._turned and not reader.at_eof():
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.2)
            writer.close()

    async def _never_reads(self) -> None:
        """Asks for fifty pages, and takes none."""
        while True:
            await self._may.wait()
            turned = self._turned
            _, writer = await asyncio.open_unix_connection(self._socket, limit=1)
            writer.write(b"GET /v1/metrics HTTP/1.1\r\nHost: k\r\n\r\n" * 50)
            while turned == self._turned:  # noqa: ASYNC110 - so is the order that it waits for
                await asyncio.sleep(0.2)
            writer.transport.abort()


async def _clients(number: int) -> None:
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    await Clients(number).run(orders)


class Crowd:
    """The clients' process."""

    def __init__(self, process: "subprocess.Popen[str]", orders: IO[str], told: IO[str]) -> None:
        self._process = process
        self._orders = orders
        self._told = told

    def order(self, word: str) -> int:
        """Answers that they had so far."""
        self._orders.write(f"{word}\n")
        self._orders.flush()
        return int(self._told.readline())


@contextmanager
def crowd(number: int) -> Iterator[Crowd]:
    command = [sys.executable, "-m", "tests.bench.admin", "--crowd", str(number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Crowd(process, process.stdin, process.stdout)
        process.stdin.close()


# --- the measurement --------------------------------------------------------------------------------------


async def on_call(path: str, stop: asyncio.Event, status: list[float], change: list[float]) -> None:
    """Somebody at a keyboard: looks at the status again and again, and now and then moves the margin."""
    for number in count():
        if number % 4:
            status.append(
                await _asked(path, b"GET /v1/status HTTP/1.1\r\nHost: k\r\nConnection: close\r\n\r\n")
            )
        else:
            change.append(await _asked(path, MOVE))
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.15)
        if stop.is_set():
            return


async def _asked(path: str, ask: bytes) -> float:
    """Milliseconds from the connection to the answer's end. Raises RuntimeError on any status but 200."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(ask)
    answer = await reader.read()
    taken = (time.perf_counter() - began) * 1000
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer[:300].decode(errors="replace"))
    return taken


async def _window(port: int, seconds: float, path: str | None) -> Window:
    status: list[float] = []
    change: list[float] = []
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        if path is not None:
            group.create_task(on_call(path, stop, status, change))
        taken = await open_loop(port, [CHAT] * int(RATE * seconds), rate=RATE)
        stop.set()
    cuts = quantiles(taken, n=100)
    return Window(cuts[49] * 1000, cuts[98] * 1000, 0, tuple(status), tuple(change))


def window(port: int, seconds: float, where: str | None, clients: Crowd) -> Window:
    """``where``: whom all of them ask; None: nobody."""
    before = clients.order(where or "rest")
    path = None if where is None else where.rpartition(" ")[0]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        made = runner.run(_window(port, seconds, path))
    return replace(made, answers=clients.order("rest") - before)


@contextmanager
def daemon(folder: Path, upstream: int) -> Iterator[tuple[int, str]]:
    """The data port of a kvctl, and where its admin side is."""
    folder.mkdir()
    command = kvctl(write(folder / "tokenizer")).command
    assert command is not None
    port, admin = free_port(), free_port()
    words = command(port, upstream, folder)
    words = [f"KVCTL_ADMIN_LISTEN=127.0.0.1:{admin}" if "ADMIN_LISTEN" in each else each for each in words]
    with running(words, port, folder / "log"):
        yield port, f"{folder / 'admin.sock'} {admin}"


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    with ExitStack() as stack:
        behind = stack.enter_context(engine(folder))
        port, here = stack.enter_context(daemon(folder / "one", behind.port))
        _, there = stack.enter_context(daemon(folder / "other", behind.port))
        clients = stack.enter_context(crowd(options.clients))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(closed_loop(port, [CHAT] * 400, connections=16))
        taken = _windows(options, port, clients, {"rest": None, "elsewhere": there, "here": here})
    here_, seconds = taken["here"], options.pairs * options.seconds
    waits = {name: [ms for each in here_ for ms in getattr(each, name)] for name in ("status", "change")}
    return {
        **{f"{kind}_p50_ms": median(each.p50 for each in taken[kind]) for kind in taken},
        **{f"{kind}_p99_ms": median(each.p99 for each in taken[kind]) for kind in taken},
        **_added(taken, "elsewhere"),
        **_added(taken, "rest"),
        **{f"{kind}_answers_per_s": sum(w.answers for w in taken[kind]) / seconds for kind in taken},
        **{f"on_call_{name}_p50_ms": median(each) for name, each in waits.items()},
        **{f"on_call_{name}_max_ms": max(each) for name, each in waits.items()},
    }


def _added(taken: Mapping[str, list[Window]], to: str) -> dict[str, float]:
    pairs = list(zip(taken["here"], taken[to], strict=True))
    return {
        f"added_to_{to}_p50_ms": median(here.p50 - other.p50 for here, other in pairs),
        f"added_to_{to}_p99_ms": median(here.p99 - other.p99 for here, other in pairs),
    }


def _windows(
    options: argparse.Namespace, port: int, clients: Crowd, where: Mapping[str, str | None]
) -> dict[str, list[Window]]:
    taken: dict[str, list[Window]] = {kind: [] for kind in where}
    orders = list(permutations(where))
    for pair in range(options.pairs):
        for kind in orders[pair % len(orders)]:
            taken[kind].append(window(port, options.seconds, where[kind], clients))
        here, elsewhere, rest = (taken[kind][-1].p99 for kind in ("here", "elsewhere", "rest"))
        sys.stderr.write(
            f"{pair + 1}: p99 {here:.2f} ms here, {elsewhere:.2f} elsewhere, {rest:.2f} at rest\n"
        )
    return taken


def _give_way() -> None:
    """Take only the CPU that nobody else wants."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=12, help="windows of each kind")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--crowd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.crowd:
        _give_way()
        uvloop.run(_clients(options.crowd))
        return
    with tempfile.TemporaryDirectory(prefix="kvctl-admin-") as name:
        result = measure(options, Path(name))
    sys.stdout.write(json.dumps({key: round(value, 3) for key, value in result.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
