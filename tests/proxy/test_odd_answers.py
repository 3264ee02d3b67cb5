"""Odd HTTP from the engine: what cannot be passed on truthfully is a 502, never a guess."""

import asyncio

import pytest

from kvctl.core.outcomes import EndReason
from kvctl.proxy import sniffer
from tests.proxy.harness import (
    CHAT,
    LAST,
    PLAIN,
    STREAM,
    STREAM_HEAD,
    Wire,
    answering,
    chunk,
    event,
    plain,
    rig,
)

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n" % len(PLAIN)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = chunk(PLAIN) + LAST

REFUSED = {
    "length and chunks": OK + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "chunks and length": OK + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "two lengths": OK + LENGTH + b"content-length: 3\r\n\r\n" + PLAIN,
    "a list of lengths": OK + b"content-length: %d, 3\r\n\r\n" % len(PLAIN) + PLAIN,
    "length below zero": OK + b"content-length: -3\r\n\r\n" + PLAIN,
    "length past counting": OK + b"content-length: " + b"9" * 30 + b"\r\n\r\n" + PLAIN,
    "coded besides": OK + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "coded, and then chunked": OK + b"transfer-encoding: gzip\r\n" + CHUNKED + b"\r\n" + CHUNKS,
    "coded until the end": OK + b"transfer-encoding: gzip\r\n\r\n" + PLAIN,
    "a folded header": OK + b"x-a: b\r\n c\r\n" + LENGTH + b"\r\n" + PLAIN,
    "a null": OK + b"x-a: b\x00c\r\n" + LENGTH + b"\r\n" + PLAIN,
    "a space before the colon": OK + LENGTH.replace(b":", b" :") + b"\r\n" + PLAIN,
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "HTTP/2": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18),
    "a status that is none": b"HTTP/1.1 2x0 OK\r\n" + LENGTH + b"\r\n" + PLAIN,
    "half a head": OK + b"x-a: ",
    "nothing": b"",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_an_answer_that_cannot_be_passed_on_truthfully_is_a_502(data: bytes) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(data)
        await asyncio.sleep(0.01)
        wire.close()

    async with rig(script) as it:
        answer = await it.post()
        assert answer.startswith(b"HTTP/1.1 502 "), answer[:200]
        await it.quiet()
        assert it.reasons == [EndReason.ENGINE_ERROR]
        assert it.upstream.connections == 0


DEPTH = 20_000
NEST = b"[" * DEPTH + b"]" * DEPTH
READABLE_NO_MORE = {
    "an answer that nests past all bounds": plain(b'{"choices":[],"x":' + NEST + b"}"),
    "text that is none": plain(b'{"choices":[{"finish_reason":"stop"}],"x":"\xff"}'),
    "an event that nests past all bounds": (
        STREAM_HEAD + chunk(event("a") + b'data: {"x":' + NEST + b"}\n\n" + event("b", "stop")) + LAST
    ),
    "a token of an event with text that is none": (
        STREAM_HEAD + chunk(event("a") + b'data: {"type":"x","y":"\xff"}\n\n' + event("b", "stop")) + LAST
    ),
}


@pytest.mark.parametrize("data", READABLE_NO_MORE.values(), ids=READABLE_NO_MORE)
async def test_what_cannot_be_read_is_passed_on_and_ends(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(answering(data)) as it:
        answer = await it.post(CHAT)
        assert answer.partition(b"\r\n\r\n")[2] == data.partition(b"\r\n\r\n")[2]
        await it.quiet()
        assert it.reasons == [EndReason.FINISHED]
        assert not caplog.records
        if data.startswith(STREAM_HEAD):
            assert it.ended[0].record.output_tokens == 2


async def test_a_defect_of_the_books_keeps_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is passed on and over, whatever reads along."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sniffer, "read_answer", fails)
    monkeypatch.setattr(sniffer.StreamSniffer, "end", fails)
    for data in (plain(PLAIN), STREAM_HEAD + chunk(STREAM) + LAST):
        async with rig(answering(data)) as it:
            answer = await it.post(CHAT)
            assert answer.partition(b"\r\n\r\n")[2] == data.partition(b"\r\n\r\n")[2]
            await it.quiet()
            assert it.reasons == [EndReason.FINISHED]
