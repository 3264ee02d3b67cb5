"""Two real engines behind one kvctl: load by headroom, one drained, prefixes drawn together, one killed.

The sessions are the first 80 requests of a trace of coding agents (callanjfox/kv-cache-tester at 94f6046d,
Apache-2.0; columns left out), their lengths scaled down to what a CPU can prefill.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from kvctl.sim.trace import Row, read_trace
from tests.live.conftest import StartDaemon
from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine, forced_length
from tests.live.model import NAME
from tests.live.venv import say

TRACE = Path(__file__).parent / "traces" / "weka_claudecode_first80.csv"
SCALE = 20
CHARS_PER_TOKEN = 4
AT_ONCE = 4
NEEDED_GIB = 10
LARGE, SMALL = 1500, 500  # blocks


@dataclass(frozen=True, slots=True)
class Pair:
    large: Engine
    small: Engine
    daemon: Daemon

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.large, self.small


def available_gib() -> float:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, start_daemon: StartDaemon) -> Iterator[Pair]:
    if available_gib() < NEEDED_GIB:
        pytest.skip(f"two engines need {NEEDED_GIB} GiB, {available_gib():.0f} are free")
    folder = tmp_path_factory.mktemp("engines")
    with (
        Engine(num_gpu_blocks=LARGE, log=folder / "large") as large,
        Engine(num_gpu_blocks=SMALL, log=folder / "small") as small,
    ):
        tables = [{"name": "large", "url": large.base_url}, {"name": "small", "url": small.base_url}]
        daemon = start_daemon(large, ENGINES=json.dumps(tables), ITL_TARGET="none", TTFT_TARGET="none")
        eventually(lambda: daemon.get("/readyz")[1].count("engine up") == 2, 60, "both engines serve")
        yield Pair(large, small, daemon)


async def complete(session: aiohttp.ClientSession, url: str, prompt: str, tokens: int) -> tuple[str, bool]:
    """Which engine answered, and whether its stream was whole."""
    body = {"model": NAME, "prompt": prompt, "stream": True, "max_tokens": tokens, **forced_length(tokens)}
    seen = b""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        engine = response.headers.get("x-kvctl-engine", str(response.status))
        with contextlib.suppress(aiohttp.ClientError):
            async for data in response.content.iter_any():
                seen = (seen + data)[-100:]
    return engine, b"[DONE]" in seen


async def at_once(pair: Pair, count: int, tokens: int, salt: str) -> list[tuple[str, bool]]:
    async with aiohttp.ClientSession() as session:
        made = [
            complete(session, pair.daemon.base_url, f"{salt} {n} " + "word " * 100, tokens)
            for n in range(count)
        ]
        return await asyncio.gather(*made)


async def test_load_follows_headroom(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    answers = await at_once(pair, 40, 200, "load")
    got = Counter(engine for engine, _ in answers)
    with capsys.disabled():
        say(f"pools {LARGE} and {SMALL} blocks: {dict(got)} of 40 streams")
    assert all(whole for _, whole in answers)
    assert got["large"] > 1.5 * got["small"] > 0
    eventually(lambda: pair.daemon.metric("leases", engine="large") == 0, 20, "all leases ended")


async def test_a_drained_engine_empties(pair: Pair) -> None:
    pair.daemon.command("drain", "--engine", "large", "--yes")
    answers = await at_once(pair, 4, 20, "drained")
    assert {engine for engine, _ in answers} == {"small"}
    eventually(lambda: pair.daemon.metric("leases", engine="large") == 0, 20, "the drained engine is empty")
    assert pair.daemon.get("/readyz")[0] == 200
    pair.daemon.command("undrain", "--engine", "large")


def texts(rows: list[Row], salt: str) -> dict[int, str]:
    """A prompt for each row that begins as its parent's does."""
    made: dict[int, str] = {}
    for row in rows:
        source = random.Random(f"{salt}-{row.number}")
        shared = (
            made[row.parent][: row.shared_tokens // SCALE * CHARS_PER_TOKEN] if row.parent is not None else ""
        )
        size = row.prompt_tokens // SCALE * CHARS_PER_TOKEN - len(shared)
        fresh = f"{salt} {source.getrandbits(64):x} " + " ".join(
            f"{source.getrandbits(20):x}" for _ in range(size // 6)
        )
        made[row.number] = shared + fresh[: max(size, 1)]
    return made


async def play(rows: list[Row], salt: str, url_of: Callable[[Row], str]) -> None:
    """Each request after the one that it goes on from, ``AT_ONCE`` at once."""
    prompts, slots = texts(rows, salt), asyncio.Semaphore(AT_ONCE)
    done = {row.number: asyncio.Event() for row in rows}

    async def one(row: Row) -> None:
        if row.parent is not None:
            await done[row.parent].wait()
        async with slots:
            assert (await complete(session, url_of(row), prompts[row.number], 4))[1]
        done[row.number].set()

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*map(one, rows))


def cache(pair: Pair) -> tuple[float, float]:
    pages = [engine.metrics() for engine in pair.engines]
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    hits, queries = (sum(page[name] for page in pages) for name in names)
    return hits, queries


async def hit_rate(pair: Pair, rows: list[Row], salt: str, url_of: Callable[[Row], str]) -> float:
    before = cache(pair)
    await play(rows, salt, url_of)
    after = cache(pair)
    return (after[0] - before[0]) / (after[1] - before[1])


async def test_prefix_affinity_raises_the_hit_rate(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read_trace(TRACE)
    in_turn = await hit_rate(pair, rows, "turn", lambda row: pair.engines[row.number % 2].base_url)
    chosen = await hit_rate(pair, rows, "choice", lambda _: pair.daemon.base_url)
    with capsys.disabled():
        say(f"prefix cache hit rate: in turn {in_turn:.2f}, by kvctl's choice {chosen:.2f}")
    assert chosen > in_turn + 0.05


async def test_one_killed_costs_only_its_own_streams(pair: Pair) -> None:
    running = asyncio.create_task(at_once(pair, 12, 2000, "killed"))
    busy = pair.daemon

    def both_run() -> bool:
        return all(busy.metric("leases", engine=name) > 0 for name in ("large", "small"))

    await asyncio.to_thread(eventually, both_run, 20, "both engines have streams")
    pair.small.kill()
    answers = await running
    assert {engine for engine, _ in answers} == {"large", "small"}
    assert all(whole for engine, whole in answers if engine == "large")
    later = await at_once(pair, 6, 20, "later")
    assert later == [("large", True)] * 6
    assert pair.daemon.get("/readyz")[0] == 200
