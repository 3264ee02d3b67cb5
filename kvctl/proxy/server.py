"""The data port: aiohttp's server, its limits and time-outs, start, drain and close.

Law 8: malformed requests get the API's error format, are counted, and close the connection; they never
reach a handler.
"""

import asyncio
import resource
import socket
import ssl as tls
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from aiohttp import EMPTY_PAYLOAD, HttpVersion11, StreamReader, http_exceptions, web

from kvctl import logs
from kvctl.core.outcomes import ProxyFault
from kvctl.proxy import errors
from kvctl.proxy.handlers import Handler
from kvctl.proxy.listening import Listeners
from kvctl.proxy.relay import Unwritten, write_to
from kvctl.proxy.seams import Backend, ProxyConfig, ProxyMetrics, Readiness

log = logs.get("proxy")
Answering = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_TURNS = 8
"""Of the loop, before anyone is late: timers go before sockets, and after a standstill heads lie there."""
_SWEEP_S = 1.0  # how often connections are looked at for late headers, at least
_LINGER_S = 2.0  # how long what a refused client still sends is thrown away before the connection closes
_COMPLAINT_S = 10.0
_HEAR_OUT_S = 1.0  # how long, at the end, those who just connected may take to ask
_RESERVED = 64  # descriptors that no client may take
_ADMINS = 16  # one of so many is left to callers of the admin side
_MANY = 1 << 20
_QUOTED_MAX = 300  # characters of a malformed request that its sender is shown


class ClientConnection(web.RequestHandler):
    """One client's connection; knows since when it owes the head of a request."""

    __slots__ = (
        "_ahead", "_complain", "_content", "_held_back", "_house", "_metrics", "_serving", "_wire",
        "closing_since", "owing_since", "writing_paused",
    )  # fmt: skip
    writing_paused: bool  # aiohttp's is a property: a call for each event of a stream

    def __init__(self, server: "ClientServer", metrics: ProxyMetrics, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._metrics = metrics
        self._house = server
        self._complain = server.complain
        self._wire: asyncio.Transport | None = None  # aiohttp forgets its own when it begins to close
        self._held_back = False
        self.owing_since: float | None = None
        self.closing_since: float | None = None
        self._serving = False
        self._content: StreamReader = EMPTY_PAYLOAD  # of the last request; it may come behind its answer
        self._ahead = False  # bytes came behind the request that is being served
        self.writing_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came; it owes a request from the start."""
        super().connection_made(transport)
        self.owing_since = time.monotonic()
        self._wire = cast("asyncio.Transport", transport)
        self._house.open += 1
        if self._house.open > self._house.most_open:
            self._metrics.fault(ProxyFault.TOO_MANY_CONNECTIONS)
            self._complain(f"{self._house.most_open} clients are connected, the most that descriptors allow")
            write_to(self._wire, errors.too_many_connections())
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is gone, with everything that was written or not."""
        self._house.open -= 1
        super().connection_lost(exc)

    def give_up(self, now: float, patience: float) -> None:
        """Cut a connection that has been closing for ``patience`` seconds: its client takes nothing more."""
        if self._wire is None or not self._wire.is_closing():
            return
        if self.closing_since is None:
            self.closing_since = now
        elif now - self.closing_since > patience:
            self._wire.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes came; the first ones behind a whole request begin the next head."""
        if data and self.owing_since is None and self._content.is_eof():  # b"": aiohttp reads on
            if self._serving:
                self._ahead = True
            else:
                self.owing_since = time.monotonic()
        super().data_received(data)

    def begin(self, request: web.BaseRequest) -> None:
        """A request is served from now on."""
        self.owing_since, self._serving, self._ahead = None, True, False
        self._content = request.content

    def done(self) -> None:
        """It was; whoever sent a part of the next head meanwhile owes the rest from now on."""
        self._serving = False
        if self._ahead and not self._messages:
            self.owing_since = time.monotonic()

    def _process_keepalive(self) -> None:
        """An idle connection was kept for long enough; one that owes a head has a time of its own."""
        if self.owing_since is None:
            super()._process_keepalive()
        else:
            self._keepalive_handle = None  # the next answer begins another

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self.writing_paused = True
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client takes more."""
        self.writing_paused = False
        super().resume_writing()

    def pause_reading(self) -> None:
        """A body comes faster than it is read."""
        self._held_back = True
        super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Read on, where reading was held back: aiohttp asks for that at each piece of each body."""
        if self._held_back:
            self._held_back = False
            super().resume_reading(resume_parser)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP request is answered in the API's format, and the connection closed."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        too_large = isinstance(exc, http_exceptions.LineTooLong) or "Too many headers" in str(message)
        self._metrics.fault(ProxyFault.HEADERS_TOO_LARGE if too_large else ProxyFault.MALFORMED_HTTP)
        text = " ".join((message or str(exc) or "unknown").split())[:_QUOTED_MAX]
        self._complain(f"refused a request that is not HTTP from {request.remote}: {_what_is_wrong(exc)}")
        return Unwritten(errors.malformed_http(text, 431 if too_large else status))


# The library's own words quote the bytes that offended it: a key or a prompt may stand in them. They go back
# to their sender, and never into the log.
_WRONG: tuple[tuple[type[BaseException], str], ...] = (
    (http_exceptions.LineTooLong, "its request line or a header is too long"),
    (http_exceptions.BadHttpMethod, "it begins with no method"),
    (http_exceptions.InvalidHeader, "a header is malformed"),
    (http_exceptions.InvalidURLError, "its target is malformed"),
    (http_exceptions.TransferEncodingError, "its chunks are malformed"),
    (http_exceptions.ContentLengthError, "its length is malformed"),
)


def _what_is_wrong(exc: BaseException | None) -> str:
    return next(
        (words for kind, words in _WRONG if isinstance(exc, kind)), "its head or framing is malformed"
    )


class ClientServer(web.Server):
    """Makes a ``ClientConnection`` of each connection."""

    def __init__(self, handler: Answering, config: ProxyConfig, metrics: ProxyMetrics) -> None:
        super().__init__(self._handle, handler_cancellation=True)
        self._handler = handler
        self._metrics = metrics
        self._quiet_until = 0.0
        self._untold = 0
        self._patience = config.client_write_timeout
        self.open = 0  # connections
        self.most_open = most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._options: dict[str, Any] = {
            "keepalive_timeout": config.keepalive_timeout,
            "access_log": None,
            "max_line_size": config.max_header_bytes,
            "max_field_size": config.max_header_bytes,
            "max_headers": config.max_headers,
            "lingering_time": _LINGER_S,
            "auto_decompress": False,
        }

    def __call__(self) -> web.RequestHandler:
        """The protocol of a new connection."""
        return ClientConnection(self, self._metrics, **self._options)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        if not isinstance(connection, ClientConnection):
            raise TypeError("a connection that is not of this server")
        connection.begin(request)
        try:
            if request.version > HttpVersion11:
                self._metrics.fault(ProxyFault.MALFORMED_HTTP)
                return Unwritten(errors.malformed_http("it is of a version that is not spoken here", 505))
            return await self._handler(request)
        finally:
            connection.done()

    def complain(self, text: str) -> None:
        """Log what a client did wrong, one line in ten seconds: strangers must not fill the log."""
        now = time.monotonic()
        if now < self._quiet_until:
            self._untold += 1
            return
        log.warning("%s (and %d more since the last such line)", text, self._untold)
        self._quiet_until, self._untold = now + _COMPLAINT_S, 0

    @property
    def owed_requests(self) -> bool:
        """Whether anyone who connected has not asked for anything yet."""
        clients = (each for each in self.connections if isinstance(each, ClientConnection))
        return any(each.owing_since is not None for each in clients)

    def close_late(self, now: float, header_timeout: float) -> int:
        """Close connections that owe a head for too long, and cut those that do not get to close.

        Returns how many were late.
        """
        late = 0
        for connection in self.connections:
            if not isinstance(connection, ClientConnection):
                continue
            owing_since = connection.owing_since
            if owing_since is not None and now - owing_since > header_timeout and connection.transport:
                connection.force_close()
                late += 1
            connection.give_up(now, self._patience)
        return late


def most_connections(descriptors: int) -> int:
    """Clients at once: a request takes two descriptors, and telemetry, admin and state need theirs always.

    ``descriptors`` is the process's limit; -1: none.
    """
    if descriptors == resource.RLIM_INFINITY:
        descriptors = _MANY
    return (descriptors - min(_RESERVED + descriptors // _ADMINS, descriptors // 2)) // 2


class Proxy:
    """The data plane in front of the engines.

    ``ready`` tells /readyz its answer. ``clock`` gives monotonic seconds. ``ssl`` serves clients over TLS.
    """

    def __init__(
        self,
        *,
        backends: Sequence[Backend],
        config: ProxyConfig,
        metrics: ProxyMetrics,
        ready: Readiness,
        clock: Callable[[], float] = time.monotonic,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        self._backends = backends
        self._config = config
        self._metrics = metrics
        self._ssl = ssl
        self._handler = Handler(backends, config, metrics, ready, clock)
        self._server: ClientServer | None = None
        self._listeners = Listeners()
        self._sweeper: asyncio.Task[None] | None = None
        self._patience: asyncio.Timeout | None = None  # of the drain in course
        self._hurried = False

    @property
    def addresses(self) -> list[Any]:
        """Where it listens, as the sockets say."""
        return [sock.getsockname() for sock in self._listeners.sockets]

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The listening sockets, for the service manager to keep over a restart."""
        return self._listeners.sockets

    @property
    def in_flight(self) -> int:
        """Admitted requests whose handlers run, and responses that are generated on in the background."""
        return len(self._handler.flights) + self._handler.afterlife.alone

    @property
    def background_responses(self) -> int:
        """Responses that are generated in the background."""
        return len(self._handler.afterlife)

    @property
    def body_bytes(self) -> int:
        """Bytes of request bodies held now."""
        return self._handler.intake.held

    async def start(self, listen: str, inherited: Sequence[socket.socket] = ()) -> None:
        """Listen on ``HOST:PORT``, ``[V6]:PORT``, ``:PORT`` or ``unix:/PATH``.

        ``inherited`` listen already: those at these addresses are taken over, the others closed.
        Raises ValueError where ``listen`` is none of these, OSError where it cannot be had.
        """
        self._server = ClientServer(self._handler, self._config, self._metrics)
        await self._listeners.open(
            listen,
            self._server,
            ssl=self._ssl,
            handshake_timeout=self._config.header_timeout,
            inherited=inherited,
        )
        self._sweeper = asyncio.create_task(self._sweep(self._server), name="kvctl-proxy-sweep")

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109 - the end of a drain is a cut, not an error
        """Return when no admitted request is left; after ``timeout`` seconds, cut those that are.

        What the engine generates in the background is waited for too, and then left to it: it is never cut.
        New requests are the gate's to refuse meanwhile: it must have been told of the drain.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if self._hurried else timeout) as self._patience:
                await self._handler.landed()
                await self._handler.afterlife.idle.wait()
        for flight in tuple(self._handler.flights):
            flight.cut()
        await self._handler.landed()
        self._handler.afterlife.let_go()

    def hurry(self) -> None:
        """Let a drain in course end now, and those that come at once."""
        self._hurried = True
        if self._patience is not None:
            with suppress(RuntimeError):  # that drain is over
                self._patience.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Stop listening, cut what still runs, close every connection."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        self._listeners.close()
        if self._server is not None:
            await self._hear_out(self._server)
        await self.drain(0)
        await self._handler.afterlife.close()
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(0.5)
        for backend in self._backends:
            await backend.upstream.close()
        await self._listeners.wait_closed()

    async def _hear_out(self, server: ClientServer) -> None:
        """Those whose connection was accepted get an answer, if they ask at once: not a reset."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEAR_OUT_S):
                while server.owed_requests:  # noqa: ASYNC110 - nobody tells when it becomes false
                    await asyncio.sleep(_HEAR_OUT_S / 50)

    async def _sweep(self, server: ClientServer) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._config.header_timeout / 2))
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            for _ in range(server.close_late(time.monotonic(), self._config.header_timeout)):
                self._metrics.fault(ProxyFault.HEADER_TIMEOUT)
