"""Odd HTTP from clients, byte by byte: what is served, what is refused, and that nothing slips past.

Every case is sent before a second, innocent request on the same connection. What is refused must close the
connection with one answer: were the two sides of a framing read differently, the rest would be a request of
somebody's choice (smuggling), and the engine would see it.
"""

import asyncio
import contextlib
import json

import pytest

from kvctl.core.outcomes import EndReason, ProxyFault
from kvctl.proxy import intake
from kvctl.proxy.seams import ProxyConfig
from tests.proxy.harness import (
    CHAT,
    CHAT_STREAM,
    LAST,
    PLAIN,
    STREAM_HEAD,
    Request,
    Rig,
    Script,
    Wire,
    chunk,
    event,
    eventually,
    get,
    plain,
    post,
    rig,
)

START = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: h\r\n"
KIND = b"Content-Type: application/json\r\n"
HEAD = START + HOST + KIND
LENGTH = b"Content-Length: %d\r\n" % len(CHAT)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BODY = LENGTH + b"\r\n" + CHAT
CHUNKS = chunk(CHAT) + LAST
SIZE = b"%x" % len(CHAT)
NEXT = b"GET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


def coded(value: bytes, body: bytes = CHUNKS) -> bytes:
    return HEAD + b"Transfer-Encoding: " + value + b"\r\n\r\n" + body


REFUSED = {
    "length and chunks": HEAD + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "chunks and length": HEAD + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "two lengths": HEAD + LENGTH + b"Content-Length: 3\r\n\r\n" + CHAT,
    "one length twice": HEAD + LENGTH + BODY,
    "a list of lengths": HEAD + b"Content-Length: %d, %d\r\n\r\n" % (len(CHAT), len(CHAT)) + CHAT,
    "length with a plus": HEAD + b"Content-Length: +%d\r\n\r\n" % len(CHAT) + CHAT,
    "length below zero": HEAD + b"Content-Length: -1\r\n\r\n" + CHAT,
    "length in hex": HEAD + b"Content-Length: 0x48\r\n\r\n" + CHAT,
    "length of nothing": HEAD + b"Content-Length: \r\n\r\n" + CHAT,
    "length as Python writes it": HEAD + b"Content-Length: 7_2\r\n\r\n" + CHAT,
    "a folded header": HEAD + b"X-A: b\r\n c\r\n" + BODY,
    "a folded coding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS,
    "bare LF throughout": (HEAD + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + CHAT,
    "one bare LF": HEAD + b"X-A: b\n" + BODY,
    "one bare CR": HEAD + b"X-A: b\rX-B: c\r\n" + BODY,
    "a null": HEAD + b"X-A: b\x00c\r\n" + BODY,
    "a space before the colon": HEAD + LENGTH.replace(b":", b" :") + b"\r\n" + CHAT,
    "a space in a name": HEAD + b"X A: b\r\n" + BODY,
    "no name": HEAD + b": b\r\n" + BODY,
    "coded besides": coded(b"gzip, chunked"),
    "coded unknown": coded(b"xchunked"),
    "coded as nothing": coded(b"identity", CHAT),
    "coded with a control character": coded(b"\x0bchunked"),
    "chunked twice": HEAD + CHUNKED + CHUNKED + b"\r\n" + CHUNKS,
    "chunked twice in one": coded(b"chunked, chunked"),
    "chunked, but not last": coded(b"chunked, gzip"),
    "a bare LF in a chunk's extension": coded(b"chunked", SIZE + b";a\nb\r\n" + CHAT + b"\r\n" + LAST),
    "a bare LF behind a chunk's size": coded(b"chunked", SIZE + b"\n" + CHAT + b"\r\n" + LAST),
    "a chunk longer than it says": coded(b"chunked", SIZE + b"\r\n" + CHAT + b"XX" + LAST),
    "a chunk's size as Python writes it": coded(b"chunked", b"0x" + SIZE + b"\r\n" + CHAT + b"\r\n" + LAST),
    "a chunk below zero": coded(b"chunked", b"-5\r\n" + CHAT + b"\r\n" + LAST),
    "a chunk of absurd size": coded(b"chunked", b"f" * 17 + b"\r\n" + CHAT + b"\r\n" + LAST),
    "blanks behind a chunk's size": coded(b"chunked", SIZE + b"  \r\n" + CHAT + b"\r\n" + LAST),
    "a trailer that is none": coded(b"chunked", chunk(CHAT) + b"0\r\nX T\r\n\r\n"),
    "a length in a trailer": coded(b"chunked", chunk(CHAT) + b"0\r\nContent-Length: 5\r\n\r\n"),
    "HTTP/1.2": HEAD.replace(b"1.1", b"1.2") + BODY,
    "HTTP/2 in HTTP/1's words": HEAD.replace(b"1.1", b"2.0") + BODY,
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": START + KIND + BODY,
    "two hosts": HEAD + b"Host: x\r\n" + BODY,
    "a tab in the request line": HEAD.replace(b"POST /", b"POST\t/") + BODY,
    "a method in lower case": HEAD.replace(b"POST", b"post") + BODY,
    "a method that is none": HEAD.replace(b"POST", b"P<ST") + BODY,
}

SERVED = {
    "a length": HEAD + BODY,
    "chunks": coded(b"chunked"),
    "chunks in capitals": coded(b"CHUNKED"),
    "chunks of one byte": coded(b"chunked", b"".join(chunk(bytes([b])) for b in CHAT) + LAST),
    "extensions of a chunk": coded(b"chunked", SIZE + b';a=b;c="d"\r\n' + CHAT + b"\r\n" + LAST),
    "leading noughts of a chunk's size": coded(b"chunked", b"000" + SIZE + b"\r\n" + CHAT + b"\r\n" + LAST),
    "a trailer": coded(b"chunked", chunk(CHAT) + b"0\r\nX-T: 1\r\n\r\n"),
    "empty lines before": b"\r\n\r\n" + HEAD + BODY,
    "the absolute form": HEAD.replace(b" /v1", b" http://elsewhere.example/v1") + BODY,
    "a header in UTF-8": HEAD + "X-A: é\r\n".encode() + BODY,
    "a header in Latin-1": HEAD + b"X-A: \xe9\r\n" + BODY,
    "an empty header": HEAD + b"X-A:\r\n" + BODY,
    "another expectation": HEAD + b"Expect: 200-ok\r\n" + BODY,
}


def engine(got: list[Request]) -> Script:
    async def script(wire: Wire) -> None:
        while True:
            got.append(await wire.request())
            await wire.send(plain(PLAIN))

    return script


async def whole(it: Rig, data: bytes) -> bytes:
    """Everything that comes until the connection is closed, gently or not."""
    wire, answer = await it.client(), b""
    with contextlib.suppress(ConnectionError):
        await wire.send(data)
        async with asyncio.timeout(20):
            while piece := await wire.reader.read(65536):
                answer += piece
    wire.close()
    return answer


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_what_is_ambiguous_is_refused_and_closes(data: bytes) -> None:
    got: list[Request] = []
    async with rig(engine(got)) as it:
        answer = await whole(it, data + NEXT)
        assert got == []
        assert ProxyFault.MALFORMED_HTTP in it.seen.faults
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split(b" ")[1]) in (400, 501, 505)
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["type"] == "BadRequestError"  # one answer, and nothing behind it


@pytest.mark.parametrize("data", SERVED.values(), ids=SERVED)
async def test_what_is_odd_but_clear_is_served_whole(data: bytes) -> None:
    got: list[Request] = []
    async with rig(engine(got)) as it:
        answer = await whole(it, data + NEXT)
    first, second = got
    assert first.line == b"POST /v1/chat/completions HTTP/1.1"
    assert first.body == CHAT
    assert first.values(b"content-length") == [b"%d" % len(CHAT)]
    assert not first.values(b"transfer-encoding")
    assert not first.values(b"trailer")
    assert second.line == b"GET /v1/models HTTP/1.1"
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_a_request_may_come_in_any_pieces(size: int) -> None:
    got: list[Request] = []
    async with rig(engine(got)) as it:
        wire = await it.client()
        await wire.send_split(coded(b"chunked") + NEXT, size)
        assert (await wire.reader.read()).count(b"HTTP/1.1 200 OK\r\n") == 2
        wire.close()
    assert [request.body for request in got] == [CHAT, b""]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"TRACE /v1/models HTTP/1.1", 405),
        (b"CONNECT h:443 HTTP/1.1", 404),
        (b"OPTIONS * HTTP/1.1", 404),
        (b"PUT /v1/chat/completions HTTP/1.1", 405),
        (b"GET /healthz HTTP/1.0", 200),
    ],
)
async def test_methods_that_a_proxy_could_mistake(request_line: bytes, status: int) -> None:
    got: list[Request] = []
    async with rig(engine(got)) as it:
        answer = await whole(it, request_line + b"\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert answer.split(b" ")[1] == b"%d" % status
        assert got == []


# --- HTTP/1.0 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False])
async def test_an_http_1_0_client_keeps_its_connection_only_where_it_asks(*, keep: bool) -> None:
    got: list[Request] = []
    old = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + (b"Connection: keep-alive\r\n" if keep else b"") + BODY
    async with rig(engine(got)) as it:
        answer = await whole(it, old + (NEXT if keep else b"\r\n"))  # old clients end a body with a line
    assert answer.startswith(b"HTTP/1.0 200 OK\r\n")
    assert len(got) == (2 if keep else 1)
    assert answer.partition(b"\r\n\r\n")[2].startswith(PLAIN)


async def test_an_http_1_0_stream_ends_with_its_connection() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD + chunk(event("a")) + chunk(event("b")) + LAST)
        await wire.gone()

    old = START.replace(b"1.1", b"1.0") + HOST + KIND + b"Connection: keep-alive\r\n"
    async with rig(script) as it:
        answer = await whole(it, old + b"Content-Length: %d\r\n\r\n" % len(CHAT_STREAM) + CHAT_STREAM)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK")
    assert b"connection: close" in head.lower()
    assert b"transfer-encoding" not in head.lower()
    assert body == event("a") + event("b")


# --- leaving and lingering --------------------------------------------------------------------------


async def test_half_closing_is_leaving() -> None:
    """A FIN from a client is how one that left looks; waiting for more proof would let its answer run on."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.gone()

    async with rig(script) as it:
        wire = await it.client()
        await wire.send(post())
        await eventually(lambda: len(it.gate.ledger) == 1)
        wire.writer.write_eof()
        assert await wire.reader.read() == b""
        await it.quiet()
        assert it.reasons == [EndReason.CLIENT_GONE]
        wire.close()


async def test_pipelined_requests_behind_a_broken_answer_are_not_answered() -> None:
    """The stream broke: what would follow on that connection could be read as a part of it."""
    got: list[Request] = []

    async def script(wire: Wire) -> None:
        got.append(await wire.request())
        await wire.send(STREAM_HEAD + chunk(event("a")))
        await asyncio.sleep(0.01)
        wire.reset()

    async with rig(script) as it:
        answer = await whole(it, post(CHAT_STREAM) + post() + NEXT)
    assert len(got) == 1
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_headers_that_trickle_are_not_waited_for() -> None:
    """Slow loris: a byte now and then does not renew the time."""
    async with rig(engine([]), config=ProxyConfig(header_timeout=0.2)) as it:
        wire = await it.client()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                for byte in HEAD * 100:
                    await wire.send(bytes([byte]))
                    await asyncio.sleep(0.02)
                    if wire.reader.at_eof():
                        break
        await eventually(lambda: ProxyFault.HEADER_TIMEOUT in it.seen.faults)
        wire.close()


async def test_bodies_that_trickle_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow loris: eight such bodies of 64 MiB would hold all the memory that bodies may take."""
    monkeypatch.setattr(intake, "_LEAST_RATE", 10_000)
    async with rig(engine([]), config=ProxyConfig(body_timeout=0.2)) as it:
        wire = await it.client()
        await wire.send(HEAD + b"Content-Length: 60000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                while not wire.reader.at_eof():
                    await wire.send(b" ")
                    await asyncio.sleep(0.02)
        await eventually(lambda: ProxyFault.BODY_TIMEOUT in it.seen.faults)
        await eventually(lambda: it.proxy.body_bytes == 0)
        wire.close()


async def test_get_with_a_body_is_one_request() -> None:
    got: list[Request] = []
    hidden = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"
    lines = (b"Content-Length: %d" % len(hidden),)
    async with rig(engine(got)) as it:
        await whole(it, get("/v1/models", *lines) + hidden)
    assert [request.line for request in got] == [b"GET /v1/models HTTP/1.1"]
    assert got[0].body == hidden
