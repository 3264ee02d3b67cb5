"""Asking who answers, over real sockets: adopted, told once, and asked again when in doubt."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from kvctl.control.poll import Poller
from kvctl.control.probe import AGAIN_S, SOON_S, Detector, probe
from kvctl.engines.detect import AutoEngine
from tests.conformance.case import page

Answers = dict[str, tuple[int, str]]


class Place:
    """A server whose answers a test changes, and a clock."""

    def __init__(self) -> None:
        self.answers: Answers = {}
        self.asked: list[str] = []
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        status, text = self.answers.get(request.path, (404, "nothing here"))
        return web.Response(status=status, text=text)


@contextlib.asynccontextmanager
async def place() -> AsyncIterator[tuple[Place, Poller]]:
    it, app = Place(), web.Application()
    app.router.add_get("/{rest:.*}", it.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    poller = Poller(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=60)
    try:
        yield it, poller
    finally:
        await poller.close()
        await runner.cleanup()


async def test_a_page_with_series_needs_no_more_questions() -> None:
    async with place() as (it, poller):
        it.answers = {"/metrics": (200, page("llamacpp-2026-idle.prom"))}
        assert (await probe(poller)).engine == "llamacpp"
        assert it.asked == ["/metrics"]


async def test_without_metrics_it_is_asked_for_its_own_pages() -> None:
    async with place() as (it, poller):
        it.answers = {"/get_server_info": (200, page("sglang-0.5-server-info.json"))}
        assert (await probe(poller)).engine == "sglang"


async def test_nobody_is_asked_once() -> None:
    poller = Poller("http://127.0.0.1:1", timeout_s=10)
    try:
        finding = await probe(poller)
    finally:
        await poller.close()
    assert (finding.engine, finding.answered) == (None, False)


async def test_found_adopted_told_once_and_asked_again_only_in_doubt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with place() as (it, poller):
        engine = AutoEngine()
        detector = Detector(engine, poller, it.clock)
        it.answers = {"/metrics": (200, page("tgi-3.3-busy.prom"))}
        assert await detector.settle()
        assert engine.name == "tgi"
        it.asked.clear()
        it.now += 1000
        assert not await detector.settle()
        assert it.asked == []
        it.answers = {"/metrics": (200, page("sglang-0.5.prom"))}
        detector.doubt()
        assert await detector.settle()
        assert engine.name == "sglang"
        detector.doubt()
        assert not await detector.settle()  # asked a moment ago
        it.now += SOON_S
        assert not await detector.settle()  # and still the same
    told = [record.getMessage() for record in caplog.records if "the engine is" in record.getMessage()]
    assert len(told) == 2


async def test_a_stranger_is_named_once_and_asked_again_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with place() as (it, poller):
        engine = AutoEngine()
        detector = Detector(engine, poller, it.clock)
        it.answers = {"/metrics": (200, "nv_inference_count 1\n")}
        assert not await detector.settle()
        assert (await probe(poller)).engine == "triton"
        assert engine.name == "vllm"
        it.asked.clear()
        assert not await detector.settle()
        assert it.asked == []
        it.now += AGAIN_S
        await detector.settle()
        assert it.asked
    warned = [record for record in caplog.records if "Triton" in record.getMessage()]
    assert [record.levelno for record in warned] == [logging.WARNING]


async def test_who_still_loads_keeps_the_adapter_that_is_there() -> None:
    async with place() as (it, poller):
        engine = AutoEngine()
        engine.adopt("llamacpp")
        detector = Detector(engine, poller, it.clock)
        it.answers = dict.fromkeys(("/metrics", "/props", "/v1/models"), (503, "Loading model"))
        assert not await detector.settle()
        assert engine.name == "llamacpp"
        it.answers = {"/props": (200, page("llamacpp-2026-props.json"))}
        it.now += SOON_S
        await asyncio.gather(detector.settle())
        assert engine.name == "llamacpp"
        assert (await probe(poller)).engine == "llamacpp"
