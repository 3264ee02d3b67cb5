"""kvctl against independent views of the same bytes: the engine's answer, its JSON parser, its router."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from kvctl.core.outcomes import EndReason
from kvctl.engines.base import Treatment
from kvctl.engines.vllm_routes import ROUTES
from kvctl.proxy.jsonbody import DECIDING, read_object
from kvctl.proxy.limits import LARGEST, BadRequest, Fields
from kvctl.proxy.routes import Action, Router
from tests.effort import examples
from tests.proxy.harness import CHAT, CHAT_STREAM, DONE, LAST, Wire, chunk, event, post, rig

FUZZ = settings(max_examples=examples(120), deadline=None)

# --- the relay against what the engine sent ---------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What the engine does: ``cut`` bytes of its answer, in ``pieces``, then it ends so."""

    body: bytes
    framing: str  # "length", "chunks", "close"
    kind: str
    chunks: tuple[int, ...]
    piece: int
    cut: int | None
    end: str  # "close", "reset"

    @property
    def wire(self) -> bytes:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: " + self.kind.encode() + b"\r\n"
        if self.framing == "length":
            return head + b"content-length: %d\r\n\r\n" % len(self.body) + self.body
        if self.framing == "close":
            return head + b"\r\n" + self.body
        return head + b"transfer-encoding: chunked\r\n\r\n" + b"".join(map(chunk, self.split())) + LAST

    def split(self) -> Iterator[bytes]:
        at = 0
        for size in self.chunks:
            if at < len(self.body):
                yield self.body[at : at + size]
                at += size
        if at < len(self.body):
            yield self.body[at:]

    @property
    def sent(self) -> bytes:
        return self.wire if self.cut is None else self.wire[: self.cut % len(self.wire)]

    @property
    def whole(self) -> bool:
        """Whether the engine's own framing says so."""
        if self.framing == "close":
            return self.end == "close" and b"\r\n\r\n" in self.sent
        return self.sent == self.wire


EVENTS = st.lists(
    st.sampled_from([event("a"), event("é世"), b": note\n\n", b"data: x\r\n\r\n", b"data: [1]\n\n", DONE]),
    max_size=6,
).map(b"".join)
ANSWERS = st.builds(
    Answer,
    body=EVENTS | st.binary(max_size=300) | st.binary(min_size=1, max_size=2).map(lambda b: b * 40_000),
    framing=st.sampled_from(["length", "chunks", "close"]),
    kind=st.sampled_from(["text/event-stream", "application/json", "text/plain"]),
    chunks=st.lists(st.integers(1, 500), max_size=6).map(tuple),
    piece=st.sampled_from([1, 2, 13, 100_000]),
    cut=st.none() | st.integers(0, 100_000),
    end=st.sampled_from(["close", "reset"]),
)


@dataclass(frozen=True)
class Seen:
    """What a client read: status, body without its framing, and whether that says it is whole."""

    status: int
    body: bytes
    whole: bool


def read_strictly(answer: bytes, *, reset: bool) -> Seen:
    """A client's reading, by the letter; None of it is taken from kvctl."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
    if re.search(rb"\r\ntransfer-encoding: chunked", head, re.IGNORECASE):
        body = b""
        while (line := rest.partition(b"\r\n"))[1]:
            size = int(line[0], 16)
            piece, rest = line[2][:size], line[2][size:]
            body += piece
            if not size:
                return Seen(status, body, rest == b"\r\n")
            if len(piece) < size or not rest.startswith(b"\r\n"):
                break
            rest = rest[2:]
        return Seen(status, body, whole=False)
    if length is not None:
        return Seen(status, rest, len(rest) == int(length[1]))
    return Seen(status, rest, not reset)


class Engine:
    """Gives the next answer that it was told of."""

    def __init__(self) -> None:
        self.next: Answer | None = None

    async def __call__(self, wire: Wire) -> None:
        while True:
            await wire.request()
            answer = self.next
            if answer is None:
                raise AssertionError("nobody asked for this")
            piece = answer.piece if len(answer.sent) < 2000 else 100_000
            await wire.send_split(answer.sent, piece)
            if answer.end == "reset" and answer.sent != answer.wire:
                await asyncio.sleep(0.005)  # a reset throws away what was not read yet
                wire.reset()
                return
            if answer.sent != answer.wire or answer.framing == "close":
                if answer.end == "reset":
                    await asyncio.sleep(0.005)
                    wire.reset()
                return


async def _heard(port: int, request: bytes) -> tuple[bytes, bool]:
    """All bytes until the end, and whether that was a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(request)
    heard, reset = b"", False
    try:
        async with asyncio.timeout(30):
            while piece := await reader.read(1 << 20):
                heard += piece
    except ConnectionError:
        reset = True
    writer.close()
    return heard, reset


def test_the_client_reads_what_the_engine_sent_and_no_end_that_it_did_not_have() -> None:
    """B06, B09: any body, framing, split and fault, to HTTP/1.1 and HTTP/1.0 clients."""
    engine = Engine()
    with asyncio.Runner() as runner:
        opened = rig(engine)
        it = runner.run(opened.__aenter__())

        @given(answer=ANSWERS, old=st.booleans(), stream=st.booleans())
        @FUZZ
        def check(answer: Answer, *, old: bool, stream: bool) -> None:
            engine.next = answer
            request = post(CHAT_STREAM if stream else CHAT, "/v1/chat/completions", b"Connection: close")
            if old:
                request = request.replace(b"HTTP/1.1", b"HTTP/1.0", 1)
            heard, reset = runner.run(_heard(it.port, request))
            runner.run(it.quiet())
            _judge(answer, heard, reset=reset)
            assert (it.reasons[-1] is EndReason.ENGINE_ERROR) or answer.whole

        try:
            check()
        finally:
            runner.run(opened.__aexit__(None, None, None))


def _judge(answer: Answer, heard: bytes, *, reset: bool) -> None:
    if not heard:
        assert reset
        assert not answer.whole
        return
    seen = read_strictly(heard, reset=reset)
    if answer.whole:
        sent = answer.sent.partition(b"\r\n\r\n")[2] if answer.framing == "close" else answer.body
        assert seen == Seen(200, sent, whole=True)
        return
    if seen.status == 502:
        assert b"\r\n\r\n" not in answer.sent or not reset
        return
    assert reset
    assert not (seen.whole and seen.body != answer.body)
    body, _, word = seen.body.partition(b'\n\ndata: {"error"')  # set apart by empty lines, which are no event
    assert answer.body.startswith(body)
    assert not word or answer.kind == "text/event-stream"


# --- the body's parser against the engine's ---------------------------------------------------------


class EngineBody(BaseModel):
    """The limits as the engine's own model has them."""

    max_tokens: int | None = None
    n: int | None = 1


KEYS = st.sampled_from(["max_tokens", "n", "model", "messages", "x", "max\\u005ftokens", "text", "\\u006e"])
SCALARS = st.sampled_from(
    [
        *("1", "-1", "0", "7.0", "7.5", "1e2", "1E400", "-0", "NaN", "Infinity", "-Infinity", "null", "true"),
        *("9223372036854775808", "1" + "0" * 40, "9" * 5000, '"7"', '" 7 "', '"1_000"', '"1e2"', '"\\ud800"'),
        *('""', "[]", "{}", '{"n":2}', "[1,2", "+1", "01", ".5", "1.", "'7'", "tru", '"a\nb"', "1 /* x */"),
    ]
)
MEMBERS = st.lists(st.tuples(KEYS, SCALARS), max_size=5)
ENCODINGS = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1"])


def written(members: list[tuple[str, str]], gap: str, encoding: str, cut: int | None) -> bytes:
    text = "{" + ",".join(f'{gap}"{key}"{gap}:{gap}{value}{gap}' for key, value in members) + "}"
    data = text.encode(encoding, "replace")
    return data if cut is None else data[: cut % (len(data) + 1)]


@given(
    members=MEMBERS,
    gap=st.sampled_from(["", " ", "\n\t", "\x0b"]),
    encoding=ENCODINGS,
    cut=st.none() | st.integers(0, 60),
)
@example(members=[("max_tokens", "5"), ("max\\u005ftokens", "900000")], gap="", encoding="utf-8", cut=None)
@settings(FUZZ, max_examples=examples(600))
def test_bodies_are_read_as_the_engine_reads_them(
    members: list[tuple[str, str]], gap: str, encoding: str, cut: int | None
) -> None:
    body = written(members, gap, encoding, cut)
    pairs: list[tuple[str, Any]] = []

    def keep(found: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs[:] = found
        return dict(found)

    read = read_object(body)
    try:
        theirs = json.loads(body, object_pairs_hook=keep)
    except (ValueError, RecursionError):
        assert isinstance(read, BadRequest)
        return
    keys = [key for key, _ in pairs]
    if any(keys.count(key) > 1 for key in DECIDING):
        assert isinstance(read, BadRequest)
        return
    assert isinstance(read, dict)
    assert repr(_rounded(read)) == repr(_rounded(theirs))  # NaN is not equal to itself
    _judge_limits(read, theirs)


def _rounded(value: Any) -> Any:
    """Integers past 2**64 may be floats here: they are held to 2**53 either way."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**63:
        return float(value) if abs(value) < 10**300 else "absurd"
    if isinstance(value, float) and abs(value) >= 1e300:
        return "absurd"
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _judge_limits(read: dict[str, Any], theirs: dict[str, Any]) -> None:
    fields = Fields(read)
    ours = fields.integer("max_tokens"), fields.integer("n")
    try:
        model = EngineBody.model_validate(theirs)
    except ValidationError:
        assert fields.wrongs
        return
    assert not fields.wrongs
    expected = [
        None if x is None else min(x, LARGEST) for x in (model.max_tokens, theirs.get("n") and model.n)
    ]
    assert [ours[0], ours[1] or None] == [expected[0], expected[1] or None]


# --- the route matcher against the engine's router --------------------------------------------------

ROUTER = Router(ROUTES)
METERED = {route.path for route in ROUTES if route.treatment is Treatment.GENERATE}


def as_the_engine_sees(target: str) -> str:
    """uvicorn undoes the percent-encoding of the path once, and starlette compares what comes out."""
    return unquote(target.partition("?")[0].partition("#")[0])


def aiohttp_routes() -> web.UrlDispatcher:
    table = web.UrlDispatcher()

    async def nothing(_: web.Request) -> web.Response:
        return web.Response()

    for path in sorted({route.path for route in ROUTES if not route.path.endswith("*")}):
        table.add_route("*", path, nothing, name=re.sub(r"\W", "_", "r" + path).strip("_") or "root")
    return table


DISPATCHER = aiohttp_routes()
SEGMENTS = st.sampled_from(
    ["v1", "chat", "completions", "models", "sleep", "..", ".", "", "%2e%2e", "%2E", "%2f", "%63hat",
     "%2563hat", "V1", "chat;a", "completions%20", "completions%00", "é", "%C3%A9", "%ff", "tokenize"]
)  # fmt: skip
TARGETS = st.builds(
    lambda parts, tail: "/" + "/".join(parts) + tail,
    st.lists(SEGMENTS, max_size=6),
    st.sampled_from(["", "/", "?x=/v1/chat/completions", "#/v1/models", "?", "//"]),
)


@given(target=TARGETS, method=st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "DELETE"]))
@example(target="/v1/chat/completions", method="POST")
@settings(FUZZ, max_examples=examples(500))
def test_what_is_matched_is_what_the_engine_will_match(target: str, method: str) -> None:
    """The forwarded target leads the engine to the very route that was matched, and none that is metered
    is reached unmetered."""
    match = ROUTER.match(method, target)
    if match.action in (Action.PASS, Action.GENERATE):
        forwarded = match.target.decode("ascii")
        assert as_the_engine_sees(forwarded) == match.path
        assert ".." not in match.path.split("/")
        if match.path in METERED and method == "POST":
            assert match.action is Action.GENERATE
        info = asyncio.run(DISPATCHER.resolve(make_mocked_request(method, forwarded)))
        resource = info.route.resource
        if resource is not None and match.route is not None and not match.route.path.endswith("*"):
            assert resource.canonical == match.route.path == match.path
    elif match.action is Action.NOT_FOUND and method == "POST":
        assert as_the_engine_sees(target) not in METERED
