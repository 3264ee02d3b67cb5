"""What the openai client makes of it."""

import asyncio
from collections.abc import Mapping
from typing import Any

import openai
import pytest

from kvctl.core.outcomes import Policy
from tests.proxy.harness import (
    DONE,
    LAST,
    PLAIN,
    STREAM,
    STREAM_HEAD,
    Rig,
    Wire,
    answering,
    chunk,
    event,
    eventually,
    plain,
    rig,
)


def client(it: Rig, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{it.port}/v1", api_key="k", max_retries=retries)


async def stream(it: Rig) -> str:
    """The text of a streamed answer; raises what the client raises."""
    async with client(it) as api:
        chunks = await api.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=8, stream=True
        )
        return "".join([part.choices[0].delta.content or "" async for part in chunks if part.choices])


async def plain_text(it: Rig, max_tokens: int = 8, retries: int = 0) -> str | None:
    async with client(it, retries) as api:
        answer = await api.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=max_tokens
        )
        return answer.choices[0].message.content


async def test_answers_arrive() -> None:
    async with rig(answering(plain(PLAIN), STREAM_HEAD + chunk(STREAM) + LAST)) as it:
        assert await plain_text(it) == "hi"
        assert await stream(it) == "ab"


async def test_b06_a_cut_stream_raises_in_the_client() -> None:
    """B06: the openai client raises instead of taking a cut stream for an answer."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD + chunk(event("a")))
        await asyncio.sleep(0.02)
        wire.reset()

    async with rig(script) as it:
        with pytest.raises(openai.APIError, match="connection to the engine broke"):
            await stream(it)


async def test_b08_an_error_inside_a_good_stream_raises_in_the_client() -> None:
    """B08: an error object in a 200 stream reaches the openai client as an error."""
    body = b'data: {"error":{"message":"too busy","code":503}}\n\n' + DONE
    async with rig(answering(STREAM_HEAD + chunk(body) + LAST)) as it:
        with pytest.raises(openai.APIError, match="too busy"):
            await stream(it)


async def test_never_is_not_tried_again() -> None:
    async with rig(answering(plain(PLAIN))) as it:
        with pytest.raises(openai.BadRequestError) as raised:
            await plain_text(it, max_tokens=9000, retries=2)
        assert raised.value.code == "context_length_exceeded"
        assert len(it.seen.records) == 1


async def test_e07_the_client_comes_back_when_it_is_told_to() -> None:
    """E07: after a busy gate's 429 the openai client waits as long as it is told, and is served."""
    hold, told = asyncio.Event(), list[tuple[float, Mapping[str, str]]]()
    now = asyncio.get_running_loop().time

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await hold.wait()
            await wire.send(plain(PLAIN))

    async def noted(response: Any) -> None:
        told.append((now(), response.headers))

    big = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":7000}'
    async with rig(script, capacity=8000, policy=Policy.STATIC) as it:
        first = asyncio.create_task(it.post(big))
        await eventually(lambda: len(it.gate.ledger) == 1)
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{it.port}/v1",
            api_key="k",
            max_retries=1,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"response": [noted]}),
        ) as api:
            call = asyncio.create_task(
                api.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=7000
                )
            )
            await eventually(lambda: len(told) == 1)
            hold.set()
            await first
            await call
        (refused_at, headers), (served_at, _) = told
        assert 1 <= int(headers["retry-after"]) <= 60
        assert served_at - refused_at >= int(headers["retry-after-ms"]) / 1000 * 0.98
        assert [record.status for record in it.seen.records] == [429, 200, 200]
