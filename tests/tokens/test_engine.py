"""Against a real HTTP server that answers as vLLM's /tokenize does, or fails to."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvctl.tokens.engine import EngineCounter
from kvctl.tokens.foreign import Interpreter, http_post
from kvctl.tokens.source import Uncountable, Why


def http_ask(session: aiohttp.ClientSession, url: str) -> Interpreter:
    return Interpreter(http_post(session, url.removesuffix("/tokenize")))


class Tokenize:
    """/tokenize that counts letters, keeps what it was asked, and can misbehave."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: tuple[int, str] | None = None
        self.gate: asyncio.Event | None = None
        self.most_at_once = self.now = 0

    async def post(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        if self.gate:
            await self.gate.wait()
        self.now -= 1
        if self.answer is not None:
            return web.Response(status=self.answer[0], text=self.answer[1])
        count = len(body["prompt"]) if "prompt" in body else len(json.dumps(body["messages"]))
        return web.json_response({"count": count, "max_model_len": 8192, "tokens": [], "token_strs": None})


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Tokenize, str]]:
    tokenize = Tokenize()
    app = web.Application()
    app.router.add_post("/tokenize", tokenize.post)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield tokenize, f"http://127.0.0.1:{port}/tokenize"
    if tokenize.gate:
        tokenize.gate.set()
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


Setup = tuple[Tokenize, str]


async def test_text_and_chat(engine: Setup, session: aiohttp.ClientSession) -> None:
    tokenize, url = engine
    counter = EngineCounter(http_ask(session, url))
    assert await counter.text("m", ["four", "three"], add_special_tokens=False) == (4, 5)
    assert {"model": "m", "prompt": "four", "add_special_tokens": False} in tokenize.asked
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": None,
        "temperature": 1,
        "documents": [{"text": "d"}],
        "reasoning_effort": "none",
        "chat_template_kwargs": {"x": 1},
        "max_tokens": 7,
    }
    assert await counter.chat("m", body, 100) > 0
    assert tokenize.asked[-1] == {
        "model": "m",
        "messages": body["messages"],
        "chat_template_kwargs": {
            "x": 1,
            "documents": [{"text": "d"}],
            "reasoning_effort": "none",
            "enable_thinking": False,
        },
    }


async def test_the_same_body_is_asked_once(engine: Setup, session: aiohttp.ClientSession) -> None:
    tokenize, url = engine
    counter = EngineCounter(http_ask(session, url))
    for _ in range(3):
        assert await counter.text("m", ["four"], add_special_tokens=True) == (4,)
    assert await counter.text("m", ["four"], add_special_tokens=False) == (4,)
    assert len(tokenize.asked) == 2


ODD_ANSWERS = [
    (400, "no"),
    (500, ""),
    (200, "not json"),
    (200, "[]"),
    (200, '{"tokens": []}'),
    (200, '{"count": -1}'),
    (200, '{"count": true}'),
    (200, '{"count": "7"}'),
]


@pytest.mark.parametrize("answer", ODD_ANSWERS)
async def test_odd_answers_are_no_count(
    engine: Setup, session: aiohttp.ClientSession, answer: tuple[int, str]
) -> None:
    tokenize, url = engine
    tokenize.answer = answer
    counter = EngineCounter(http_ask(session, url))
    with pytest.raises(Uncountable) as raised:
        await counter.text("m", ["four"], add_special_tokens=True)
    assert raised.value.why is Why.REFUSED


async def test_nobody_answers(session: aiohttp.ClientSession, unused_tcp_port: int) -> None:
    counter = EngineCounter(http_ask(session, f"http://127.0.0.1:{unused_tcp_port}/tokenize"))
    with pytest.raises(Uncountable) as raised:
        await counter.text("m", ["four"], add_special_tokens=True)
    assert raised.value.why is Why.UNREACHABLE


async def test_a_slow_engine_is_bounded_in_time_and_number(
    engine: Setup, session: aiohttp.ClientSession
) -> None:
    tokenize, url = engine
    tokenize.gate = asyncio.Event()
    counter = EngineCounter(http_ask(session, url), concurrency=2, most_waiting=5, timeout_s=0.5)
    jobs = [counter.text("m", [str(i)], add_special_tokens=True) for i in range(9)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    reasons = [result.why for result in results if isinstance(result, Uncountable)]
    assert sorted(reasons) == [Why.BUSY] * 4 + [Why.TIMEOUT] * 5
    assert tokenize.most_at_once <= 2
    assert counter.waiting == 0


async def test_what_is_too_large_is_not_asked(engine: Setup, session: aiohttp.ClientSession) -> None:
    tokenize, url = engine
    counter = EngineCounter(http_ask(session, url), max_bytes=1000)
    for prompts in (["x" * 1000], ["x"] * 65):
        with pytest.raises(Uncountable) as raised:
            await counter.text("m", prompts, add_special_tokens=True)
        assert raised.value.why is Why.TOO_LARGE
    with pytest.raises(Uncountable):
        await counter.chat("m", {"messages": []}, 1001)
    assert tokenize.asked == []


async def test_lone_surrogates_travel_escaped(engine: Setup, session: aiohttp.ClientSession) -> None:
    tokenize, url = engine
    counter = EngineCounter(http_ask(session, url))
    assert await counter.text("m", ["\ud800"], add_special_tokens=True) == (1,)
    assert tokenize.asked[0]["prompt"] == "\ud800"
