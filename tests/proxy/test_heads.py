"""The time that the head of a further request may take, on a connection that was of use already."""

import asyncio

from kvctl.core.outcomes import ProxyFault
from kvctl.proxy.seams import ProxyConfig
from kvctl.proxy.server import ClientConnection
from tests.proxy.harness import (
    PATIENCE,
    PLAIN,
    Rig,
    Script,
    Wire,
    answering,
    eventually,
    get,
    plain,
    post,
    rig,
    turns,
)

ENGINE = answering(plain(PLAIN))


def held_back(release: asyncio.Event) -> Script:
    """An engine that answers when it may."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await release.wait()
            await wire.send(plain(PLAIN))

    return script


def connections(it: Rig) -> list[ClientConnection]:
    server = it.proxy._server
    assert server is not None
    return [each for each in server.connections if isinstance(each, ClientConnection)]


async def test_a_late_head_behind_a_request_is_not_waited_for() -> None:
    """On a connection that was of use already, whether its first bytes came while it was, or afterwards."""
    release = asyncio.Event()
    async with rig(held_back(release), config=ProxyConfig(header_timeout=0.1)) as it:
        for meanwhile in (True, False):
            wire = await it.client()
            await wire.send(post())
            await eventually(lambda: it.proxy.in_flight == 1)
            if meanwhile:
                await wire.send(b"POST /v1/completions HTT")
                await turns()
            release.set()
            assert (await wire.reader.readuntil(PLAIN)).startswith(b"HTTP/1.1 200 ")
            if not meanwhile:
                await wire.send(b"POST /v1/completions HTT")
            async with asyncio.timeout(PATIENCE):
                assert await wire.reader.read() == b""
            wire.close()
            release.clear()
        assert it.seen.faults == [ProxyFault.HEADER_TIMEOUT] * 2


async def test_requests_that_came_ahead_owe_nothing() -> None:
    release = asyncio.Event()
    async with rig(held_back(release)) as it:
        wire = await it.client()
        await wire.send(post())
        await eventually(lambda: it.proxy.in_flight == 1)
        await wire.send(post())
        await turns()
        release.set()
        for _ in range(2):
            assert (await wire.reader.readuntil(PLAIN)).startswith(b"HTTP/1.1 200 ")
        (connection,) = connections(it)
        assert connection.owing_since is None
        wire.close()


async def test_the_time_of_an_idle_connection_does_not_end_a_head_that_has_begun() -> None:
    async with rig(ENGINE) as it:
        wire = await it.client()
        await wire.send(post())
        await wire.reader.readuntil(PLAIN)
        (connection,) = connections(it)
        await wire.send(post()[:20])
        await eventually(lambda: connection.owing_since is not None)
        connection._next_keepalive_close_time = 0.0
        connection._process_keepalive()
        await wire.send(post()[20:])
        assert (await wire.reader.readuntil(PLAIN)).startswith(b"HTTP/1.1 200 ")
        await eventually(lambda: connection._keepalive_handle is not None)
        connection._next_keepalive_close_time = 0.0
        connection._process_keepalive()
        async with asyncio.timeout(PATIENCE):
            assert await wire.reader.read() == b""
        wire.close()


async def test_a_body_that_comes_behind_its_answer_is_no_head() -> None:
    async with rig(ENGINE) as it:
        wire, whole = await it.client(), post(b"x" * 100, "/v1/nowhere")
        await wire.send(whole[:-100])
        answer = await wire.reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert b"connection: close" not in answer.lower()
        (connection,) = connections(it)
        await wire.send(b"x" * 100)
        await eventually(connection._content.is_eof)
        assert connection.owing_since is None
        await wire.send(get("/healthz")[:10])
        await eventually(lambda: connection.owing_since is not None)
        await wire.send(get("/healthz")[10:])
        assert (await wire.reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
        wire.close()
