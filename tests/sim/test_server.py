import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from kvctl.sim import text
from kvctl.sim.scheduler import Finish
from kvctl.sim.server import SimServer

MakeServer = Callable[..., Awaitable[SimServer]]

HELLO: ChatCompletionUserMessageParam = {"role": "user", "content": "hello there"}


def client_of(server: SimServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with http.post(url, data=data) as response:
        return response.status, await response.json()


async def until(condition: Callable[[], object], message: str) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
    assert condition(), message


async def test_chat_answers_whole(make_server: MakeServer) -> None:
    server = await make_server()
    async with client_of(server) as client:
        answer = await client.chat.completions.create(
            model="sim", messages=[HELLO], max_tokens=50, extra_body={"sim_output_tokens": 7}
        )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 7)
    assert text.count(answer.choices[0].message.content or "") == 7


async def test_chat_streams_every_token_and_the_usage(make_server: MakeServer) -> None:
    server = await make_server()
    async with client_of(server) as client:
        stream = await client.chat.completions.create(
            model="sim",
            messages=[HELLO],
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"sim_output_tokens": 9},
        )
        chunks = [chunk async for chunk in stream]
    words = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert len(words) == 5
    assert finishes == ["length"]
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.completion_tokens, chunks[-1].choices) == (5, [])


async def test_completions_run_every_prompt_n_times(make_server: MakeServer) -> None:
    server = await make_server()
    async with client_of(server) as client:
        answer = await client.completions.create(model="sim", prompt=["one", "two"], n=2, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)


async def test_completions_stream_n_sequences_apart(make_server: MakeServer) -> None:
    server = await make_server()
    async with client_of(server) as client:
        stream = await client.completions.create(
            model="sim", prompt="x", n=2, max_tokens=9, stream=True, extra_body={"sim_output_tokens": [2, 4]}
        )
        counts = {0: 0, 1: 0}
        async for chunk in stream:
            for choice in chunk.choices:
                counts[choice.index] += 1
    assert counts == {0: 2, 1: 4}


async def test_no_cap_means_the_route_default(make_server: MakeServer, http: aiohttp.ClientSession) -> None:
    server = await make_server(max_model_len=64)
    _, short = await post(http, f"{server.url}/v1/completions", {"prompt": "abc", "ignore_eos": True})
    body = {"messages": [HELLO], "ignore_eos": True}
    _, rest = await post(http, f"{server.url}/v1/chat/completions", body)
    assert short["usage"]["completion_tokens"] == 16
    assert rest["usage"]["total_tokens"] == 64


async def test_length_is_forced_as_on_the_real_engine(
    make_server: MakeServer, http: aiohttp.ClientSession
) -> None:
    server = await make_server()
    body = {"prompt": "abc", "max_tokens": 500, "min_tokens": 20, "logit_bias": {"1": 100}}
    _, answer = await post(http, f"{server.url}/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 21


async def test_length_that_nobody_says_is_drawn_within_the_cap(
    make_server: MakeServer, http: aiohttp.ClientSession
) -> None:
    server = await make_server()
    body = {"prompt": "abc", "max_tokens": 200}
    answers = await asyncio.gather(*(post(http, f"{server.url}/v1/completions", body) for _ in range(6)))
    lengths = {answer["usage"]["completion_tokens"] for _, answer in answers}
    assert max(lengths) <= 200
    assert len(lengths) > 1


async def test_max_tokens_zero_computes_the_prompt_and_answers_nothing(
    make_server: MakeServer, http: aiohttp.ClientSession
) -> None:
    server = await make_server()
    status, answer = await post(http, f"{server.url}/v1/completions", {"prompt": "abc", "max_tokens": 0})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["text"] == ""


REFUSED = [
    ({"prompt": "hi", "max_tokens": 7.5}, 400, "Bad Request", "body.max_tokens"),
    ({"prompt": "hi", "max_tokens": "many"}, 400, "Bad Request", "body.max_tokens"),
    ({"prompt": "hi", "max_tokens": -1}, 400, "BadRequestError", "max_tokens"),
    ({"prompt": "hi", "max_tokens": 9000}, 400, "BadRequestError", "max_tokens"),
    ({"prompt": "x" * 40000}, 400, "BadRequestError", "input_tokens"),
    ({"prompt": "hi", "n": 0}, 400, "BadRequestError", "n"),
    ({"prompt": "hi", "stream_options": []}, 400, "Bad Request", "body.stream_options"),
    ({"prompt": "hi", "sim_output_tokens": "long"}, 400, "Bad Request", "body.sim_output_tokens"),
    ({"prompt": ""}, 400, "BadRequestError", "prompt"),
    ({}, 400, "BadRequestError", "prompt"),
    ({"prompt": "hi", "model": "nope"}, 404, "NotFoundError", "model"),
    (b'{"prompt":"hi"', 400, "Bad Request", "body.14"),
    (b"[1]", 400, "Bad Request", "body"),
    (b"\xff\xfe\xfa", 400, "BadRequestError", None),
]


@pytest.mark.parametrize(("body", "expected"), [(body, expected) for body, *expected in REFUSED])
async def test_odd_requests_are_refused_in_the_engine_s_words(
    make_server: MakeServer, http: aiohttp.ClientSession, body: Any, expected: list[Any]
) -> None:
    server = await make_server()
    got, answer = await post(http, f"{server.url}/v1/completions", body)
    error = answer["error"]
    assert [got, error["type"], error["param"]] == expected
    assert error["code"] == got
    assert server.engine.scheduler.idle


@pytest.mark.parametrize("value", ["7", 7.0, " 7 "])
async def test_limits_of_odd_type_are_numbers_to_the_engine(
    make_server: MakeServer, http: aiohttp.ClientSession, value: Any
) -> None:
    server = await make_server()
    body = {"prompt": "hi", "max_tokens": value, "ignore_eos": True}
    _, answer = await post(http, f"{server.url}/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 7


async def test_tokenize_counts_what_generation_charges(
    make_server: MakeServer, http: aiohttp.ClientSession
) -> None:
    server = await make_server()
    chat = {"messages": [{"role": "system", "content": "Grüße 🙂"}, HELLO], "tools": [{"type": "function"}]}
    for route, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "naïve text"})):
        _, counted = await post(http, f"{server.url}/tokenize", body)
        _, answer = await post(http, server.url + route, {**body, "max_tokens": 1})
        assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]
        assert counted["max_model_len"] == 8192


async def test_detokenize_gives_the_text_back(make_server: MakeServer, http: aiohttp.ClientSession) -> None:
    server = await make_server()
    said = "Zürich, 10 €: 完了"
    _, counted = await post(http, f"{server.url}/tokenize", {"prompt": said})
    _, back = await post(http, f"{server.url}/detokenize", {"tokens": counted["tokens"]})
    assert back == {"prompt": said}
    status, _ = await post(http, f"{server.url}/detokenize", {"tokens": [1 << 60]})
    assert status == 400


async def test_models_version_health(make_server: MakeServer, http: aiohttp.ClientSession) -> None:
    server = await make_server(max_model_len=4096)
    async with http.get(f"{server.url}/v1/models") as response:
        card = (await response.json())["data"][0]
    assert (card["id"], card["max_model_len"]) == ("sim", 4096)
    for path, status in (("/version", 200), ("/health", 200), ("/nope", 404)):
        async with http.get(server.url + path) as response:
            assert response.status == status


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_frees_its_blocks(make_server: MakeServer, stream: bool) -> None:
    server = await make_server()
    scheduler = server.engine.scheduler
    body = {"prompt": "x" * 400, "max_tokens": 8000, "ignore_eos": True, "stream": stream}
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(post(session, f"{server.url}/v1/completions", body))
        await until(lambda: scheduler.counters.generation_tokens > 3, "it never ran")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await until(lambda: scheduler.idle, "the request runs on")
    assert scheduler.pool.free == scheduler.pool.usable
    assert scheduler.counters.finished[Finish.ABORT] == 1


async def test_paused_engine_is_healthy_and_moves_no_token(
    make_server: MakeServer, http: aiohttp.ClientSession
) -> None:
    server = await make_server()
    server.engine.pause()
    request = asyncio.create_task(
        post(http, f"{server.url}/v1/completions", {"prompt": "hi", "max_tokens": 3})
    )
    await until(lambda: server.engine.scheduler.waiting, "it never arrived")
    async with http.get(f"{server.url}/health") as response:
        assert response.status == 200
    await asyncio.sleep(0.05)
    assert not request.done()
    server.engine.resume()
    status, _ = await request
    assert status == 200


async def test_dead_engine_breaks_its_streams_and_refuses_connections(make_server: MakeServer) -> None:
    server = await make_server()
    body = {"prompt": "hi", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            await response.content.readany()
            await server.die()
            with pytest.raises(aiohttp.ClientError):
                await response.content.read()
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"{server.url}/health")


async def test_overload_preempts_and_everybody_is_served_in_the_end(
    make_server: MakeServer, http: aiohttp.ClientSession
) -> None:
    server = await make_server(blocks=21)
    body = {"prompt": "x" * 120, "max_tokens": 60, "sim_output_tokens": 40}
    answers = await asyncio.gather(*(post(http, f"{server.url}/v1/completions", body) for _ in range(20)))
    assert {answer["usage"]["completion_tokens"] for _, answer in answers} == {40}
    assert server.engine.scheduler.counters.preemptions > 0
    assert server.engine.scheduler.idle
