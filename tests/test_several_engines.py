"""Simulated engines behind one real daemon: load by headroom, one killed, one drained, one model list."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.server import SimServer
from tests.proxy.harness import (
    CHAT_STREAM,
    LAST,
    STREAM_HEAD,
    FakeEngine,
    Wire,
    chunk,
    event,
    get,
    plain,
    post,
)
from tests.test_serve import MAIN, MODELS, PATIENCE_S, Kvctl, daemon


@dataclass
class Site:
    """The engines, the daemon before them, and a session to it."""

    engines: Mapping[str, SimServer]
    kvctl: Kvctl
    session: aiohttp.ClientSession
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.kvctl.port}"

    async def command(self, *arguments: str) -> str:
        env = os.environ | {"KVCTL_ADMIN_SOCKET": str(self.folder / "kvctl.sock"), "NO_COLOR": "1"}
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", MAIN, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def engines_now(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.command("status", "-o", "json"))["engines"]
        return found

    async def until_ready(self, engines: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = await self.kvctl.ask(get("/readyz"))
                if answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"engine up") == engines:
                    return
                await asyncio.sleep(0.05)

    async def until_empty(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if not any(engine["leases"] for engine in (await self.engines_now()).values()):
                    return
                await asyncio.sleep(0.05)


@dataclass
class Answer:
    engine: str | None
    status: int
    whole: bool


async def stream(
    site: Site, text: str, *, tokens: int, model: str = "sim", begun: asyncio.Event | None = None
) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "sim_output_tokens": tokens,
        "stream": True,
    }
    seen = b""
    async with site.session.post(f"{site.url}/v1/chat/completions", json=body) as response:
        engine = response.headers.get("x-kvctl-engine")
        if begun is not None:
            begun.set()
        with contextlib.suppress(aiohttp.ClientError):
            async for data in response.content.iter_any():
                seen = (seen + data)[-200:]
        return Answer(engine, response.status, b"[DONE]" in seen)


@contextlib.asynccontextmanager
async def site(folder: Path, pools: Mapping[str, int], **entries: Any) -> AsyncIterator[Site]:
    """Engines by name with their blocks; ``entries`` are further keys of each engine's table."""
    engines = {
        name: SimServer(EngineConfig(profile=PROFILES["8b-24g"], blocks=blocks, prefix_caching=True))
        for name, blocks in pools.items()
    }
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines.values():
            await engine.start()
            stack.push_async_callback(engine.close)
        tables = [
            {"name": name, "url": engine.url} | entries.get(name, {}) for name, engine in engines.items()
        ]
        first = next(iter(engines.values())).url
        made_of = json.dumps(tables)
        kvctl = await stack.enter_async_context(
            daemon(
                folder, first, ENGINES=made_of, SCRAPE_INTERVAL="50ms", TTFT_TARGET="none", ITL_TARGET="none"
            )
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        made = Site(engines, kvctl, session, folder)
        await made.until_ready(len(engines))
        yield made


async def test_load_follows_headroom_over_three_engines(tmp_path: Path) -> None:
    async with site(tmp_path, {"large": 1600, "middle": 800, "small": 400}) as it:
        answers = await asyncio.gather(*(stream(it, f"t{n} " * 20, tokens=300) for n in range(28)))
        assert all(answer.whole for answer in answers), [each for each in answers if not each.whole]
        got = Counter(answer.engine for answer in answers)
        assert got["large"] > got["middle"] > got["small"] > 0, got
        page = await it.kvctl.metrics()
        assert 'kvctl_choices_total{engine="large",reason="headroom"}' in page
        await it.until_empty()


async def test_one_killed_in_mid_run_costs_only_its_own_streams(tmp_path: Path) -> None:
    async with site(tmp_path, {"a": 1000, "b": 1000}) as it:
        begun = [asyncio.Event() for _ in range(12)]
        tasks = [
            asyncio.create_task(stream(it, f"t{n} " * 50, tokens=300, begun=event))
            for n, event in enumerate(begun)
        ]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(event.wait() for event in begun))
        await it.engines["a"].die()
        later = await asyncio.gather(*(stream(it, f"later {n}", tokens=20) for n in range(6)))
        answers = await asyncio.gather(*tasks)
        assert {answer.engine for answer in answers} == {"a", "b"}
        assert all(answer.whole is (answer.engine == "b") for answer in answers), answers
        assert all(answer.status == 200 and answer.whole and answer.engine == "b" for answer in later), later
        ready = await it.kvctl.ask(get("/readyz"))
        assert ready.startswith(b"HTTP/1.1 200 ")
        await it.until_empty()


async def test_a_drained_one_empties_and_comes_back(tmp_path: Path) -> None:
    async with site(tmp_path, {"a": 1000, "b": 1000}) as it:
        running = [asyncio.create_task(stream(it, f"t{n} " * 50, tokens=200)) for n in range(8)]
        assert "engine a" in await it.command("drain", "--engine", "a", "--yes")
        during = await asyncio.gather(*(stream(it, f"later {n}", tokens=20) for n in range(6)))
        assert {answer.engine for answer in during} == {"b"}
        assert all(answer.whole for answer in await asyncio.gather(*running))
        engines = await it.engines_now()
        assert (engines["a"]["draining"], engines["a"]["leases"]) == (True, 0)
        assert not engines["b"]["draining"]
        ready = await it.kvctl.ask(get("/readyz"))
        assert ready.startswith(b"HTTP/1.1 200 ")
        assert b"a: draining" in ready
        await it.command("undrain", "--engine", "a")
        after = await asyncio.gather(*(stream(it, f"after {n} " * 50, tokens=100) for n in range(8)))
        assert {answer.engine for answer in after} == {"a", "b"}


async def test_names_aliases_and_one_list_of_models(tmp_path: Path) -> None:
    async with site(tmp_path, {"a": 600, "b": 600}, b={"aliases": {"gpt-4o": "sim"}}) as it:
        async with it.session.get(f"{it.url}/v1/models") as response:
            listed = [entry["id"] for entry in (await response.json())["data"]]
        assert listed == ["sim", "gpt-4o"]
        answers = [await stream(it, "hi", tokens=5, model="gpt-4o") for _ in range(3)]
        assert {(answer.engine, answer.whole) for answer in answers} == {("b", True)}


async def test_sessions_stay_where_their_prefix_is(tmp_path: Path) -> None:
    """Ten sessions in turn: the engines' own hit rate is what they would have with one engine."""
    async with site(tmp_path, {"a": 2000, "b": 2000}) as it:
        texts = [f"session {n} " + "word " * 400 for n in range(10)]
        for turn in range(4):
            for text in texts:
                assert (await stream(it, text + " more" * turn, tokens=4)).whole
        counters = [engine.engine.scheduler.counters for engine in it.engines.values()]
        rate = sum(c.prefix_hits for c in counters) / sum(c.prefix_queries for c in counters)
        assert rate > 0.6, rate


async def test_a_data_parallel_engine_is_gated_rank_by_rank(tmp_path: Path) -> None:
    """Its page has two ranks: each stream is pinned to one, and both get their share."""
    page = (Path(__file__).parent / "conformance" / "pages" / "vllm-0.32-dp2.prom").read_bytes()
    release, pins = asyncio.Event(), Counter[bytes]()

    async def script(wire: Wire) -> None:
        while True:
            request = await wire.request()
            if b"/metrics" in request.line:
                await wire.send(plain(page))
            elif b"/v1/models" in request.line:
                await wire.send(plain(MODELS))
            elif b"completions" in request.line:
                pins.update(request.values(b"x-data-parallel-rank"))
                await wire.send(STREAM_HEAD + chunk(event("a")))
                await release.wait()
                await wire.send(chunk(event("", "stop")) + LAST)
            else:
                await wire.send(plain(b"{}", "404 Not Found"))

    fake = FakeEngine(script)
    await fake.start()
    try:
        async with daemon(tmp_path, f"http://127.0.0.1:{fake.port}", ENGINE="vllm") as kvctl:
            async with asyncio.timeout(PATIENCE_S):
                while not (await kvctl.ask(get("/readyz"))).startswith(b"HTTP/1.1 200 "):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            streams = [await kvctl.client() for _ in range(8)]
            for wire in streams:
                await wire.send(post(CHAT_STREAM))
                await wire.reader.readuntil(event("a"))
            assert pins == {b"0": 4, b"1": 4}
            shown = await kvctl.metrics()
            assert 'kvctl_choices_total{engine="http://127.0.0.1' in shown
            release.set()
            for wire in streams:
                await wire.reader.readuntil(LAST)
                wire.close()
    finally:
        release.set()
        await fake.stop()


async def test_who_waits_for_a_rank_that_goes_hears_so_at_once(tmp_path: Path) -> None:
    """It was told that the server is being drained, while the other ranks served."""
    both = (Path(__file__).parent / "conformance" / "pages" / "vllm-0.32-dp2.prom").read_bytes()
    pages = [b"\n".join(line for line in both.split(b"\n") if b'engine="1"' not in line), both]
    release = asyncio.Event()

    async def script(wire: Wire) -> None:
        while True:
            request = await wire.request()
            if b"/metrics" in request.line:
                await wire.send(plain(pages[-1]))
            elif b"/v1/models" in request.line:
                await wire.send(plain(MODELS))
            elif b"completions" in request.line:
                await wire.send(STREAM_HEAD + chunk(event("a")))
                await release.wait()
                await wire.send(chunk(event("", "stop")) + LAST)
            else:
                await wire.send(plain(b"{}", "404 Not Found"))

    fake = FakeEngine(script)
    await fake.start()
    small = {"CAPACITY_TOKENS": "2000", "CAPACITY_FORCE": "true", "QUEUE_MAX_WAIT": "1h", "ENGINE": "vllm"}
    try:
        async with daemon(tmp_path, f"http://127.0.0.1:{fake.port}", descriptors=None, **small) as kvctl:
            async with asyncio.timeout(PATIENCE_S):
                while not (await kvctl.ask(get("/readyz"))).startswith(b"HTTP/1.1 200 "):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            pinned = post(CHAT_STREAM, "/v1/chat/completions", b"X-data-parallel-rank: 1")
            running, waiting, later = [await kvctl.client() for _ in range(3)]
            await running.send(pinned)
            await running.reader.readuntil(event("a"))
            await waiting.send(pinned)
            async with asyncio.timeout(PATIENCE_S):
                while 'priority="normal"} 1.0' not in await kvctl.metrics():  # noqa: ASYNC110 - it waits
                    await asyncio.sleep(0.05)
                pages.pop()
                answer = await waiting.reader.readuntil(b"}}")
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"x-kvctl-reason: rank_gone" in answer
            release.set()
            await running.reader.readuntil(LAST)
            await later.send(post(CHAT_STREAM))
            await later.reader.readuntil(LAST)
            for wire in (running, waiting, later):
                wire.close()
    finally:
        release.set()
        await fake.stop()
