"""How much long prompts disturb streams: ``python -m tests.bench.counting [--tokenizer F] [--rounds N]``.

64 streams run through the real daemon all the time. In each round, in an order that rotates, they are watched

* ``alone``,
* ``past``: beside 5 prompts a second of 100,000 tokens that go past the daemon, straight to the engine, which
  shows what callers and engine cost alone,
* ``through``: beside as many that the daemon counts and forwards.

A round's figures are of one moment of the machine: what counts is the median of their differences. Told are
the p99.9 of the gaps between events of a stream, and of how late the daemon's loop wakes. Engine and watcher
are scheduled first where that is allowed: they would have machines of their own.
"""

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import cast

import uvloop

from tests.bench import given
from tests.bench.dataplane.client import request
from tests.bench.dataplane.engine import MODEL
from tests.bench.dataplane.peers import kvctl
from tests.bench.dataplane.running import engine, free_port, running
from tests.bench.longprompts import Sender, elsewhere, sender
from tests.tokens.tiny import write

STREAMS, GAP_MS = 64, 20
ALONE, PAST, THROUGH = KINDS = ("alone", "past", "through")
ISOLATIONS = ("thread", "process")
SETTLE_S = 0.5


class Watched(asyncio.Protocol):
    """One stream: the gaps between its pieces, while they are noted."""

    def __init__(self, ask: bytes) -> None:
        self._ask = ask
        self._before = 0.0
        self.gaps: list[float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._ask)

    def data_received(self, data: bytes) -> None:
        del data
        now = time.perf_counter()
        if self.gaps is not None:
            self.gaps.append(now - self._before)
        self._before = now

    def close(self) -> None:
        self._transport.abort()


@dataclass(frozen=True, slots=True)
class Seen:
    """One watch: p99.9 of gaps and of delays of the daemon's loop, ms; seconds of each long prompt."""

    gap_ms: float
    delay_ms: float
    prompts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """A daemon with a probe on its loop, that writes to ``delays``, and the engine behind it."""

    port: int
    engine_port: int
    delays: Path
    rounds: int
    seconds: float

    def stream_request(self) -> bytes:
        """A stream that lasts longer than all rounds."""
        events = int(self.rounds * len(KINDS) * (self.seconds + SETTLE_S + 5) * 1000 / GAP_MS)
        messages = [{"role": "user", "content": f"gap={GAP_MS}"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": events, "stream": True}
        return request("/v1/chat/completions", json.dumps(body).encode())

    async def run(self) -> list[dict[str, Seen]]:
        """What was seen in each round."""
        gc.disable()
        loop = asyncio.get_running_loop()
        ask = self.stream_request()
        streams = [Watched(ask) for _ in range(STREAMS)]
        async with sender() as sending:
            for stream in streams:
                await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", self.port)  # type: ignore[misc]
            await sending.send(self.port, 2.0)  # warm
            rounds = [await self._round(number, streams, sending) for number in range(self.rounds)]
        for stream in streams:
            stream.close()
        return rounds

    async def _round(self, number: int, streams: list[Watched], sending: Sender) -> dict[str, Seen]:
        turn = number % len(KINDS)
        seen = {}
        for kind in (*KINDS[turn:], *KINDS[:turn]):
            await asyncio.sleep(SETTLE_S)
            seen[kind] = await self._watch(kind, streams, sending)
        sys.stderr.write(
            f"counting: round {number + 1} of {self.rounds}: p99.9 of gaps, of delays, ms: "
            + ", ".join(f"{kind} {seen[kind].gap_ms:.2f} {seen[kind].delay_ms:.2f}" for kind in KINDS)
            + "\n"
        )
        return seen

    async def _watch(self, kind: str, streams: list[Watched], sending: Sender) -> Seen:
        for stream in streams:
            stream.gaps = []
        mark = self.delays.stat().st_size
        ports = {PAST: self.engine_port, THROUGH: self.port}
        if kind in ports:
            prompts = await sending.send(ports[kind], self.seconds)
        else:
            prompts = []
            await asyncio.sleep(self.seconds)
        gaps = [gap for stream in streams for gap in stream.gaps or ()]
        for stream in streams:
            stream.gaps = None
        await asyncio.sleep(SETTLE_S)  # what the probe still holds
        return Seen(_p999_ms(gaps), _p999_ms(_delays(self.delays, mark)), tuple(prompts))


def _delays(file: Path, since: int) -> list[float]:
    with file.open("rb") as lines:
        lines.seek(since)
        return [float(line) for line in lines.read().split()]


def _p999_ms(seconds: list[float]) -> float:
    return quantiles(seconds, n=1000)[-1] * 1000


def _one(folder: Path, tokenizer: Path, isolation: str, rounds: int, seconds: float) -> list[dict[str, Seen]]:
    command = kvctl(tokenizer).command
    assert command is not None
    with tempfile.TemporaryDirectory(dir=folder) as made, ExitStack() as stack:
        behind = stack.enter_context(engine(folder, "--prefix-caching"))
        port, own = free_port(), Path(made)
        words = command(port, behind.port, own)
        words.insert(1, f"KVCTL_TOKENIZE_ISOLATION={isolation}")
        probe = [*words[:-2], sys.executable, "-m", "tests.bench.dataplane.probed", str(own / "delays")]
        stack.enter_context(running(probe, port, own / "log"))
        for pid in behind.pids():
            elsewhere(pid)
        if not elsewhere():
            sys.stderr.write("counting: engine and watcher may not go first here: they add noise\n")
        time.sleep(1.0)
        stage = Stage(port, behind.port, own / "delays", rounds, seconds)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(stage.run())


def _rises(rounds: list[dict[str, Seen]], figure: str, over: str) -> dict[str, float]:
    """Median and quartiles of what is more in ``through`` than in ``over``."""
    more = [getattr(seen[THROUGH], figure) - getattr(seen[over], figure) for seen in rounds]
    low, middle, high = quantiles(more, n=4) if len(more) > 1 else more * 3
    return {"median": round(middle, 2), "low": round(low, 2), "high": round(high, 2)}


def _summary(rounds: list[dict[str, Seen]]) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for figure in ("gap_ms", "delay_ms"):
        found[figure] = {
            kind: round(median(getattr(seen[kind], figure) for seen in rounds), 2) for kind in KINDS
        }
        for over in (ALONE, PAST):
            found[f"{figure}_over_{over}"] = _rises(rounds, figure, over)
    prompts = [taken for seen in rounds for taken in seen[THROUGH].prompts]
    return found | {"long_prompt_s": round(median(prompts), 3)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.bench.counting")
    parser.add_argument("--tokenizer", type=given.tokenizer, help="a model's folder; default: a tiny one")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each watch")
    parser.add_argument("--isolation", choices=ISOLATIONS, action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tokenizer = options.tokenizer or write(folder / "tiny")
        results = {}
        for isolation in options.isolation or ISOLATIONS:
            rounds = _one(folder, tokenizer, isolation, options.rounds, options.seconds)
            results[isolation] = _summary(rounds)
            sys.stderr.write(f"counting: {isolation}: {results[isolation]}\n")
        sys.stdout.write(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
