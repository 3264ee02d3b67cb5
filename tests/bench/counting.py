"""How much long prompts disturb streams: ``python -m tests.bench.counting [--tokenizer F] [--rounds N]``.

64 streams run through the real daemon, first alone, then beside 5 prompts a second of 100,000 tokens, then
alone again: one run of the daemon, so that both figures are of the same moment of the machine. Told is the
p99.9 of the gaps between events of a stream, for ``tokenize_isolation`` thread and process, and for
``direct``: the prompts go past the daemon to the engine, which shows what callers and engine cost alone.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import cast

import uvloop

from tests.bench.dataplane.client import connect, request
from tests.bench.dataplane.engine import MODEL
from tests.bench.dataplane.peers import kvctl
from tests.bench.dataplane.running import engine, free_port, running
from tests.tokens.tiny import write

STREAMS, GAP_MS = 64, 20
RATE, TOKENS = 5.0, 100_000
SECONDS = 6.0
DIRECT = "direct"
WAYS = ("thread", "process", DIRECT)
WORDS = "the quick brown fox jumps over the lazy dog "


class Watched(asyncio.Protocol):
    """One stream: when its bytes came."""

    def __init__(self, ask: bytes) -> None:
        self._ask = ask
        self.came: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._ask)

    def data_received(self, data: bytes) -> None:
        del data
        self.came.append(time.perf_counter())

    def close(self) -> None:
        self._transport.abort()


def _gaps(streams: list[Watched], since: float, until: float) -> float:
    """p99.9 of the gaps between events that came in that time, ms."""
    gaps = []
    for stream in streams:
        came = [at for at in stream.came if since <= at < until]
        gaps += [after - before for before, after in pairwise(came)]
    return quantiles(gaps, n=1000)[-1] * 1000


def _stream_body(events: int) -> bytes:
    messages = [{"role": "user", "content": f"gap={GAP_MS}"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": events, "stream": True}
    return request("/v1/chat/completions", json.dumps(body).encode())


def _long_prompt(number: int) -> bytes:
    """No two alike: nothing of it is known when it comes."""
    messages = [{"role": "user", "content": f"{number} " + WORDS * (TOKENS // 10)}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8}
    return request("/v1/chat/completions", json.dumps(body).encode())


async def _measure(port: int, prompts_port: int) -> tuple[float, float, float]:
    """p99.9 alone and beside long prompts, ms; median seconds of a long prompt."""
    loop, ask = asyncio.get_running_loop(), _stream_body(int(SECONDS * 5 * 1000 / GAP_MS))
    streams = [Watched(ask) for _ in range(STREAMS)]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.sleep(1.0)
    marks = [time.perf_counter()]
    await asyncio.sleep(SECONDS)
    marks.append(time.perf_counter())
    taken: list[float] = []
    prompts = [_long_prompt(number) for number in range(int(RATE * SECONDS))]
    calls = [await connect(prompts_port) for _ in prompts]
    started = time.perf_counter()
    tasks = []
    for number, (call, prompt) in enumerate(zip(calls, prompts, strict=True)):
        await asyncio.sleep(max(started + number / RATE - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(call.ask(prompt)))
    taken += await asyncio.gather(*tasks)
    marks.append(time.perf_counter())
    await asyncio.sleep(SECONDS)
    marks.append(time.perf_counter())
    for stream in streams:
        stream.close()
    for call in calls:
        call.close()
    first, busy, last = (_gaps(streams, *span) for span in pairwise(marks))
    return median((first, last)), busy, median(taken)


def _one(folder: Path, tokenizer: Path, isolation: str) -> tuple[float, float, float]:
    command = kvctl(tokenizer).command
    assert command is not None
    with tempfile.TemporaryDirectory(dir=folder) as made, engine(folder) as behind:
        port, own = free_port(), Path(made)
        words = command(port, behind.port, own)
        direct = isolation == DIRECT
        words.insert(1, f"KVCTL_TOKENIZE_ISOLATION={'thread' if direct else isolation}")
        with running(words, port, own / "log"), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            time.sleep(1.0)
            return runner.run(_measure(port, behind.port if direct else port))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.bench.counting")
    parser.add_argument("--tokenizer", type=Path, help="a model's folder; default: a tiny one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--isolation", choices=WAYS, action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tokenizer = options.tokenizer or write(folder / "tiny")
        results: dict[str, dict[str, float]] = {}
        for isolation in options.isolation or WAYS:
            runs = [_one(folder, tokenizer, isolation) for _ in range(options.rounds)]
            alone, busy, taken = (median(run[place] for run in runs) for place in range(3))
            rise = median(busy - alone for alone, busy, _ in runs)
            results[isolation] = {
                "gap_p999_alone_ms": round(alone, 2),
                "gap_p999_beside_ms": round(busy, 2),
                "rise_ms": round(rise, 2),
                "long_prompt_s": round(taken, 3),
            }
            sys.stderr.write(f"counting: {isolation}: {results[isolation]}\n")
        sys.stdout.write(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
