"""What may change or delay a stream, and only where it is asked for: the peek, the heartbeat, the drain."""

import asyncio
import json
import time

import pytest

from kvctl.core.outcomes import EndReason
from kvctl.proxy.seams import ProxyConfig
from tests.proxy.harness import (
    CHAT,
    CHAT_STREAM,
    DONE,
    LAST,
    STREAM,
    STREAM_HEAD,
    Rig,
    Wire,
    answering,
    chunk,
    event,
    eventually,
    post,
    rig,
)

PEEKING = ProxyConfig(first_event_peek=600.0)
BUSY = b'{"error":{"message":"too busy","type":"overloaded","code":503}}'


def stream_of(*blocks: bytes) -> bytes:
    return STREAM_HEAD + chunk(b"".join(blocks)) + LAST


def parts(answer: bytes) -> tuple[bytes, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (b"data: " + BUSY + b"\n\n", 503),
        (b": hello\n\ndata: " + BUSY + b"\n\n", 503),
        (b"data: " + BUSY + b"\r\n\r\n", 503),
        (b"\xef\xbb\xbfdata:" + BUSY + b"\n\n", 503),
        (b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"x"}}\n\n', 529),
        (b'data:{"error":"Model is overloaded","error_type":"overloaded"}\n\n', 429),
        (b'data: {"error":\ndata: {"message":"x","code":400}}\n\n', 400),
    ],
)
async def test_b08_a_refusal_inside_a_200_becomes_its_status(first: bytes, status: int) -> None:
    """B08: the caller of a stream reads the refusal where every client looks for one."""
    async with rig(answering(stream_of(first, DONE)), config=PEEKING) as it:
        head, body = parts(await it.post(CHAT_STREAM))
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"event-stream" not in head
        assert "error" in json.loads(body)
        await it.quiet()
        assert it.reasons == [EndReason.ENGINE_REFUSED]
        assert it.seen.records[-1].status == status


async def test_the_engines_retry_after_goes_with_its_refusal() -> None:
    answer = stream_of(b"data: " + BUSY + b"\n\n").replace(b"\r\n\r\n", b"\r\nRetry-After: 7\r\n\r\n", 1)
    async with rig(answering(answer), config=PEEKING) as it:
        assert b"Retry-After: 7\r\n" in await it.post(CHAT_STREAM)


@pytest.mark.parametrize(
    "body",
    [
        STREAM,
        b": only a comment\n\n" + STREAM,
        b'data: {"error":null,"choices":[]}\n\n' + DONE,
        b'data: {"error":{"message":"x","code":"odd"}}\n\n' + DONE,
        b'data: {"error":{"message":"x","code":200}}\n\n' + DONE,
        b'data: {"error":"text"}\n\n' + DONE,
        b"data: [1]\n\n",
        b"data: nonsense\n\n",
        b"data: " + BUSY,  # an event that its empty line never ended
        b"x" * 100_000 + b"\n\n" + STREAM,
        b"",
    ],
)
async def test_any_other_stream_passes_byte_for_byte(body: bytes) -> None:
    answer = STREAM_HEAD + (chunk(body) if body else b"") + LAST
    async with rig(answering(answer)) as it:
        without = parts(await it.post(CHAT_STREAM))
    async with rig(answering(answer), config=PEEKING) as it:
        peeked = parts(await it.post(CHAT_STREAM))
    assert dechunked(peeked[1]) == dechunked(without[1]) == body
    assert peeked[0].startswith(b"HTTP/1.1 200 OK")


def dechunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        body += rest[: int(size, 16)]
        data = rest[int(size, 16) + 2 :]
    return body


async def test_the_hold_is_bounded() -> None:
    """A silent engine's head goes out when the time is over, and its stream follows."""
    go = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD)
        await go.wait()
        await wire.send(chunk(STREAM) + LAST)
        await wire.gone()

    async with rig(script, config=ProxyConfig(first_event_peek=0.05)) as it:
        wire = await it.client()
        await wire.send(post(CHAT_STREAM))
        assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        go.set()
        assert STREAM in await wire.reader.readuntil(LAST)
        wire.close()


async def test_a_client_who_leaves_while_its_head_is_held_is_noticed() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD)
        await wire.gone()

    async with rig(script, config=ProxyConfig(first_event_peek=60)) as it:
        wire = await it.client()
        await wire.send(post(CHAT_STREAM))
        await eventually(lambda: len(it.gate.ledger) == 1)
        await asyncio.sleep(0.02)
        wire.reset()
        await it.quiet()
        assert it.reasons == [EndReason.CLIENT_GONE]


async def test_an_engine_that_breaks_while_its_head_is_held_is_a_502() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD)
        await asyncio.sleep(0.02)
        wire.reset()

    async with rig(script, config=PEEKING) as it:
        assert (await it.post(CHAT_STREAM)).startswith(b"HTTP/1.1 502 ")


# --- the heartbeat ----------------------------------------------------------------------------------


async def test_b33_silence_is_broken_by_comments_between_events() -> None:
    """B33: a silent prefill gets comments where the operator asked; the events stay as they were."""
    go = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD)
        await go.wait()
        for text in "abcd":  # each in a read of its own: they are only counted
            go.clear()
            await wire.send(chunk(event(text)))
            await go.wait()
        await wire.send(chunk(STREAM) + LAST)
        await wire.gone()

    async with rig(script, config=ProxyConfig(stream_heartbeat=0.04)) as it:
        wire = await it.client()
        await wire.send(post(CHAT_STREAM))
        await wire.reader.readuntil(b": keep-alive\n\n")
        await wire.reader.readuntil(b": keep-alive\n\n")
        for text in "abcd":
            go.set()
            await wire.reader.readuntil(event(text))
        await wire.reader.readuntil(b": keep-alive\n\n")
        go.set()
        rest = await wire.reader.readuntil(LAST)
        assert STREAM in rest
        wire.close()
        await it.quiet()
        assert it.reasons == [EndReason.FINISHED]


async def test_b33_nothing_is_put_inside_an_event_nor_without_being_asked() -> None:
    """B33: a stream that stops in the middle of an event is left alone, and so is any other by default."""
    half = event("a")[:20]
    for config, sent in ((ProxyConfig(stream_heartbeat=0.02), half), (ProxyConfig(), event("a"))):
        go = asyncio.Event()

        async def script(wire: Wire, sent: bytes = sent, go: asyncio.Event = go) -> None:
            await wire.request()
            await wire.send(STREAM_HEAD + chunk(sent))
            await go.wait()
            await wire.send(chunk(event("a")[len(sent) :] + DONE) + LAST if sent is half else LAST)
            await wire.gone()

        async with rig(script, config=config) as it:
            wire = await it.client()
            await wire.send(post(CHAT_STREAM))
            await wire.reader.readuntil(sent)
            await asyncio.sleep(0.15)
            go.set()
            assert b"keep-alive" not in await wire.reader.readuntil(LAST)
            wire.close()


@pytest.mark.parametrize("extra", [b"content-encoding: gzip\r\n", b"content-length: 20000\r\n"])
async def test_b33_streams_that_take_no_comment_get_none(extra: bytes) -> None:
    """B33: neither a compressed stream nor one of a declared length."""
    head = STREAM_HEAD.replace(b"transfer-encoding: chunked\r\n", b"") if b"length" in extra else STREAM_HEAD
    head = head.replace(b"\r\n\r\n", b"\r\n" + extra + b"\r\n")
    go = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(head)
        await go.wait()

    async with rig(script, config=ProxyConfig(stream_heartbeat=0.02)) as it:
        wire = await it.client()
        await wire.send(post(CHAT_STREAM))
        await wire.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.15)
        go.set()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)) as raised:
            await wire.reader.readuntil(b"keep-alive")
        assert b"keep-alive" not in getattr(raised.value, "partial", b"")
        wire.close()


# --- the drain --------------------------------------------------------------------------------------


async def left_early(it: Rig, body: bytes, seen: bytes) -> None:
    wire = await it.client()
    await wire.send(post(body))
    if seen:
        await wire.reader.readuntil(seen)
    else:
        await eventually(lambda: len(it.gate.ledger) == 1 and it.engine.open == 1)
    wire.reset()


@pytest.mark.parametrize(("body", "seen"), [(CHAT_STREAM, event("a")), (CHAT_STREAM, b""), (CHAT, b"")])
async def test_b05_an_engine_that_aborts_harm_is_read_to_the_end(body: bytes, seen: bytes) -> None:
    """B05: its connection stays open and the reservation is kept until its answer is over."""
    go, closed_early = asyncio.Event(), list[bool]()

    async def script(wire: Wire) -> None:
        await wire.request()
        if seen:
            await wire.send(STREAM_HEAD + chunk(event("a")))
        await go.wait()
        closed_early.append(wire.reader.at_eof())
        await wire.send((b"" if seen else STREAM_HEAD) + chunk(event("b") + event("", "stop") + DONE) + LAST)
        await wire.gone()

    async with rig(script, drains=True) as it:
        await left_early(it, body, seen)
        await asyncio.sleep(0.1)
        assert len(it.gate.ledger) == 1
        go.set()
        await it.quiet()
        assert closed_early == [False]
        assert it.reasons == [EndReason.FINISHED]


async def test_b05_a_drained_answer_does_not_outlast_the_stop() -> None:
    """B05: at the end of the drain it is cut like any other."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD + chunk(event("a")))
        await wire.gone()

    async with rig(script, drains=True) as it:
        await left_early(it, CHAT_STREAM, event("a"))
        await asyncio.sleep(0.05)
        assert it.proxy.in_flight == 1
        began = time.monotonic()
        await it.proxy.drain(0.01)
        assert time.monotonic() - began < 30
        assert it.reasons == [EndReason.SHUTDOWN]
