"""``python -m tests.bench.admin``: what a hundred admin clients cost the callers of the data plane.

Two kvctl in front of the mock engine of tests/bench/dataplane, 200 small chat requests a second through the
first. ``--clients`` ask an admin side without a pause (status, queue, overrides, decisions and a metrics page
over the unix socket; the metrics page, the status page's data and a probe over TCP) and one more hangs in the
middle of its request. Windows alternate in an order that turns: the clients ask the first kvctl, or the
second, so that the machine has the same work in both; the difference is what they take from the callers of
the first. The clients stand in for other machines, so they run at the lowest priority. Told are the medians
of the pairs' differences of p50 and p99, in ms, and admin answers a second.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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
TCP_ROUTES = ("/metrics", "/v1/page", "/readyz")


@dataclass(frozen=True, slots=True)
class Window:
    """One window of the measurement, ms."""

    p50: float
    p99: float


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
        tasks.append(asyncio.create_task(self._hangs()))
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


def window(port: int, seconds: float) -> Window:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cuts = quantiles(runner.run(open_loop(port, CHAT, rate=RATE, seconds=seconds)), n=100)
    return Window(p50=cuts[49] * 1000, p99=cuts[98] * 1000)


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
            runner.run(closed_loop(port, CHAT, requests=400, connections=16))
        quiet = window(port, options.seconds)
        elsewhere, busy, answers = _pairs(options, port, clients, (there, here))
    changes = [(b.p50 - e.p50, b.p99 - e.p99) for e, b in zip(elsewhere, busy, strict=True)]
    return {
        "quiet_p50_ms": quiet.p50,
        "quiet_p99_ms": quiet.p99,
        "elsewhere_p50_ms": median(each.p50 for each in elsewhere),
        "elsewhere_p99_ms": median(each.p99 for each in elsewhere),
        "added_p50_ms": median(p50 for p50, _ in changes),
        "added_p99_ms": median(p99 for _, p99 in changes),
        "admin_answers_per_s": answers / (options.pairs * options.seconds),
    }


def _pairs(
    options: argparse.Namespace, port: int, clients: Crowd, where: tuple[str, str]
) -> tuple[list[Window], list[Window], int]:
    taken: dict[bool, list[Window]] = {False: [], True: []}
    answers = 0
    for pair in range(options.pairs):
        for busy in (False, True) if pair % 2 else (True, False):
            before = clients.order(where[busy])
            taken[busy].append(window(port, options.seconds))
            answers += (clients.order("rest") - before) * busy
        made = (taken[True][-1].p50 - taken[False][-1].p50, taken[True][-1].p99 - taken[False][-1].p99)
        sys.stderr.write(f"pair {pair + 1}: p50 {made[0]:+.2f} ms, p99 {made[1]:+.2f} ms\n")
    return taken[False], taken[True], answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--crowd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.crowd:
        os.nice(19)
        uvloop.run(_clients(options.crowd))
        return
    with tempfile.TemporaryDirectory(prefix="kvctl-admin-") as name:
        result = measure(options, Path(name))
    sys.stdout.write(json.dumps({key: round(value, 3) for key, value in result.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
