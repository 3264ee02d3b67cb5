"""``python -m tests.bench.admin``: what a hundred admin clients cost the callers of the data plane.

One kvctl in front of the mock engine of tests/bench/dataplane, 200 small chat requests a second through it.
Windows alternate, quiet and busy, in an order that turns: in a busy one ``--clients`` ask the admin side
without a pause (status, queue, overrides, decisions and a metrics page over the unix socket; the metrics page
and the status page's data over TCP) and one more hangs in the middle of its request. Told are the medians of
the pairs' differences of p50 and p99, in ms, and how many answers the admin side gave a second.

The clients are a process of their own, so that their work is not the measuring one's.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import IO

import uvloop

from kvctl.admin.client import AdminClient
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

    def __init__(self, socket: str, port: int, number: int) -> None:
        self._socket = socket
        self._port = port
        self._number = number
        self._may = asyncio.Event()
        self.answers = 0

    async def run(self, orders: asyncio.StreamReader) -> None:
        """Orders, one a line: ``go``, ``rest``; answers each with the answers counted so far."""
        tasks = [asyncio.create_task(self._client(number)) for number in range(self._number)]
        tasks.append(asyncio.create_task(self._hangs()))
        while order := await orders.readline():
            (self._may.set if order == b"go\n" else self._may.clear)()
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
        try:
            while self._may.is_set():
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
            reader, writer = await asyncio.open_unix_connection(self._socket)
            writer.write(b"PUT /v1/overrides/margin HTTP/1.1\r\nHost: k\r\nContent-Length: 900\r\n\r\n{")
            await reader.read()
            writer.close()


async def _clients(socket: str, port: int, number: int) -> None:
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    await Clients(socket, port, number).run(orders)


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
def crowd(socket: Path, port: int, number: int) -> Iterator[Crowd]:
    command = [sys.executable, "-m", "tests.bench.admin", "--crowd", str(socket), str(port), str(number)]
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


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    command = kvctl(write(folder / "tokenizer")).command
    assert command is not None
    port, admin = free_port(), free_port()
    with engine(folder) as behind:
        words = command(port, behind.port, folder)
        words = [
            f"KVCTL_ADMIN_LISTEN=127.0.0.1:{admin}" if "ADMIN_LISTEN" in each else each for each in words
        ]
        with (
            running(words, port, folder / "log"),
            crowd(folder / "admin.sock", admin, options.clients) as clients,
        ):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(closed_loop(port, CHAT, requests=400, connections=16))
            quiet, busy, answers = _pairs(options, port, clients)
            AdminClient(folder / "admin.sock").get("/v1/status")
    changes = [(b.p50 - q.p50, b.p99 - q.p99) for q, b in zip(quiet, busy, strict=True)]
    return {
        "quiet_p50_ms": median(each.p50 for each in quiet),
        "quiet_p99_ms": median(each.p99 for each in quiet),
        "added_p50_ms": median(p50 for p50, _ in changes),
        "added_p99_ms": median(p99 for _, p99 in changes),
        "admin_answers_per_s": answers / (options.pairs * options.seconds),
    }


def _pairs(options: argparse.Namespace, port: int, clients: Crowd) -> tuple[list[Window], list[Window], int]:
    taken: dict[bool, list[Window]] = {False: [], True: []}
    answers = 0
    for pair in range(options.pairs):
        for busy in (False, True) if pair % 2 else (True, False):
            before = clients.order("go" if busy else "rest")
            taken[busy].append(window(port, options.seconds))
            answers += clients.order("rest") - before
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
    parser.add_argument("--crowd", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.crowd:
        socket, port, number = options.crowd
        uvloop.run(_clients(socket, int(port), int(number)))
        return
    with tempfile.TemporaryDirectory(prefix="kvctl-admin-") as name:
        result = measure(options, Path(name))
    sys.stdout.write(json.dumps({key: round(value, 3) for key, value in result.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
