"""Each engine's stand-in behind the real daemon: every metered route, refusals on both sides, telemetry."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvctl.core.outcomes import EngineState
from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.server import SimServer
from tests.engines.house import Answered, house
from tests.engines.standins.core import Standin
from tests.engines.standins.llamacpp import LlamaCppStandin
from tests.engines.standins.sglang import SglangStandin
from tests.engines.standins.tgi import TgiStandin
from tests.ports import free_port

Body = dict[str, Any]


def chat(words: int, tokens: int) -> Body:
    return {"model": "m", "messages": [{"role": "user", "content": "w " * words}], "max_tokens": tokens}


def completion(words: int, tokens: int) -> Body:
    return {"model": "m", "prompt": "w " * words, "max_tokens": tokens}


def tgi(words: int, tokens: int) -> Body:
    return {"inputs": "w " * words, "parameters": {"max_new_tokens": tokens, "details": True}}


def sglang(words: int, tokens: int) -> Body:
    return {"text": "w " * words, "sampling_params": {"max_new_tokens": tokens}}


def llamacpp(words: int, tokens: int) -> Body:
    return {"prompt": "w " * words, "n_predict": tokens}


@dataclass(frozen=True)
class Kind:
    """An engine and how to speak to it. ``routes``: path, its body, whether ``stream`` is a field of it."""

    make: Callable[..., Standin]
    routes: tuple[tuple[str, Callable[[int, int], Body], bool], ...]
    never: int  # status of what can never fit
    message: Callable[[Any], str]  # where an error of its own shape has its text
    capacity: int = 16_000
    telling: dict[str, Any] = field(default_factory=dict)


OPENAI = (("/v1/chat/completions", chat, True), ("/v1/completions", completion, True))
KINDS = {
    "tgi": Kind(
        make=TgiStandin,
        routes=(
            ("/generate", tgi, False),
            ("/generate_stream", tgi, False),
            ("/", tgi, True),
            *OPENAI,
        ),
        never=422,
        message=lambda body: str(body["error"]),
        telling={"error_type": "overloaded"},
    ),
    "sglang": Kind(
        make=SglangStandin,
        routes=(("/generate", sglang, True), *OPENAI),
        never=400,
        message=lambda body: str(body["error"]["message"]),
    ),
    "llamacpp": Kind(
        make=lambda **limits: LlamaCppStandin(**{"slots": 8, "context": 2000, **limits}),
        routes=(
            ("/completion", llamacpp, True),
            ("/completions", llamacpp, True),
            *OPENAI,
            ("/chat/completions", chat, True),
        ),
        never=400,
        message=lambda body: str(body["error"]["message"]),
    ),
}


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_every_metered_route_answers_whole_and_streamed(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    async with kind.make().serving() as url, house(tmp_path, url, ENGINE=name) as it:
        status = await it.settled()
        assert status.capacity_tokens == kind.capacity
        for path, body, streams in kind.routes:
            whole = await it.post(path, body(5, 7))
            assert whole.status == 200, (path, whole.body)
            if streams:
                streamed = await it.post(path, {**body(5, 7), "stream": True})
                assert streamed.status == 200
                assert streamed.body.count(b"data:") >= 7
        await it.empty()
        done = await it.until(lambda status: status.ranks[0].running is not None)
        assert done.state is EngineState.UP


async def test_a_full_pool_is_429_in_the_engines_own_shape(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    engine = kind.make()
    async with engine.serving() as url, house(tmp_path, url, ENGINE=name, POLICY="static") as it:
        status = await it.settled()
        path, body, _ = kind.routes[0]
        engine.hold()
        each = status.budget_tokens // 10 - 600
        running = [asyncio.create_task(it.post(path, body(each, 500))) for _ in range(20)]
        async with asyncio.timeout(120):
            while sum(task.done() for task in running) < 8:  # noqa: ASYNC110 - refusals of many requests
                await asyncio.sleep(0.01)
        engine.go()
        answers: list[Answered] = await asyncio.gather(*running)
        refused = [answer for answer in answers if answer.status == 429]
        assert refused
        assert {answer.status for answer in answers} == {200, 429}
        for answer in refused:
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.headers["x-kvctl-reason"]
            assert kind.message(answer.json)
            assert {key: answer.json[key] for key in kind.telling} == kind.telling
        await it.empty()


async def test_what_can_never_fit_is_refused_with_the_limit_and_not_forwarded(
    name: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    engine = kind.make()
    async with engine.serving() as url, house(tmp_path, url, ENGINE=name) as it:
        await it.settled()
        for path, body, _ in kind.routes:
            answer = await it.post(path, body(engine.context + 1, 4))
            assert answer.status == kind.never, (path, answer.body)
            assert str(engine.context) in kind.message(answer.json)
            assert answer.headers["x-should-retry"] == "false"
        assert engine.bodies == []
        await it.empty()


async def test_it_is_found_out_and_its_pages_and_routes_are_its_own(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    async with kind.make().serving() as url, house(tmp_path, url) as it:
        status = await it.settled()
        assert it.unit.engine.name == name
        assert status.capacity_tokens == kind.capacity
        path, body, _ = kind.routes[0]
        assert (await it.post(path, body(5, 3))).status == 200
        assert (await it.get("/health")).status == 200
        assert (await it.post("/made/up", {})).status == 404
        await it.empty()


async def test_a_client_that_leaves_frees_engine_and_ledger(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    engine = kind.make()
    async with engine.serving() as url, house(tmp_path, url, ENGINE=name) as it:
        await it.settled()
        path, body, _ = kind.routes[0]
        engine.hold()
        asking = asyncio.create_task(it.post(path, body(5, 1000)))
        await it.until(lambda status: status.leases == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await it.empty()
        async with asyncio.timeout(120):
            while engine.waiting or engine.running:  # noqa: ASYNC110 - a list has no event
                await asyncio.sleep(0.01)


async def test_tgis_own_overload_and_validation_reach_the_caller_as_sent(tmp_path: Path) -> None:
    engine = TgiStandin()
    async with engine.serving() as url, house(tmp_path, url, ENGINE="tgi", TOKENIZER="bound") as it:
        await it.settled()
        engine.most_requests = 0
        answer = await it.post("/generate", tgi(5, 5))
        assert (answer.status, answer.json) == (
            429,
            {"error": "Model is overloaded", "error_type": "overloaded"},
        )
        assert "x-kvctl-reason" not in answer.headers
        engine.most_requests = 128
        answer = await it.post("/generate", tgi(5, 5000))  # not counted exactly: no proof, TGI decides
        assert answer.status == 422
        assert answer.json["error"].startswith("Input validation error")
        await it.empty()


async def test_sglangs_refusal_inside_a_stream_reaches_the_caller_as_sent(tmp_path: Path) -> None:
    engine = SglangStandin(most_queued=0)
    async with engine.serving() as url, house(tmp_path, url, ENGINE="sglang") as it:
        await it.settled()
        streamed = await it.post("/generate", {**sglang(5, 5), "stream": True})
        assert streamed.status == 200
        assert b'"code": 503' in streamed.body
        assert (await it.post("/generate", sglang(5, 5))).status == 503
        await it.empty()


async def test_sglang_without_metrics_has_its_pool_from_its_description(tmp_path: Path) -> None:
    async with (
        SglangStandin(metrics=False).serving() as url,
        house(tmp_path, url, FALLBACK_BUDGET_TOKENS="1000") as it,
    ):
        status = await it.until(lambda s: s.state is EngineState.NO_TELEMETRY and s.capacity_known)
        assert it.unit.engine.name == "sglang"
        assert (status.capacity_tokens, status.context_tokens) == (16_000, 4096)
        await asyncio.sleep(0.5)  # many polls without a page: no reason to fall back
        assert it.gate.budget_tokens == status.budget_tokens
        assert (await it.post("/generate", sglang(2000, 200))).status == 200
        await it.empty()


async def test_llamacpp_that_loads_is_unavailable_and_then_serves(tmp_path: Path) -> None:
    engine = LlamaCppStandin(loading=True, slots=8, context=2000)
    async with engine.serving() as url, house(tmp_path, url) as it:
        answer = await it.post("/v1/completions", completion(5, 5))
        assert answer.status == 503
        engine.loading = False
        status = await it.settled()
        assert (it.unit.engine.name, status.capacity_tokens, status.guards.slots) == ("llamacpp", 16_000, 8)
        assert (await it.post("/completion", llamacpp(5, 5))).status == 200
        await it.empty()


async def test_llamacpp_gets_no_more_requests_than_it_has_slots(tmp_path: Path) -> None:
    engine = LlamaCppStandin(slots=3, context=2000)
    async with engine.serving() as url, house(tmp_path, url, ENGINE="llamacpp") as it:
        await it.settled()
        engine.hold()
        running = [asyncio.create_task(it.post("/completion", llamacpp(5, 5))) for _ in range(4)]
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        refused = done.pop().result()
        assert (refused.status, refused.headers["x-kvctl-reason"]) == (429, "sequence_slots")
        engine.go()
        assert sorted([answer.status for answer in await asyncio.gather(*running)]) == [200, 200, 200, 429]
        await it.empty()


async def test_another_kind_of_engine_after_a_restart_is_found_out(tmp_path: Path) -> None:
    """Its routes, its pool and its error shape follow; the old ones are gone."""
    port = free_port()
    async with house(tmp_path, f"http://127.0.0.1:{port}") as it:
        async with TgiStandin(capacity=9_000).serving(port):
            status = await it.settled()
            assert (it.unit.engine.name, status.capacity_tokens) == ("tgi", 9_000)
            assert (await it.post("/generate_stream", tgi(5, 3))).status == 200
        async with SglangStandin(capacity=20_000).serving(port):
            await it.until(lambda s: s.capacity_tokens == 20_000)
            assert it.unit.engine.name == "sglang"
            assert (await it.post("/generate", sglang(5, 3))).status == 200
            assert (await it.post("/generate_stream", tgi(5, 3))).status == 404
            await it.empty()


async def test_the_simulated_engine_speaks_lengths_alone(tmp_path: Path) -> None:
    server = SimServer(
        EngineConfig(profile=PROFILES["tiny-cpu"], blocks=500, block_size=16, max_model_len=4096)
    )
    await server.start()
    try:
        async with house(tmp_path, server.url, TOKENIZER="bound") as it:
            status = await it.settled()
            await it.until(lambda _: it.unit.engine.name == "sim")  # vLLM's names are understood before
            assert status.capacity_tokens == 499 * 16
            whole = await it.post(
                "/generate", {"prompt_tokens": 900, "max_new_tokens": 8, "ignore_eos": True}
            )
            assert (whole.status, whole.json["usage"]["completion_tokens"]) == (200, 8)
            never = await it.post("/generate", {"prompt_tokens": 5000, "max_new_tokens": 8})
            assert (never.status, never.headers["x-kvctl-reason"]) == (400, "context")
            asked = [
                asyncio.create_task(it.post("/generate", {"prompt_tokens": 3000, "max_new_tokens": 900}))
                for _ in range(6)
            ]
            answers = await asyncio.gather(*asked)
            assert {answer.status for answer in answers} == {200, 429}
            assert all("Retry-After" in answer.headers for answer in answers if answer.status == 429)
            await it.empty()
    finally:
        await server.close()
