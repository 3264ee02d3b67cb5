"""Going down: streams run to their end, and what does not is cut truthfully."""

import asyncio
import json

from kvctl.core.events import DrainChanged
from kvctl.core.outcomes import EndReason
from tests.proxy.harness import (
    CHAT,
    CHAT_STREAM,
    LAST,
    STREAM,
    STREAM_HEAD,
    Wire,
    chunk,
    event,
    eventually,
    post,
    rig,
    turns,
)


async def test_streams_run_to_their_end_and_new_requests_are_refused() -> None:
    go_on = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await go_on.wait()
        await wire.send(STREAM_HEAD + chunk(STREAM) + LAST)
        await wire.gone()

    async with rig(script) as it:
        running = asyncio.create_task(it.post(CHAT_STREAM))
        await eventually(lambda: it.proxy.in_flight == 1)
        it.keeper.handle(DrainChanged(draining=True))
        drain = asyncio.create_task(it.proxy.drain(60))
        refused = await it.post()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"x-kvctl-reason: draining" in refused
        assert b"Retry-After: " in refused
        go_on.set()
        assert (await running).endswith(LAST)
        await drain
        assert it.reasons == [EndReason.FINISHED]


async def test_a_stream_that_outlasts_the_drain_is_cut_visibly() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD + chunk(event("a")))
        await wire.gone()

    async with rig(script) as it:
        wire = await it.client()
        await wire.send(post(CHAT_STREAM))
        await wire.reader.readuntil(event("a"))
        await it.proxy.drain(0.01)
        got = b""
        reset = False
        try:
            while more := await wire.reader.read(65536):
                got += more
        except ConnectionResetError:
            reset = True
        assert reset
        assert b"shutting down" in got
        assert b"[DONE]" not in got
        assert not got.endswith(LAST)
        assert it.reasons == [EndReason.SHUTDOWN]
        await eventually(lambda: it.engine.open == 0)
        wire.close()


async def test_what_has_no_answer_yet_gets_a_503() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.gone()

    async with rig(script) as it:
        call = asyncio.create_task(it.post(CHAT))
        await eventually(lambda: it.proxy.in_flight == 1 and it.engine.open == 1)
        await it.proxy.drain(0)
        answer = await call
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "draining"
        assert b"broke" in answer or b"break off" in answer
        assert b"Nothing was generated" not in answer
        assert it.reasons == [EndReason.SHUTDOWN]


async def test_close_with_everything_in_course_leaves_nothing() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD)
        await wire.gone()

    async with rig(script) as it:
        clients = [await it.client() for _ in range(20)]
        for number, wire in enumerate(clients):
            await wire.send(post(CHAT_STREAM) if number % 2 else post(CHAT)[:-3])
        await eventually(lambda: it.proxy.in_flight == 10)
        await it.proxy.close()
        assert it.reasons == [EndReason.SHUTDOWN] * 10
        await eventually(lambda: it.engine.open == 0)
        for wire in clients:
            wire.close()


async def test_a_drain_in_course_may_be_ended_as_if_its_time_were_over() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD + chunk(event("a")))
        await wire.gone()

    async with rig(script) as it:
        wire = await it.client()
        await wire.send(post(CHAT_STREAM))
        await wire.reader.readuntil(event("a"))
        drain = asyncio.create_task(it.proxy.drain(3600))
        rest = asyncio.create_task(wire.reader.readuntil(b"not complete"))
        await turns()
        for _ in range(3):
            it.proxy.hurry()
        await drain
        it.proxy.hurry()
        assert b"shutting down" in await rest
        assert it.reasons == [EndReason.SHUTDOWN]
        wire.close()


async def test_who_is_in_a_hurry_before_the_drain_does_not_wait_for_it() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.gone()

    async with rig(script) as it:
        call = asyncio.create_task(it.post(CHAT))
        await eventually(lambda: it.proxy.in_flight == 1 and it.engine.open == 1)
        it.proxy.hurry()
        await it.proxy.drain(3600)
        assert (await call).startswith(b"HTTP/1.1 503 ")
