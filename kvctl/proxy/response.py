"""One answer of the engine: strict framing, and where its bytes go.

Law 5: bytes pass unchanged. An answer is whole only when its framing says so: a declared length reached,
the last chunk seen, or, where the engine announced neither, the connection closed cleanly. Everything else
is an error, never an end.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from kvctl.proxy.answer_ends import (
    BrokenError,
    ConnectError,
    Sink,
    Swift,
    UpstreamError,
    UpstreamTimeoutError,
)
from kvctl.proxy.chunks import payload_of
from kvctl.proxy.headers import Headers
from kvctl.proxy.plainhead import PlainHead, plain_head

__all__ = [
    "BrokenError",
    "Carrier",
    "ConnectError",
    "Headers",
    "Response",
    "Sink",
    "UpstreamError",
    "UpstreamTimeoutError",
]

_LAST_CHUNK = b"0\r\n\r\n"
_MAX_HEAD = 256 * 1024  # bytes of status line and headers
_EARLY_LIMIT = 256 * 1024  # body bytes held before anybody takes them


class Carrier(Protocol):
    """The connection that an answer arrives on."""

    def pause(self, response: "Response") -> None:
        """Stop reading, if ``response`` is the current answer."""

    def resume(self, response: "Response") -> None:
        """Read on."""

    def release(self, response: "Response") -> None:
        """``response`` is over."""

    def unblock_writer(self) -> None:
        """The answer began: wake whoever still writes the request."""

    def divert(self, response: "Response", swift: Swift) -> None:
        """Give what comes to ``swift`` first, as long as ``response`` is the current answer."""

    def abort(self) -> None:
        """Close at once."""


class Response:
    """One answer of the engine, and the parser's callbacks for it.

    A parser is made only for what is not in its plainest form; it is then fed the head again.
    """

    __slots__ = (
        "_coded", "_complete", "_connection", "_early", "_early_size", "_framed", "_head_only", "_head_size",
        "_interim", "_keep", "_left", "_nudged", "_parser", "_pieces", "_read_head", "_sink", "_waiter",
        "answered", "between", "chunked", "content_encoding", "content_type", "error", "finished",
        "has_head", "headers", "length", "plain", "reason", "status",
    )  # fmt: skip

    def __init__(self, connection: Carrier, *, head_only: bool) -> None:
        self._connection = connection
        self._head_only = head_only
        self._parser: HttpResponseParser | None = None
        self._read_head = b""  # a head that the parser has not seen
        self._left = 0  # bytes of a plainly framed body that are still to come
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._early: list[bytes] = []
        self._early_size = self._head_size = 0
        self._coded = self._complete = self._framed = self._interim = self._keep = self._nudged = False
        self.between = False  # a chunk may begin here
        self.plain: PlainHead | None = None  # the head, where it is plain and nothing was added to it
        self.answered = False  # any byte came
        self.has_head = self.finished = False
        self.error: UpstreamError | None = None
        self.status = 0
        self.reason = b""
        self.headers: Headers = []
        self.length: int | None = None  # the declared Content-Length
        self.chunked = False
        self.content_type = self.content_encoding = b""  # as sent; the last of several

    # --- for the user ---

    def attach(self, sink: Sink) -> None:
        """Give the body to ``sink`` from now on, and what came before at once."""
        self._sink = sink
        early, self._early = self._early, []
        if early:
            sink.data(early[0] if len(early) == 1 else b"".join(early))
        if self.finished:
            sink.finished(self.error)
        elif self._early_size > _EARLY_LIMIT:
            self.resume()
        self._early_size = 0

    async def wait(self) -> None:
        """Return when the answer is over, or at ``nudge``."""
        while not (self.finished or self._nudged):
            await self._wait()
        self._nudged = False

    async def wait_head(self) -> None:
        """Return when status and headers have come. Raises UpstreamError if they never do."""
        while not (self.finished or self.has_head):
            await self._wait()
        if not self.has_head:
            raise self.error or BrokenError("no answer")

    async def peek(self, enough: Callable[[bytes], bool]) -> bytes:
        """The body's first bytes, once they are ``enough`` or the answer is over. They stay in the body."""
        while not (self.finished or enough(b"".join(self._early))):
            await self._wait()
        return b"".join(self._early)

    def add(self, more: Headers) -> None:
        """Add headers of kvctl's own behind the engine's."""
        self.headers += more
        self.plain = None

    def nudge(self) -> None:
        """Let ``wait`` return once."""
        self._nudged = True
        self._wake()

    def pause(self) -> None:
        """Stop reading from the engine."""
        self._connection.pause(self)

    def resume(self) -> None:
        """Read on."""
        self._connection.resume(self)

    def divert(self, swift: Swift) -> None:
        """Let ``swift`` take what it can until the answer is over; ``between``: a chunk may begin now."""
        self._connection.divert(self, swift)

    def abort(self) -> None:
        """Give up the rest: close the connection at once. Nothing reaches the sink after this."""
        self._sink = None
        if not self.finished:
            self._connection.abort()
            self.finish(BrokenError("aborted"))

    # --- for the connection ---

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request: the answer ended cleanly and said keep-alive."""
        return self._keep and self.error is None

    def feed(self, data: bytes) -> None:
        """Bytes came."""
        if self.between:
            if payload := payload_of(data):
                self._take_chunks(payload, data)
                return
            if data.endswith(_LAST_CHUNK) and self._take_last(data[: -len(_LAST_CHUNK)]):
                return
        elif self._left:
            self._take_rest(data)
            return
        elif not self.answered and not self._head_only and (head := plain_head(data)) is not None:
            self._begin(head, data)
            return
        self._feed_parser(data)

    def _begin(self, head: PlainHead, data: bytes) -> None:
        """Take a plain head, and what came with it."""
        self.answered = self.has_head = self._framed = self._keep = True
        self.plain = head
        size, self.status, self.reason, self.headers, _, self.length, *types, _ = head
        self.content_type, self.content_encoding = types
        self._connection.unblock_writer()
        rest = data[size:]
        if self.length is not None:
            self._left = self.length
            if rest or not self.length:
                self._take_rest(rest)
        else:
            self.chunked = self.between = True
            self._read_head = data[:size]
            if rest:
                self.feed(rest)
        self._wake()

    def _take_chunks(self, payload: bytes, data: bytes) -> None:
        """Take whole chunks, as they came, and their ``payload``."""
        if self._sink is not None:
            self._sink.data(payload, data)
        else:
            self._keep_early(payload)

    def _take_last(self, before: bytes) -> bool:
        """Take the last chunk, alone or behind whole ones; False: the bytes before it are something else."""
        payload = payload_of(before)
        if before and not payload:
            return False
        if payload:
            self._take_chunks(payload, before)
        self.finish(None)
        return True

    def _take_rest(self, data: bytes) -> None:
        """More of a body whose length was declared."""
        if len(data) > self._left:  # bytes beyond the answer: they belong to nothing
            data, self._keep = data[: self._left], False
        self._left -= len(data)
        if data:
            if self._sink is not None:
                self._sink.data(data)
            else:
                self._keep_early(data)
        if not self._left:
            self.finish(None)

    def _feed_parser(self, data: bytes) -> None:
        self.answered = True
        size = len(data)
        error = self._parse(data)
        if self.between and not data.endswith(b"\r\n"):
            self.between = False  # a part of the next chunk's head is in the parser
        pieces = self._pieces
        if self._coded:
            self._complete, pieces = False, []
            error = BrokenError("the engine's answer has a transfer coding besides chunked")
        if pieces:
            self._pieces = []
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if self._sink is not None:
                self._sink.data(data)
            else:
                self._keep_early(data)
        if self._complete:
            self.finish(None)
        elif error is not None:
            self.finish(error)
            self._connection.abort()
        elif not self.has_head:
            self._bound_head(size)

    def end_of_stream(self, cause: Exception | None) -> None:
        """The engine closed: this ends the answer only if it was framed "until close" and closed cleanly."""
        if cause is None and self.has_head and not self._framed:
            self.finish(None)
        else:
            word = "was reset" if cause is not None else "closed"
            when = "in the middle of the answer" if self.has_head else "before it answered"
            self.finish(BrokenError(f"the engine's connection {word} {when}"))

    def finish(self, error: UpstreamError | None) -> None:
        """The answer is over. Only the first call counts."""
        if self.finished:
            return
        self.finished = True
        self.error = error
        self._parser = None  # it refers to this response, a cycle that only the garbage collector would break
        self._connection.release(self)
        self._wake()
        if self._sink is not None:
            self._sink.finished(error)

    # --- the parser's callbacks ---

    def on_message_begin(self) -> None:
        """A message begins; behind a whole answer, the connection is spoilt."""
        if self._complete:  # bytes beyond the answer: they belong to nothing
            self._keep = False

    def on_status(self, reason: bytes) -> None:
        """The reason phrase, or a part of it."""
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer (not passed on)."""
        if not self.has_head and not self._complete:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is here; 1xx heads are only announcements of it."""
        if self._complete:
            return
        status = self._the_parser().get_status_code()
        if 100 <= status < 200 and status != 101:
            self._interim = True
            return
        self.status = status
        self.has_head = True
        self._read_framing()
        self._connection.unblock_writer()
        self._wake()

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self.between = False

    def on_chunk_complete(self) -> None:
        """A chunk is over."""
        self.between = True

    def on_body(self, data: bytes) -> None:
        """A part of the body, without its framing."""
        if self._complete:
            self._keep = False
        else:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """The body is whole."""
        if self._interim:
            self._interim = False
            self.headers.clear()
            self.reason = b""
        else:
            self._complete = True

    # --- inside ---

    def _parse(self, data: bytes) -> UpstreamError | None:
        try:
            self._the_parser().feed_data(data)
        except HttpParserUpgrade:
            self._complete = self.has_head = False
            return BrokenError("the engine switched protocols unasked")
        except HttpParserError as error:
            self._keep = False
            return BrokenError(f"the engine's answer is not HTTP: {error}")
        return None

    def _the_parser(self) -> HttpResponseParser:
        if self._parser is None:
            self._parser = HttpResponseParser(self)
            if self._read_head:
                head, self._read_head, self.reason = self._read_head, b"", b""
                self._parser.feed_data(head)
        return self._parser

    def _read_framing(self) -> None:
        for name, value in self.headers:
            lower = name.lower()
            if lower == b"content-length":
                self.length = int(value)  # the parser let only digits through
            elif lower == b"transfer-encoding":
                self.chunked = not self._coded and value.strip().lower() == b"chunked"
                self._coded = self._coded or not self.chunked  # a hop-by-hop coding, which would be lost here
            elif lower == b"content-type":
                self.content_type = value
            elif lower == b"content-encoding":
                self.content_encoding = value
        bodyless = self._head_only or self.status in (204, 304)
        self.between = self.chunked and not bodyless
        self._framed = bodyless or self.chunked or self.length is not None
        self._keep = self._framed and bool(self._the_parser().should_keep_alive())
        if bodyless:
            self._complete = True
            # if the engine sends a body all the same, its bytes would run into the next answer
            self._keep = self._keep and not self.chunked and not (self._head_only and self.length)

    def _bound_head(self, more: int) -> None:
        self._head_size += more
        if self._head_size > _MAX_HEAD:
            self.finish(BrokenError("the engine's headers are too large"))
            self._connection.abort()

    def _keep_early(self, data: bytes) -> None:
        self._early.append(data)
        self._early_size += len(data)
        self._wake()
        if self._early_size > _EARLY_LIMIT:
            self.pause()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
