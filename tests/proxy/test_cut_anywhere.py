"""A stream on its way back, cut anywhere: whichever way each read takes, the same is passed and told at once.

The long way is the stream byte by byte, of which no read is a whole chunk.
"""

import asyncio
from typing import Any, cast
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvctl.control.gatekeeper import Gatekeeper, LeaseHandle
from kvctl.core.claim import Shape
from kvctl.core.events import Command, EngineDescribed, LeaseEnded
from kvctl.core.gate import Gate
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo
from kvctl.proxy.flow import Metered
from kvctl.proxy.relay import ClientStream
from kvctl.proxy.response import Response
from kvctl.proxy.sniffer import StreamSniffer
from tests.effort import examples
from tests.proxy.ends import Taker, Wire
from tests.proxy.harness import DONE, LAST, STREAM_HEAD, USAGE_EVENT, chunk, event

SHAPE = Shape(route="chat", model="m", prompts=(16,), asked_output=64)


class Client:
    """A client's connection that keeps what is written on it."""

    def __init__(self) -> None:
        self.transport: Client | None = self
        self.ssl_context = self.peername = self.sockname = None
        self.writing_paused = False
        self.got = b""
        self.writes = 0

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, _name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.got += data
        self.writes += 1


class Holding(Wire):
    """The engine's connection, whose reading is held back and let go."""

    def pause(self, response: Response) -> None:
        del response
        self.told.append("paused")


class Course:
    """One request whose answer comes as it is fed."""

    def __init__(self, lease: LeaseHandle, keeper: Gatekeeper) -> None:
        self.client, self.wire = Client(), Holding()
        client = cast("Any", self.client)
        writer = Mock(output_size=0)
        request = make_mocked_request("POST", "/", protocol=client, transport=client, writer=writer)
        self.response = Response(self.wire, head_only=False)
        self.wire.response = self.response
        self.wire.feed(STREAM_HEAD)
        self.stream = ClientStream(request, self.response, "id", 1.0)
        self.metered = Metered(self.response, self.stream, asyncio.get_running_loop().time, lease)
        self.response.attach(self.metered)
        self.stream.flush()
        self._keeper = keeper
        self._begins = len(self.client.got)

    def feed(self, data: bytes) -> None:
        if not self.response.finished:
            self.wire.feed(data)

    @property
    def passed(self) -> bytes:
        """What the client can read by now, without its framing."""
        return unframed(self.client.got[self._begins :])[0]

    @property
    def whole(self) -> bool:
        return unframed(self.client.got[self._begins :])[1]

    @property
    def tokens(self) -> float | None:
        """As its gate knows by now; None: the lease is over."""
        leases = list(self._keeper.gate.ledger)
        return leases[0].output_tokens if leases else None


def unframed(data: bytes) -> tuple[bytes, bool]:
    """The payload of chunks as a client would read them, and whether the last one came."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        if not int(size, 16):
            assert data == b"\r\n"
            return body, True
        body += data[: int(size, 16)]
        assert data[int(size, 16) :].startswith(b"\r\n")
        data = data[int(size, 16) + 2 :]
    return body, False


async def course(ended: list[Command]) -> Course:
    keeper = Gatekeeper(Gate(GateConfig()), asyncio.get_running_loop().time)
    keeper.observe(ended.append, LeaseEnded)
    keeper.handle(EngineDescribed(EngineInfo(models=("m",), context_tokens=4096)))
    lease = await keeper.admit("a", SHAPE)
    assert isinstance(lease, LeaseHandle)
    return Course(lease, keeper)


def byte_by_byte(wire: bytes) -> tuple[list[bytes], list[int]]:
    """After each byte: the body so far, and the tokens in it."""
    response, taker, sniffer = Response(Wire(), head_only=False), Taker(), StreamSniffer()
    response.feed(STREAM_HEAD)
    response.attach(taker)
    bodies, tokens = [b""], [0]
    for place in range(len(wire)):
        before = len(taker.body)
        if not response.finished:
            response.feed(wire[place : place + 1])
        sniffer.feed(taker.body[before:])
        bodies.append(taker.body)
        tokens.append(sniffer.found.tokens)
    return bodies, tokens


TEXTS = st.sampled_from(
    ["b", "", " c", "日本", "\u2028", '"', "\\", "\\n", "\x7f", "x" * 17, "y" * 300, "é" * 9]
)
EVENTS = st.builds(event, TEXTS, st.sampled_from([None, None, None, None, "stop"])) | st.sampled_from(
    [
        USAGE_EVENT,
        DONE,
        b": a comment\n\n",
        b'data: {"error":{"code":503,"message":"no"}}\n\n',
        event("b").replace(b"\n\n", b"\r\n\r\n"),
        event("b").replace(b'"index":0', b'"index":1'),
        event("b").replace(b'"logprobs":null', b'"token_ids":[7,8]'),
        event("b")[:-1],
        event("b")[:40],
        chunk(event("b")),  # a text that looks like a chunk
    ]
)
FRAMES = st.sampled_from([chunk, chunk, chunk, lambda data: b"%X;a=b\r\n%b\r\n" % (len(data), data)])
STREAMS = st.lists(st.tuples(EVENTS, FRAMES), max_size=8).map(
    lambda parts: [frame(part) for part, frame in parts]
)
STARTS = [chunk(event("a")), chunk(event("b"))]
INSIDE = chunk(event("b"))
HEAD_OF_ITS_OWN = len(b"%x\r\n" % len(INSIDE))


@given(STREAMS, st.lists(st.integers(1, 400), max_size=8), st.booleans(), st.sampled_from([LAST, LAST, b""]))
@example([chunk(event(str(number))) for number in range(5)], [], True, LAST)
@example([chunk(INSIDE)], [HEAD_OF_ITS_OWN, len(INSIDE)], False, LAST)
@example([chunk(event("b" + "x" * 256))], [1, len(INSIDE)], False, LAST)
@settings(max_examples=examples(150), deadline=None)
def test_whatever_a_read_brings_is_passed_and_told_at_once(
    parts: list[bytes], cuts: list[int], at_chunks: bool, last: bytes
) -> None:
    """Reads of whole chunks and reads of any size, in one stream."""
    chunks = [*STARTS, *parts]
    wire, pieces = b"".join([*chunks, last]), list[bytes](chunks if at_chunks else STARTS)
    rest = wire[sum(map(len, pieces)) :]
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    asyncio.run(_played(wire, [piece for piece in [*pieces, rest] if piece], whole=bool(last)))


async def _played(wire: bytes, pieces: list[bytes], *, whole: bool) -> None:
    bodies, tokens = byte_by_byte(wire)
    short, long = list[Command](), list[Command]()
    cut, reference = await course(short), await course(long)
    for place in range(len(wire)):
        reference.feed(wire[place : place + 1])
    at = 0
    for piece in pieces:
        cut.feed(piece)
        at += len(piece)
        assert cut.passed == bodies[at]
        assert cut.tokens in (tokens[at], None)
    for each in (cut, reference):
        if not whole:
            each.response.end_of_stream(None)
        assert each.whole == whole
    assert cut.metered.end == reference.metered.end
    assert cut.metered.output_tokens == reference.metered.output_tokens
    assert cut.metered.prompt_tokens == reference.metered.prompt_tokens
    assert [command.record for command in short if isinstance(command, LeaseEnded)] != []
    assert [_told(command) for command in short] == [_told(command) for command in long]
    assert cut.wire.told == reference.wire.told


def _told(command: Command) -> tuple[object, ...]:
    assert isinstance(command, LeaseEnded)
    record = command.record
    return record.reason, record.output_tokens, record.prompt_tokens


async def test_what_is_usual_takes_the_short_way() -> None:
    """Else nothing here would be played against anything."""
    it = await course([])
    for number in range(3):
        it.feed(chunk(event(str(number))))
    general, it.wire.response = it.wire.response, None
    assert it.wire.swift is not None
    notes = list[None]()
    it.wire.swift.noted = lambda: notes.append(None)
    it.feed(chunk(event("more")))
    assert len(notes) == 1
    assert it.passed == b"".join(event(text) for text in ("0", "1", "2", "more"))
    assert it.tokens == 4
    it.feed(chunk(event("", "stop")))
    assert it.passed.endswith(event("more"))
    it.wire.response = general
    it.feed(chunk(event("", "stop")))
    assert it.passed.endswith(event("", "stop"))


@pytest.mark.parametrize("text", ["b", "x" * 5000])
async def test_a_client_that_takes_no_more_holds_the_engine_back_at_once(text: str) -> None:
    """Whether the event is only counted, or read."""
    it = await course([])
    for _ in range(3):
        it.feed(chunk(event("a")))
    assert it.wire.told == []
    it.client.writing_paused = True
    it.feed(chunk(event(text)))
    it.feed(chunk(event(text)))
    assert it.wire.told == ["paused"]
    assert it.passed.endswith(event(text) * 2)


@pytest.mark.parametrize("text", ["b", "x" * 5000])
async def test_silence_is_broken_by_every_event(text: str) -> None:
    it = await course([])
    it.feed(chunk(event("a")))
    it.stream.stirred = False
    it.feed(chunk(event(text)))
    assert it.stream.stirred


async def test_a_defect_of_the_books_does_not_break_the_relay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = await course([])
    for text in "abc":
        it.feed(chunk(event(text)))
    assert it.tokens == 3

    def broken(_lease: LeaseHandle, _tokens: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(LeaseHandle, "progress", broken)
    for text in "def":
        it.feed(chunk(event(text)))
    it.feed(LAST)
    assert "relayed without being counted" in caplog.text
    assert it.passed == b"".join(map(event, "abcdef"))
    assert it.whole
    assert it.tokens is None


@pytest.mark.parametrize("before", [b"", chunk(event("b")), chunk(event("b")) * 2 + chunk(DONE)])
async def test_the_end_may_come_with_what_is_before_it(before: bytes) -> None:
    it = await course([])
    it.feed(chunk(event("a")))
    it.feed(before + LAST)
    assert it.whole
    assert it.wire.told == ["released, reusable True"]
