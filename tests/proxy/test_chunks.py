"""Whole chunks go past the parser: nothing that is told of an answer may depend on that."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.proxy.chunks import payload_of
from kvctl.proxy.response import Response
from tests.proxy.ends import Taker, Wire

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"


def played(head: bytes, pieces: list[bytes]) -> tuple[Taker, list[str]]:
    wire, taker = Wire(), Taker()
    response = Response(wire, head_only=False)
    response.feed(head)
    response.attach(taker)
    for piece in pieces:
        if not response.finished:
            response.feed(piece)
    return taker, wire.told


def chunk(data: bytes, size: bytes | None = None) -> bytes:
    return b"%b\r\n%b\r\n" % (b"%x" % len(data) if size is None else size, data)


def test_whole_chunks_are_passed_on_as_they_came() -> None:
    whole = [chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n") + chunk(b"x" * 300)]
    taker, told = played(HEAD, [*whole, b"0\r\n\r\n"])
    assert taker.body == b"data: 1\n\ndata: 2\n\n" + b"x" * 300
    assert taker.framed == b"".join(whole)
    assert (taker.end, told) == ("None", ["released, reusable True"])


def test_after_a_chunk_in_parts_whole_ones_go_past_the_parser_again() -> None:
    first, second = chunk(b"in two parts"), chunk(b"whole")
    taker, _ = played(HEAD, [first[:5], first[5:], second, b"0\r\n\r\n"])
    assert taker.body == b"in two partswhole"
    assert taker.framed == second


def test_a_part_of_a_head_keeps_the_parser_in_charge() -> None:
    taker, _ = played(HEAD, [b"1", b"5\r\n" + b"5\r\nhello\r\n" + b"x" * 11 + b"\r\n", b"0\r\n\r\n"])
    assert taker.body == b"5\r\nhello\r\n" + b"x" * 11
    assert taker.framed == b""


@pytest.mark.parametrize(
    "data",
    [
        b"0\r\n\r\n",
        b"05\r\nhello\r\n",
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"1_0\r\n0123456789abcdef\r\n",
        b" 5\r\nhello\r\n",
        b"A\r\n0123456789\r\n",
        b"5;name=value\r\nhello\r\n",
        b"5\r\nhello\n\n",
        b"5\r\nhello\r",
        b"4\r\nhello\r\n",
        b"6\r\nhello\r\n",
        b"5\r\nhello\r\n5\r\nhel",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"\r\nhello\r\n",
        b"fffffffff\r\nhello\r\n",
        b"-5\r\nhello\r\n",
        b"1\r\na\r\n-6\r\n",
        b"5\r\nhello\r\n-4\r\n\r\n",
        b"hello",
        b"",
    ],
)
def test_what_is_no_plain_whole_chunk_is_left_to_the_parser(data: bytes) -> None:
    assert payload_of(data) == b""


sizes = st.sampled_from(
    [None, None, None, None, b"5", b"05", b"A", b"+5", b"0x5", b"5;a=b", b"-6", b"ffffffffffffffff1"]
)
chunks = st.builds(
    chunk, st.sampled_from([b"hello", b"0\r\n\r\n", b"\r\n", b"5\r\nhello\r\n", b"a" * 26]), sizes
)
ends = st.sampled_from([b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"", b"\r\n"])


@given(st.lists(chunks, max_size=5), ends, st.lists(st.integers(1, 40), max_size=12))
def test_where_the_bytes_are_cut_changes_nothing(body: list[bytes], end: bytes, cuts: list[int]) -> None:
    """Cut at the borders of chunks, at any place, and byte by byte, where only the parser reads."""
    stream, pieces = b"".join([*body, end]), list[bytes]()
    rest = stream
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    pieces.append(rest)
    single = [stream[place : place + 1] for place in range(len(stream))]
    takers = [played(HEAD, [p for p in parts if p]) for parts in (single, pieces, [*body, end])]
    assert len({(taker.body, taker.end.split(":")[0]) for taker, _ in takers}) == 1
    assert [told for _, told in takers[1:]] == [told for _, told in takers[:-1]]
