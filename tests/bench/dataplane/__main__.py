"""``python -m tests.bench.dataplane``: the cost of the data plane, beside nginx, haproxy, envoy, vllm-router.

All proxies stand in front of one mock engine and get the same requests; in each round every proxy has its
turn, in an order that rotates, so that what the machine does meanwhile hits all of them. Figures are medians
over rounds. CPU is what the proxy's processes used, by their clocks. On a busy machine compare columns, not
runs.

* ``cpu_us_per_request``: small chat requests, everything on (kvctl: template, count, gate, lease, metrics).
* ``cpu_us_per_request_relay``: completions of token ids (kvctl: gate and lease, nothing to count).
* ``cpu_us_per_event``: 64 streams of 100 events a second.
* ``added_p50_ms``, ``added_p99_ms``: at 200 requests a second, over the same load straight to the engine.
* ``cpu_us_per_request_at_200``: meanwhile. What it has beyond ``cpu_us_per_request`` is code and data that
  left the caches between requests, and what a busy proxy does once for several. Callers wait for it too.
* ``added_p50_ms_in_turn``: one caller, who asks again as soon as it has its answer: nothing grows cold.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import uvloop

from tests.bench.dataplane import own
from tests.bench.dataplane.client import closed_loop, open_loop, request, streams
from tests.bench.dataplane.engine import MODEL
from tests.bench.dataplane.peers import Peer, all_peers
from tests.bench.dataplane.running import Child, engine, free_port, running
from tests.tokens.tiny import write

T = TypeVar("T")

CONNECTIONS = 32
STREAMS, GAP_MS = 64, 10
IN_TURN = 700  # requests on one connection: nginx closes one after a thousand
RATE = 200.0


def chats() -> Iterator[bytes]:
    """Small chats, no two alike: a proxy that remembers a question gains nothing by it."""
    system = {"role": "system", "content": "You are a helpful assistant."}
    for number in count(10_000_000):
        question = f"Name the planet with the number {number}, and say in a sentence why it is known."
        messages = [system, {"role": "user", "content": question}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 16}
        yield request("/v1/chat/completions", json.dumps(body).encode())


def ids() -> Iterator[bytes]:
    """Prompts of token ids, no two alike."""
    for number in count(10_000_000):
        prompt = [int(digit) for digit in str(number)] * 3
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 16}
        yield request("/v1/completions", json.dumps(body).encode())


CHATS, IDS = chats(), ids()


def stream_request(events: int, gap_ms: int) -> bytes:
    messages = [{"role": "user", "content": f"gap={gap_ms}"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": events, "stream": True}
    return request("/v1/chat/completions", json.dumps(body).encode())


def say(line: str) -> None:
    sys.stderr.write(f"dataplane: {line}\n")
    sys.stderr.flush()


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Round:
    """The measurements of one turn of one proxy."""

    def __init__(self, requests: int, seconds: float) -> None:
        self._requests = requests
        self._seconds = seconds

    def cpu_per_request(self, proxy: Child, asks: Iterator[bytes]) -> float:
        sent = list(islice(asks, self._requests))
        before = proxy.cpu_s()
        answered = run(closed_loop(proxy.port, sent, connections=CONNECTIONS))
        return (proxy.cpu_s() - before) / len(answered) * 1e6

    def cpu_per_event(self, proxy: Child) -> float:
        ask = stream_request(int(self._seconds * 1000 / GAP_MS), GAP_MS)
        before = proxy.cpu_s()
        events = run(streams(proxy.port, ask, STREAMS))
        return (proxy.cpu_s() - before) / events * 1e6

    def latencies(self, port: int) -> tuple[float, float]:
        """p50 and p99 in ms."""
        sent = list(islice(CHATS, int(RATE * self._seconds)))
        taken = run(open_loop(port, sent, rate=RATE))
        cuts = quantiles(taken, n=100)
        return cuts[49] * 1000, cuts[98] * 1000

    def in_turn(self, port: int) -> float:
        """p50 in ms."""
        return median(run(closed_loop(port, islice(CHATS, IN_TURN), connections=1))) * 1000

    def of(self, proxy: Child, direct: Child) -> dict[str, float]:
        run(closed_loop(proxy.port, islice(CHATS, 200), connections=CONNECTIONS))  # warm
        plain = self.latencies(direct.port)
        before = proxy.cpu_s()
        through = self.latencies(proxy.port)
        at_rate = (proxy.cpu_s() - before) / (RATE * self._seconds) * 1e6
        return {
            "cpu_us_per_request": self.cpu_per_request(proxy, CHATS),
            "cpu_us_per_request_relay": self.cpu_per_request(proxy, IDS),
            "cpu_us_per_event": self.cpu_per_event(proxy),
            "added_p50_ms": through[0] - plain[0],
            "added_p99_ms": through[1] - plain[1],
            "cpu_us_per_request_at_200": at_rate,
            "added_p50_ms_in_turn": self.in_turn(proxy.port) - self.in_turn(direct.port),
        }


def compare(peers: list[Peer], folder: Path, measure: Round, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, by peer."""
    seen: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in peers}
    with engine(folder) as behind, ExitStack() as stack:
        proxies = {}
        for peer in peers:
            assert peer.command is not None
            own_folder = folder / peer.name
            own_folder.mkdir()
            port = free_port()
            command = peer.command(port, behind.port, own_folder)
            proxies[peer.name] = stack.enter_context(running(command, port, own_folder / "log"))
        _wait_all(proxies)
        for number in range(rounds):
            names = [peer.name for peer in peers]
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seen[name].append(measure.of(proxies[name], behind))
                say(f"round {number + 1} of {rounds}: {name} " + _brief(seen[name][-1]))
    return {
        name: {key: round(median(row[key] for row in rows), 3) for key in rows[0]}
        for name, rows in seen.items()
    }


def _wait_all(proxies: dict[str, Child]) -> None:
    """Until each of them answers a request: some listen before they know their engine."""
    for name, proxy in proxies.items():
        _patiently(name, lambda port=proxy.port: run(closed_loop(port, islice(CHATS, 1), connections=1)))  # type: ignore[misc]


def _patiently(name: str, attempt: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            attempt()
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not answer: {error}") from error
            time.sleep(0.2)
        else:
            return


def _brief(row: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:.2f}" for key, value in row.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4000, help="a figure of CPU per request")
    parser.add_argument("--seconds", type=float, default=4.0, help="a figure of events or latency")
    parser.add_argument("--idle-streams", type=int, default=2000)
    parser.add_argument("--only", action="append", help="these peers; repeatable")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvctl-dataplane-") as name:
        folder = Path(name)
        tokenizer = write(folder / "tokenizer")
        found = [peer for peer in all_peers(tokenizer) if not options.only or peer.name in options.only]
        for peer in found:
            if peer.command is None:
                say(f"{peer.name} is left out: {peer.why_not}")
        peers = [peer for peer in found if peer.command is not None]
        measure = Round(options.requests, options.seconds)
        result = {
            "peers": compare(peers, folder, measure, options.rounds),
            "kvctl": own.figures(
                own.Rig(folder, tokenizer, say), options.rounds, options.seconds, options.idle_streams
            ),
        }
    if options.output == "json":
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        _table(result)


def _table(result: dict[str, Any]) -> None:
    rows = result["peers"]
    columns = list(next(iter(rows.values())))
    sys.stdout.write(f"{'':14}" + "".join(f"{column.removeprefix('cpu_'):>25}" for column in columns) + "\n")
    for name, row in rows.items():
        sys.stdout.write(f"{name:14}" + "".join(f"{row[column]:25.2f}" for column in columns) + "\n")
    for key, value in result["kvctl"].items():
        sys.stdout.write(f"{key:28} {value:.2f}\n")


if __name__ == "__main__":
    main()
