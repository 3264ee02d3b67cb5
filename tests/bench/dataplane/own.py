"""What only kvctl is asked: its loop under long prompts, memory per idle stream, decision and tick."""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from tests.bench.core import measured
from tests.bench.dataplane.client import connect, request
from tests.bench.dataplane.engine import MODEL
from tests.bench.dataplane.peers import kvctl
from tests.bench.dataplane.running import Child, engine, free_port, running
from tests.bench.longprompts import elsewhere, sender

FLUSH_S = 0.4  # after which the probe has written what it saw


@dataclass(frozen=True, slots=True)
class Rig:
    """Where files go, whose tokenizer counts, and who is told of progress."""

    folder: Path
    tokenizer: Path
    say: Callable[[str], None]


def figures(rig: Rig, rounds: int, seconds: float, idle_streams: int) -> dict[str, float]:
    """Medians over the rounds."""
    made: dict[str, float] = {}
    delays = _loop_delays(rig, seconds, max(rounds, 5))
    made["loop_delay_p999_ms"] = round(median(busy for _, busy in delays), 3)
    made["loop_delay_idle_p999_ms"] = round(median(idle for idle, _ in delays), 3)
    made["bytes_per_idle_stream"] = round(_bytes_per_stream(rig, idle_streams))
    rig.say(f"{idle_streams} idle streams: {made['bytes_per_idle_stream']} bytes each")
    core = measured(max(rounds, 5))
    made["decision_us"], made["tick_ms"] = core["decision_us"], core["tick_mixed_ms"]
    return made


# --- the loop -----------------------------------------------------------------------------------------


def _loop_delays(rig: Rig, seconds: float, pairs: int) -> list[tuple[float, float]]:
    """p99.9 of how late the daemon's own loop wakes, ms: idle, and with long prompts arriving.

    The two of a pair follow each other in one daemon, so that the machine's own noise is in both.
    """
    own = rig.folder / "probed"
    own.mkdir()
    command = kvctl(rig.tokenizer).command
    assert command is not None
    with engine(rig.folder, "--prefix-caching") as behind:
        port = free_port()
        words = command(port, behind.port, own)
        probe = [*words[:-2], sys.executable, "-m", "tests.bench.dataplane.probed", str(own / "delays")]
        with running(probe, port, own / "log"):
            for pid in behind.pids():
                elsewhere(pid)
            time.sleep(1.0)
            return asyncio.run(_pairs(rig, port, own, seconds, pairs))


async def _pairs(rig: Rig, port: int, own: Path, seconds: float, pairs: int) -> list[tuple[float, float]]:
    made = []
    async with sender() as sending:
        await sending.send(port, 1.0)
        for number in range(pairs):
            seen = {}
            for busy in (True, False) if number % 2 else (False, True):
                await asyncio.sleep(FLUSH_S)
                mark = (own / "delays").stat().st_size
                await (sending.send(port, seconds) if busy else asyncio.sleep(seconds))
                await asyncio.sleep(FLUSH_S)
                seen[busy] = _percentile(own, mark)
            made.append((seen[False], seen[True]))
            rig.say(f"loop delay p99.9: idle {seen[False]:.2f} ms, with long prompts {seen[True]:.2f} ms")
    return made


def _percentile(own: Path, since: int) -> float:
    with (own / "delays").open("rb") as lines:
        lines.seek(since)
        delays = [float(line) for line in lines.read().split()]
    return quantiles(delays, n=1000)[-1] * 1000


# --- memory -------------------------------------------------------------------------------------------


def _bytes_per_stream(rig: Rig, count: int) -> float:
    """Resident bytes that one idle stream adds."""
    own = rig.folder / "idle"
    own.mkdir()
    command = kvctl(rig.tokenizer).command
    assert command is not None
    with engine(rig.folder) as behind:
        port = free_port()
        with running(command(port, behind.port, own), port, own / "log") as daemon:
            return asyncio.run(_hold(daemon, count))


async def _hold(daemon: Child, count: int) -> float:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "gap=3600000"}],
        "max_tokens": 4,
        "stream": True,
    }
    ask = request("/v1/chat/completions", json.dumps(body).encode())
    await _streams(daemon, ask, 100)  # what is made once
    before = daemon.rss_bytes()
    calls = await _streams(daemon, ask, count)
    after = daemon.rss_bytes()
    assert len(calls) == count
    return (after - before) / count


async def _streams(daemon: Child, ask: bytes, count: int) -> list[object]:
    kept: list[object] = []
    for _ in range(count):
        call = await connect(daemon.port)
        kept.append((call, asyncio.ensure_future(call.ask(ask))))
        if len(kept) % 50 == 0:
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    return kept
