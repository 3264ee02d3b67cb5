"""The answer's way back: from the engine's connection straight to the client's.

Law 5: bytes pass unchanged, and a stream that broke upstream breaks downstream. A broken answer is never
given the end that it did not have: the client's connection is reset (a plain close would look like a clean
end to an HTTP/1.0 client).

The answer is written to aiohttp's transport directly. ``Written`` tells aiohttp that nothing is left to do,
and ``writer.output_size`` that something was written, so that it never adds an answer of its own.
"""

import asyncio
import fcntl
import socket
import struct
import termios
from contextlib import suppress
from functools import lru_cache

from aiohttp import web

from kvctl.proxy import headers
from kvctl.proxy.errors import Answer
from kvctl.proxy.plainhead import PlainHead
from kvctl.proxy.response import Response
from kvctl.proxy.sniffer import media_type

_LAST_CHUNK = b"0\r\n\r\n"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_FLUSH_PATIENCE = 1.0  # seconds that relayed bytes get to leave before the connection is reset
_FLUSH_LOOK = 0.005
_NO_BODY = (204, 304)


class ClientStalledError(Exception):
    """The client did not take a byte for client_write_timeout."""


class Written(web.StreamResponse):
    """An answer that is already on the wire."""

    def __init__(self, status: int, *, keep_alive: bool) -> None:
        super().__init__(status=status)
        self._stays = keep_alive

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may carry another request."""
        return self._stays

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is left to write."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write."""


@lru_cache(maxsize=256)
def written(status: int, *, keep_alive: bool) -> Written:
    """The ``Written`` of a status; shared by all such answers, since it holds nothing of any of them."""
    return Written(status, keep_alive=keep_alive)


class Unwritten(Written):
    """One of kvctl's own answers, written when aiohttp asks for it (its error handler may not wait)."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status, keep_alive=False)
        self._answer = answer

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write it."""
        write_answer(request, self._answer, request_id=None, keep_alive=False)


def write_answer(
    request: web.BaseRequest, answer: Answer, *, request_id: str | None, keep_alive: bool | None = None
) -> Written:
    """Write one of kvctl's own answers, head and body at once."""
    closing = any(name.lower() == "connection" for name, _ in answer.headers)
    stays = bool(request.keep_alive) and not closing if keep_alive is None else keep_alive
    lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    if request_id is not None:
        lines.append((b"X-Request-Id", request_id.encode("latin-1", "replace")))
    lines.append((b"Content-Length", b"%d" % len(answer.body)))
    if not closing:
        lines += _connection(request, stays=stays)
    head = headers.serialise(_version(request), answer.status, headers.reason_of(answer.status), lines)
    _write(request, head if request.method == "HEAD" else head + answer.body)
    return written(answer.status, keep_alive=stays)


def write_to(transport: asyncio.Transport, answer: Answer) -> None:
    """Write one of kvctl's own answers where no request was read yet."""
    lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    lines.append((b"Content-Length", b"%d" % len(answer.body)))
    head = headers.serialise((1, 1), answer.status, headers.reason_of(answer.status), lines)
    transport.write(head + answer.body)


def _version(request: web.BaseRequest) -> tuple[int, int]:
    return (1, 1) if request.version >= (1, 1) else (1, 0)


def _connection(request: web.BaseRequest, *, stays: bool) -> list[tuple[bytes, bytes]]:
    """The Connection header, where the HTTP version's default does not apply."""
    if not stays:
        return [(b"Connection", b"close")]
    return [(b"Connection", b"keep-alive")] if request.version < (1, 1) else []


def _write(request: web.BaseRequest, data: bytes) -> None:
    transport = request.transport
    if transport is not None and not transport.is_closing():
        request.writer.output_size += len(data)
        transport.write(data)


class ClientStream:
    """Writes one answer of the engine to the client. ``patience``: seconds of client_write_timeout."""

    __slots__ = (
        "_blocked", "_chunked", "_held", "_patience", "_request", "_response", "client", "event_stream",
        "keep_alive", "stirred",
    )  # fmt: skip

    def __init__(
        self, request: web.BaseRequest, response: Response, request_id: str, patience: float
    ) -> None:
        self._request = request
        self.client = request.protocol
        self._response = response
        self._patience = patience
        self._blocked = False
        self.stirred = False  # set whenever more of the body is written; ``Heartbeat`` clears it
        bodyless = request.method == "HEAD" or response.status in _NO_BODY
        known = response.length is not None and not response.chunked
        self._chunked = not bodyless and not known and request.version >= (1, 1)
        self.keep_alive = bool(request.keep_alive) and (bodyless or known or self._chunked)
        self.event_stream = media_type(response.content_type) == b"text/event-stream"
        plain = response.plain
        changed = self.event_stream or not (known and self.keep_alive and request.version == (1, 1))
        if plain is None or changed:
            self._held = self._head(request_id, keep_length=known)
        else:
            self._held = _as_it_came(plain, request_id)

    def _head(self, request_id: str, *, keep_length: bool) -> bytes:
        response = self._response
        lines = headers.for_client(
            response.headers, request_id=request_id, keep_length=keep_length, event_stream=self.event_stream
        )
        if self._chunked:
            lines.append((b"Transfer-Encoding", b"chunked"))
        lines += _connection(self._request, stays=self.keep_alive)
        return headers.serialise(_version(self._request), response.status, response.reason, lines)

    @property
    def begun(self) -> bool:
        """Whether the client may have seen anything of the answer."""
        return not self._held

    def flush(self) -> None:
        """Send the head, which otherwise waits for the first bytes of the body."""
        if self._held:
            head, self._held = self._held, b""
            _write(self._request, head)

    def data(self, data: bytes, framed: bytes = b"") -> None:
        """More of the body; ``framed``: the same as whole chunks, where it came so."""
        if self._chunked:
            data = framed or b"%x\r\n%b\r\n" % (len(data), data)
        if not self._held:
            self.put(data)
            return
        data, self._held = self._held + data, b""
        _write(self._request, data)
        if self.client.writing_paused:
            self.hold_back()

    @property
    def takes_chunks(self) -> bool:
        """Whether the engine's chunks may be passed as they came, by ``put``."""
        return self._chunked and not self._held

    def put(self, data: bytes) -> None:
        """More of an answer that has begun. Stops reading from the engine where the client is slow."""
        transport = self.client.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)
            self.stirred = True
        if self.client.writing_paused:
            self.hold_back()

    def hold_back(self) -> None:
        """The client does not keep up: stop reading from the engine until it does."""
        if not self._blocked:
            self._blocked = True
            self._response.pause()
            self._response.nudge()

    def remark(self, comment: bytes) -> None:
        """Add ``comment`` to an event stream that goes on, as long as its client keeps up."""
        open_ended = self.event_stream and (self._chunked or not self.keep_alive)
        if open_ended and not (self._blocked or self._response.finished):
            self.data(comment)

    def finish(self) -> None:
        """The answer is whole."""
        self.flush()
        if self._chunked:
            _write(self._request, _LAST_CHUNK)

    @property
    def over(self) -> bool:
        """Whether the answer is over and no bytes wait for the client, so that ``follow`` is not needed."""
        return self._response.finished and not self.client.writing_paused

    async def follow(self) -> None:
        """Return when the answer is over and its bytes are on their way. Raises ClientStalledError."""
        response = self._response
        while not response.finished:
            await response.wait()
            if self._blocked:
                await self._drain()
                self._blocked = False
                response.resume()
        await self._drain()

    async def _drain(self) -> None:
        """Wait for a slow client, as long as it takes anything at all."""
        if not self._request.protocol.writing_paused:
            return
        waiting = self._waiting_bytes()
        # one task for the whole wait: after a cancelled drain aiohttp is left with a dead future
        drained = asyncio.ensure_future(self._request.writer.drain())
        drained.add_done_callback(_seen)
        try:
            while not (await asyncio.wait({drained}, timeout=self._patience))[0]:
                before, waiting = waiting, self._waiting_bytes()
                if waiting >= before:
                    raise ClientStalledError
        finally:
            drained.cancel()

    def _waiting_bytes(self) -> int:
        transport = self._request.transport
        return _unsent(transport) if transport is not None else 0

    async def sever(self, last_words: bytes = b"") -> None:
        """Break the client's connection off visibly, after ``last_words`` (an event) where they fit."""
        if last_words:
            self.data(last_words)
        await sever(self._request)


def _as_it_came(head: PlainHead, request_id: str) -> bytes:
    """The head as ``_head`` would write it where all lines stay and only the request's id may be added."""
    own = b"" if head.has_id else b"X-Request-Id: %b\r\n" % request_id.encode("ascii", "replace")
    return b"HTTP/1.1 %d %b\r\n%b%b\r\n" % (head.status, head.reason, head.lines, own)


def _seen(drained: asyncio.Task[None]) -> None:
    """Take note of a connection lost during the wait: aiohttp cancels the handler too, which is enough."""
    if not drained.cancelled():
        drained.exception()


async def sever(request: web.BaseRequest, patience: float = _FLUSH_PATIENCE) -> None:
    """Reset the client's connection, once what was written has left or ``patience`` seconds are over."""
    transport = request.transport
    if transport is None:
        return
    sock = transport.get_extra_info("socket")
    loop = asyncio.get_running_loop()
    until = loop.time() + patience
    # neither asyncio nor the kernel announces that the last byte was acknowledged: it has to be polled
    while _unsent(transport) and loop.time() < until and not transport.is_closing():  # noqa: ASYNC110
        await asyncio.sleep(_FLUSH_LOOK)
    with suppress(OSError):
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()


def _unsent(transport: asyncio.Transport) -> int:
    """Bytes that the peer has not acknowledged: in the transport's buffer and in the kernel's."""
    waiting = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX:
        return waiting
    try:
        return waiting + int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return waiting
