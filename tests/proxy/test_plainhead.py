"""Heads that are read in one step: what is told of an answer is what the parser would have told."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvctl.proxy import headers, relay
from kvctl.proxy.plainhead import plain_head
from kvctl.proxy.response import Response
from tests.effort import examples
from tests.proxy.ends import Taker, Wire

OK = b"HTTP/1.1 200 OK\r\n"


def told(response: Response, taker: Taker, wire: Wire) -> dict[str, Any]:
    """Everything that anybody may ask of an answer."""
    names = ("status", "reason", "headers", "length", "chunked", "content_type", "content_encoding")
    seen = {name: getattr(response, name) for name in names} if response.has_head else {}
    return {
        **seen,
        "has_head": response.has_head,
        "finished": response.finished,
        "error": type(response.error),
        "body": taker.body,
        "wire": wire.told,
    }


def played(pieces: list[bytes], *, closes: bool = False) -> dict[str, Any]:
    wire, taker = Wire(), Taker()
    response = Response(wire, head_only=False)
    for piece in pieces:
        if not response.finished:
            response.feed(piece)
    if closes and not response.finished:
        response.end_of_stream(None)
    response.attach(taker)
    return told(response, taker, wire)


def byte_by_byte(data: bytes, *, closes: bool = False) -> dict[str, Any]:
    """As the parser reads it: no head comes whole."""
    return played([data[at : at + 1] for at in range(len(data))], closes=closes)


def test_a_plain_head_is_passed_on_in_its_own_words() -> None:
    lines = b"Content-Length: 5\r\nX-Odd_Name: a  b: c\r\ncontent-TYPE: a/b; c=d\r\nx-request-ID: 7\r\n"
    head = plain_head(OK + lines + b"\r\nhello")
    assert head is not None
    assert head.size == len(OK + lines) + 2
    assert (head.lines, head.length, head.content_type, head.has_id) == (lines, 5, b"a/b; c=d", True)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\n",
        OK + b"\r\n",
        OK + b"Content-Type: a/b\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n",
        OK + b"Content-Length: 5, 5\r\n\r\n",
        OK + b"Content-Length: +5\r\n\r\n",
        OK + b"Content-Length: 5 \r\n\r\n",
        OK + b"Content-Length:5\r\n\r\n",
        OK + b"Content-Length : 5\r\n\r\n",
        OK + b"Content-Length:  5\r\n\r\n",
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Content-Length: 5\r\nConnection: close\r\n\r\n",
        OK + b"Content-Length: 5\r\nKeep-Alive: timeout=5\r\n\r\n",
        OK + b"Content-Length: 5\r\nUpgrade: h2c\r\n\r\n",
        OK + b"Content-Length: 5\r\nX: a\r\n b\r\n\r\n",
        OK + b"Content-Length: 5\nX: a\r\n\r\n",
        OK + b"Content-Length: 5\r\nX: a\rb\r\n\r\n",
        OK + b"Content-Length: 5\r\nX: a\x00b\r\n\r\n",
        OK + b"Content-Length: 5\r\nX: \r\n\r\n",
        OK + b"Content-Length: 5\r\nX: caf\xe9\r\n\r\n",
        OK + b"Content-Length: 5\r\n: x\r\n\r\n",
        OK + b"Content-Length: 5\r\nX Y: x\r\n\r\n",
        OK + b"Content-Length: 5\r\n",
        b"",
    ],
)
def test_anything_else_is_the_parsers(head: bytes) -> None:
    assert plain_head(head + (b"hello" if head.endswith(b"\r\n\r\n") else b"")) is None


LINES = st.lists(
    st.sampled_from(
        [
            b"Content-Length: 5\r\n",
            b"content-length: 0\r\n",
            b"Content-Length: 005\r\n",
            b"Content-Length: 5,5\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"transfer-encoding: Chunked\r\n",
            b"Transfer-Encoding: gzip\r\n",
            b"Content-Type: application/json\r\n",
            b"Content-Type: text/event-stream\r\n",
            b"Content-Encoding: gzip\r\n",
            b"X-Request-Id: 1\r\n",
            b"x-request-id: 2\r\n",
            b"Connection: close\r\n",
            b"Connection: keep-alive\r\n",
            b"Connection: upgrade\r\nUpgrade: x\r\n",
            b"X: a b\r\n",
            b"X: a \r\n",
            b"X:a\r\n",
            b"X: \r\n",
            b"X: a\n",
            b"X: a\x00\r\n",
            b"X: a\r\n folded\r\n",
            b"Date: Mon, 30 Nov 2026 08:47:30 GMT\r\n",
        ]
    ),
    max_size=4,
)
STARTS = st.sampled_from(
    [
        OK, OK, OK, OK,
        b"HTTP/1.1 429 Too Many Requests\r\n", b"HTTP/1.1 200 \r\n", b"HTTP/1.1 204 No Content\r\n",
        b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n", b"HTTP/1.1 999 X\r\n",
    ]
)  # fmt: skip
BODIES = st.sampled_from(
    [b"", b"hel", b"hello", b"hello, and more", b"5\r\nhello\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"0\r\n\r\n"]
)


@settings(max_examples=examples(500), deadline=None)
@given(STARTS, LINES, BODIES, st.lists(st.integers(0, 60), max_size=3), st.booleans())
@example(OK, [b"Transfer-Encoding: chunked\r\n"], b"5\r\nhello\r\n0\r\n\r\n", [], False)
@example(OK, [b"Content-Length: 5\r\n"], b"hello, and more", [2], False)
@example(OK, [b"Content-Length: 5\r\n"], b"hel", [], True)
def test_the_parser_would_have_told_the_same(
    start: bytes, lines: list[bytes], body: bytes, cuts: list[int], closes: bool
) -> None:
    """The head at once and the body in pieces, all at once, and byte by byte."""
    head = start + b"".join(lines) + b"\r\n"
    pieces, rest = list[bytes](), body
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    pieces = [piece for piece in (*pieces, rest) if piece]
    expected = byte_by_byte(head + body, closes=closes)
    assert _but_reuse(played([head, *pieces], closes=closes)) == _but_reuse(expected)
    assert _but_reuse(played([head + body], closes=closes)) == _but_reuse(expected)


@given(STARTS, LINES)
@example(OK, [b"Content-Length: 5\r\n", b"X-Request-Id: 1\r\n", b"x-request-id: 2\r\n"])
@example(OK, [b"Content-Length: 5\r\n"])
def test_a_head_that_is_passed_on_as_it_came_is_the_one_that_would_be_written(
    start: bytes, lines: list[bytes]
) -> None:
    head = plain_head(start + b"".join(lines) + b"\r\n")
    if head is not None and head.length is not None:
        kept = headers.for_client(head.headers, request_id="r", keep_length=True, event_stream=False)
        written = headers.serialise((1, 1), head.status, head.reason, kept)
        assert relay._as_it_came(head, "r") == written


def _but_reuse(seen: dict[str, Any]) -> dict[str, Any]:
    """Byte by byte, nobody sees in time that bytes follow a whole answer."""
    return {**seen, "wire": [word.partition(",")[0] for word in seen["wire"]]}


@pytest.mark.parametrize(("body", "reusable"), [(b"hello", True), (b"hello!", False)])
def test_bytes_beyond_the_answer_spoil_the_connection(body: bytes, reusable: bool) -> None:
    head = OK + b"Content-Length: 5\r\n\r\n"
    for pieces in ([head + body], [head, body], [head, body[:2], body[2:]]):
        seen = played(pieces)
        assert (seen["body"], seen["wire"]) == (b"hello", [f"released, reusable {reusable}"])


def test_after_chunks_in_their_plainest_form_the_parser_goes_on() -> None:
    head = OK + b"X: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    first, odd, last = b"5\r\nhello\r\n", b"05;x=y\r\nworld\r\n", b"0\r\nTrailer: 1\r\n\r\n"
    for pieces in ([head, first, odd, last], [head + first, odd + last], [head + odd + first + last]):
        seen = played(pieces)
        assert (seen["body"], seen["error"]) in [(b"helloworld", type(None)), (b"worldhello", type(None))]
        assert seen["headers"] == [(b"X", b"1"), (b"Transfer-Encoding", b"chunked")]
        assert seen["reason"] == b"OK"
        assert seen["wire"] == ["released, reusable True"]
