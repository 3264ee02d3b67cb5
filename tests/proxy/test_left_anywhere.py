"""A request left, cut off or drained at whichever turn of the loop: nothing of it stays in any book.

The turn counts from when its head was read, so that every place where a handler waits is met: the body, the
count (in a thread, at the engine), the queue, the connection, the head, the stream, and the ends of each.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from kvctl.core.events import Reconfigured
from kvctl.core.queue import QueueConfig
from kvctl.core.supply import GateConfig
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Reader
from kvctl.proxy.server import ClientConnection
from kvctl.tokens.load import load_counter
from tests.proxy.harness import (
    CHAT,
    CHAT_STREAM,
    DONE,
    LAST,
    PLAIN,
    STREAM_HEAD,
    Rig,
    Wire,
    WordCounter,
    chunk,
    event,
    eventually,
    plain,
    post,
    rig,
)

TURNS = range(0, 40, 2)  # the longest of the courses below is over by then
ROOM = 48  # KV tokens: two requests at once
LONG = json.dumps({"model": "m", "prompt": "a word " * 2000, "max_tokens": 8}).encode()
STORED = b'{"model":"m","input":"hi","background":true,"max_output_tokens":8}'
BEGUN = (
    b'{"id":"resp_1","object":"response","created_at":7,"status":"%b","background":true,'
    b'"output":[],"usage":{"input_tokens":1,"output_tokens":3}}'
)


async def engine(wire: Wire) -> None:
    """Answers in several reads each; a response in the background is over when it is asked for."""
    while True:
        request = await wire.request()
        if b" /v1/responses/" in request.line:
            await wire.send(plain(BEGUN % b"completed"))
        elif b" /v1/responses " in request.line:
            await wire.send(plain(BEGUN % b"queued"))
        elif b'"stream":true' in request.body:
            await wire.send(STREAM_HEAD)
            for text in "abc":
                await wire.send(chunk(event(text)))
                await asyncio.sleep(0)
            await wire.send(chunk(event("", "stop") + DONE) + LAST)
        else:
            await wire.send_split(plain(PLAIN), 100)


async def _left(it: Rig) -> None:
    """The clients' connections break, as the kernel would tell."""
    server = it.proxy._server
    assert server is not None
    for connection in server.connections:
        if isinstance(connection, ClientConnection) and connection.transport is not None:
            connection.transport.abort()


async def _cut(it: Rig) -> None:
    """The end of a drain."""
    for flight in tuple(it.proxy._handler.flights):
        flight.cut()


async def _both(it: Rig) -> None:
    await _cut(it)
    await _left(it)


async def _both_the_other_way(it: Rig) -> None:
    await _left(it)
    await _cut(it)


async def _engine_gone(it: Rig) -> None:
    """Its connections break, at the same moment as its clients'."""
    for connection in tuple(it.upstream._busy):
        connection.abort()
    await _left(it)


async def _retired(it: Rig) -> None:
    """The rank is gone: nobody comes in any more."""
    it.keeper.retire()


FAULTS = [_left, _cut, _both, _both_the_other_way, _engine_gone, _retired]
Fault = Callable[[Rig], Awaitable[None]]


async def played(it: Rig, requests: Sequence[bytes], turn: int, fault: Fault) -> None:
    """All ``requests`` at once, each on a connection of its own; ``fault`` after so many turns."""
    wires = [await it.client() for _ in requests]
    for wire, request in zip(wires, requests, strict=True):
        await wire.send(request)
    for _ in range(turn):
        await asyncio.sleep(0)
    await fault(it)
    await eventually(lambda: not len(it.gate.ledger) and not it.gate._room)
    for wire in wires:
        wire.close()
    await it.quiet()
    await eventually(lambda: it.proxy.body_bytes == 0)
    assert not it.keeper._waiting
    assert not it.proxy._handler.flights
    assert it.gate.status(asyncio.get_running_loop().time()).forecast_peak_tokens == 0
    assert it.gate.ledger.sequences == 0


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("drains", [False, True], ids=["", "drains"])
async def test_one_that_runs(fault: Fault, *, drains: bool) -> None:
    for body in (CHAT, CHAT_STREAM):
        for turn in TURNS:
            async with rig(engine, drains=drains) as it:
                await played(it, [post(body)], turn, fault)


@pytest.mark.parametrize("fault", FAULTS)
async def test_those_that_wait_behind_others(fault: Fault) -> None:
    """The ends of the first ones start the others, in whose place somebody may be gone already."""
    made = GateConfig(
        capacity_tokens=ROOM, capacity_force=True, ttft_target_s=None, queue=QueueConfig(max_wait_s=600.0)
    )
    for turn in TURNS:
        async with rig(engine, capacity=ROOM) as it:
            it.keeper.handle(Reconfigured(made))
            await played(
                it, [post(body) for body in (CHAT, CHAT_STREAM, CHAT, CHAT_STREAM, CHAT)], turn, fault
            )


@pytest.mark.parametrize("fault", FAULTS)
async def test_one_that_is_counted_in_a_thread(fault: Fault, tiny_folder: Path) -> None:
    counter = load_counter(str(tiny_folder), inline_bytes=0)
    try:
        for turn in TURNS:
            reader = Reader(counter, VLLM(), vocab_size=counter.vocab_size, context=lambda: 8192)
            async with rig(engine, reader=reader) as it:
                await played(it, [post(LONG, "/v1/completions")], turn, fault)
        await eventually(lambda: counter.waiting == 0)
    finally:
        await counter.close()


async def test_one_in_the_background() -> None:
    """Its caller may leave; the engine tells its end, in whichever turn that comes."""
    adapter = VLLM()
    for turn in TURNS:
        async with rig(engine, reader=Reader(WordCounter(), adapter)) as it:
            await played(it, [post(STORED, "/v1/responses")], turn, _left)
            assert it.proxy.background_responses == 0
