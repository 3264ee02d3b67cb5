"""One connection to the engine, an asyncio protocol of kvctl's own that carries one request at a time.

Back-pressure goes both ways: reading from the engine can be paused, and request bodies are handed to the
socket in slices that wait for it. Aborting closes the connection at once, which is how an engine learns
that nobody waits for the answer any more.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from kvctl.proxy.answer_ends import Swift
from kvctl.proxy.response import BrokenError, Response, UpstreamTimeoutError

_SLICE = 256 * 1024  # bytes of a request body per write
_TCP_CLOSE = 7  # Linux: the connection was reset; after a mere FIN it is CLOSE_WAIT
_RESET_LOOKS = (0.0, 0.002, 0.01, 0.04)  # seconds between looks for the reset that follows a FIN


class Connection(asyncio.Protocol):
    """A connection to the engine that carries one request at a time.

    ``on_release(connection, reusable)`` is called once per answer, when it is over. ``read_timeout`` bounds
    the silence while an answer is awaited, in seconds; None: no bound.
    """

    def __init__(
        self, on_release: Callable[["Connection", bool], None], read_timeout: float | None = None
    ) -> None:
        self._on_release = on_release
        self._read_timeout = read_timeout
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._writable: asyncio.Future[None] | None = None
        self._write_paused = self._read_paused = self._lost = self._reset = self._sent = False
        self._diverted = False
        self._last_read = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> bool:
        """Whether a request may be written on it, as far as is known."""
        return self._transport is not None and not self._lost and not self._transport.is_closing()

    def start(self, *, head_only: bool) -> Response:
        """Begin an exchange. ``head_only``: the answer to a HEAD request has no body."""
        self._response = Response(self, head_only=head_only)
        self._sent = False
        if self._read_timeout is not None:
            self._last_read = self._loop.time()
            self._timer = self._loop.call_later(self._read_timeout, self._check_silence)
        return self._response

    def send(self, head: bytes, body: bytes | None) -> bool:
        """Write a request; False: only its head was written, and ``send_body`` must follow."""
        transport = self._transport
        if transport is None or self._response is None:
            raise BrokenError("the connection is closed")
        self._sent = body is None or len(body) <= _SLICE
        transport.write(head + body if body and self._sent else head)
        return self._sent

    async def send_body(self, body: bytes) -> None:
        """Write a large body; stops early when the engine answers before it has read all of it."""
        transport, response = self._transport, self._response
        if transport is None or response is None:
            raise BrokenError("the connection is closed")
        view = memoryview(body)
        for start in range(0, len(view), _SLICE):
            if self._write_paused:
                await self._drained(response)
            if response.has_head or response.finished:
                return  # the rest is never sent, so no other request may follow on this connection
            transport.write(view[start : start + _SLICE])
        self._sent = True

    async def was_reset(self) -> bool:
        """Whether the peer's kernel threw away what was sent: proof that the engine did not read it all.

        A FIN alone is no proof (an engine that read the request and died sends one too). The reset that
        unread bytes provoke follows the FIN within a round trip.
        """
        for pause in _RESET_LOOKS:
            await asyncio.sleep(pause)
            if self._reset or self._tcp_state() == _TCP_CLOSE:
                return True
        return False

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self, response: Response) -> None:
        """Stop reading, if ``response`` is the current answer."""
        if response is self._response and not self._read_paused and self.alive and self._transport:
            self._read_paused = True
            self._transport.pause_reading()

    def resume(self, response: Response) -> None:
        """Read on."""
        if response is self._response and self._read_paused and self.alive and self._transport:
            self._read_paused = False
            self._last_read = self._loop.time()
            self._transport.resume_reading()

    def divert(self, response: Response, swift: Swift) -> None:
        """Give what comes to ``swift`` first, as long as ``response`` is the current answer."""
        if response is self._response and self.alive and self._transport:
            swift.behind, swift.noted = self, None if self._timer is None else self._note_read
            self._diverted = True
            self._transport.set_protocol(swift)

    def release(self, response: Response) -> None:
        """``response`` is over: give the connection back, or close it."""
        if response is not self._response:
            return
        if self._diverted and self._transport is not None:
            self._transport.set_protocol(self)
        self._diverted = False
        if self._read_paused:
            self.resume(response)
        self._response = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.unblock_writer()
        reusable = response.reusable and self.alive and self._sent
        if not reusable and response.answered:
            self.abort()
        self._on_release(self, reusable)

    # --- asyncio's callbacks ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._response is None:  # the engine speaks out of turn: nothing it says can be trusted
            self.abort()
            return
        if self._timer is not None:
            self._note_read()
        self._response.feed(data)

    def eof_received(self) -> bool:
        """The engine closed its side; True keeps ours open."""
        response = self._response
        self._lost = True
        if response is None:
            return False
        unanswered = not response.answered
        response.end_of_stream(None)
        # left open while the reset behind the FIN is looked for; a TLS transport cannot be
        return unanswered and self._transport is not None and not self._transport.get_extra_info("sslcontext")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._lost = True
        self._reset = isinstance(exc, ConnectionResetError | BrokenPipeError)
        self._transport = None
        self.unblock_writer()
        if self._response is not None:
            self._response.end_of_stream(exc or ConnectionError("lost"))

    def pause_writing(self) -> None:
        """The socket takes no more of the request."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """The socket takes more."""
        self._write_paused = False
        self.unblock_writer()

    # --- inside ---

    async def _drained(self, response: Response) -> None:
        while self._write_paused and not response.has_head and not response.finished:
            self._writable = self._loop.create_future()
            try:
                await self._writable
            finally:
                self._writable = None

    def unblock_writer(self) -> None:
        """The answer began: wake whoever still writes the request."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _note_read(self) -> None:
        self._last_read = self._loop.time()

    def _tcp_state(self) -> int | None:
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        if sock is None or sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
            return None
        try:
            return int(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
        except OSError:
            return None

    def _check_silence(self) -> None:
        response, limit = self._response, self._read_timeout
        if response is None or limit is None:
            return
        silent = 0.0 if self._read_paused else self._loop.time() - self._last_read
        if silent < limit:
            self._timer = self._loop.call_later(limit - silent, self._check_silence)
            return
        response.finish(UpstreamTimeoutError(f"nothing came from the engine for {limit:g} s"))
        self.abort()
