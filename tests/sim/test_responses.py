"""The simulated engine's stored responses, kept as vLLM keeps them, its odd ways included."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import openai
import pytest

from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.server import SimServer

PATH = "/v1/responses"
BODY = {"model": "sim", "input": "hi", "sim_output_tokens": 6}


@pytest.fixture
async def keeping() -> AsyncIterator[SimServer]:
    server = SimServer(EngineConfig(profile=PROFILES["tiny-cpu"]), keeps_responses=True)
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def ask(
    http: aiohttp.ClientSession, server: SimServer, path: str = PATH, body: Any = None
) -> tuple[int, Any]:
    method = "GET" if body is None else "POST"
    async with http.request(method, server.url + path, json=body) as answer:
        return answer.status, await answer.json()


async def read_to_the_end(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: ")]


async def over(http: aiohttp.ClientSession, server: SimServer, name: str) -> dict[str, Any]:
    while True:
        _, told = await ask(http, server, f"{PATH}/{name}")
        if told["status"] != "queued":
            return dict(told)
        await asyncio.sleep(0.01)


async def test_the_openai_client_reads_it(keeping: SimServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{keeping.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.responses.create(model="sim", input="hi", extra_body={"sim_output_tokens": 5})
        assert whole.usage is not None
        assert (whole.status, whole.usage.output_tokens) == ("completed", 5)
        keeping.engine.pause()  # it is not over before it is cancelled
        begun = await client.responses.create(model="sim", input="hi", background=True)
        assert begun.status == "queued"
        assert (await client.responses.cancel(begun.id)).status == "cancelled"


async def test_in_the_background_it_is_queued_until_it_is_over(
    keeping: SimServer, http: aiohttp.ClientSession
) -> None:
    status, begun = await ask(http, keeping, body=BODY | {"background": True})
    assert (status, begun["status"], begun["usage"]) == (200, "queued", None)
    told = await over(http, keeping, begun["id"])
    assert (told["status"], told["usage"]["output_tokens"]) == ("completed", 6)
    assert told["created_at"] == begun["created_at"]


async def test_one_that_fails_stays_queued(keeping: SimServer, http: aiohttp.ClientSession) -> None:
    _, begun = await ask(http, keeping, body=BODY | {"background": True, "sim_fails_after": 2})
    kept = keeping.responses.kept[begun["id"]]
    assert kept.task is not None
    await kept.task
    assert keeping.engine.scheduler.idle
    assert (await ask(http, keeping, f"{PATH}/{begun['id']}"))[1]["status"] == "queued"


async def test_a_stream_can_be_read_on(keeping: SimServer, http: aiohttp.ClientSession) -> None:
    body = BODY | {"background": True, "stream": True}
    async with http.post(keeping.url + PATH, json=body) as answer:
        whole = await read_to_the_end(answer)
    assert [event["sequence_number"] for event in whole] == list(range(9))
    name = whole[0]["response"]["id"]
    async with http.get(f"{keeping.url}{PATH}/{name}?stream=true&starting_after=3") as answer:
        assert await read_to_the_end(answer) == whole[4:]
    _, plain = await ask(http, keeping, body=BODY | {"background": True})
    status, told = await ask(http, keeping, f"{PATH}/{plain['id']}?stream=true")
    assert (status, told["error"]["param"]) == (400, "response_id")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("background", [False, True])
async def test_a_client_that_leaves_ends_only_what_is_not_in_the_background(
    keeping: SimServer, http: aiohttp.ClientSession, background: bool
) -> None:
    keeping.engine.pause()  # it is in course for as long as nobody ends it
    scheduler = keeping.engine.scheduler
    async with http.post(
        keeping.url + PATH, json=BODY | {"background": background, "stream": True}
    ) as answer:
        begun = json.loads((await answer.content.readuntil(b"\n\n")).partition(b"data: ")[2])
    if not background:
        await until(lambda: scheduler.idle)
        return
    await until(lambda: not connections(keeping))
    _, told = await ask(http, keeping, f"{PATH}/{begun['response']['id']}")
    assert (told["status"], scheduler.idle) == ("queued", False)
    keeping.engine.resume()
    assert (await over(http, keeping, told["id"]))["usage"]["output_tokens"] == 6


def connections(server: SimServer) -> list[Any]:
    assert server._runner is not None
    assert server._runner.server is not None
    return server._runner.server.connections


async def test_what_is_not_there(keeping: SimServer, http: aiohttp.ClientSession) -> None:
    for path, body in (
        (f"{PATH}/x", None),
        (f"{PATH}/x/cancel", {}),
        (PATH, BODY | {"previous_response_id": "x"}),
    ):
        assert (await ask(http, keeping, path, body))[0] == 404
    _, done = await ask(http, keeping, body=BODY)
    assert (await ask(http, keeping, f"{PATH}/{done['id']}/cancel", {}))[0] == 400
    for bad in ({"input": None}, {"input": [5]}, {"max_output_tokens": 0}):
        assert (await ask(http, keeping, body=BODY | bad))[0] == 400


async def test_a_conversation_goes_on(keeping: SimServer, http: aiohttp.ClientSession) -> None:
    """Its answers and questions come again, the instructions of before do not."""
    _, first = await ask(http, keeping, body=BODY | {"instructions": "be brief"})
    more = [{"role": "user", "content": [{"type": "input_text", "text": "more"}]}]
    _, second = await ask(http, keeping, body=BODY | {"input": more, "previous_response_id": first["id"]})
    # BOS, three messages of two markers each, and the marker of the answer; "hi" and "more" are a token each
    assert second["usage"]["input_tokens"] == 1 + 3 * 2 + 1 + 6 + 1 + 1


async def test_without_a_store(http: aiohttp.ClientSession) -> None:
    server = SimServer(EngineConfig(profile=PROFILES["tiny-cpu"]))
    await server.start()
    try:
        status, told = await ask(http, server, body=BODY | {"background": True})
        assert (status, told["error"]["param"]) == (400, "background")
        _, done = await ask(http, server, body=BODY)
        assert (await ask(http, server, f"{PATH}/{done['id']}"))[0] == 404
    finally:
        await server.close()
