"""An engine's address and the pool of connections to it.

There is no limit on connections: it would be a hidden queue between the gate and the engine.

The keep-alive race: an engine closes an idle connection (uvicorn after 5 s) just when it is taken for a new
request. Connections are kept for less than that, and a request that lost the race is sent once more on a
fresh connection, provided that nothing was answered and that either its method is safe, or the peer's reset
came at once, which proves that its bytes were never read whole. A generation that may have begun is never
sent twice: a mere close, or a reset after a while (by something in between), proves nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from kvctl.control.certificates import Trust
from kvctl.control.dialing import socket_of
from kvctl.control.poll import OWN_WANT
from kvctl.proxy.response import BrokenError, ConnectError, Headers, Response, UpstreamError
from kvctl.proxy.upstream import Connection

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_RACE_S = 1.0  # the reset of a race comes within a round trip of the request
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an engine listens. ``prefix`` goes before every path; a trailing /v1 is not part of it."""

    hosts: tuple[str, ...]  # tried in this order; empty for a unix socket
    port: int
    path: str | None  # of a unix socket
    secure: bool
    authority: bytes  # the Host header
    name: str  # what the engine's certificate must bear
    prefix: bytes


def parse_address(url: str) -> Address:
    """The address in ``http[s]://host[:port][/prefix]`` or ``unix:/path``. Raises ValueError."""
    path = socket_of(url)
    if path is not None:
        if path == "/":
            raise ValueError(f"engine URL {url!r} names no socket path")
        return Address(
            hosts=(), port=0, path=path, secure=False, authority=b"localhost", name="localhost", prefix=b""
        )
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"engine URL {url!r} is not http://HOST[:PORT], https://HOST[:PORT] or unix:/PATH")
    if not url.isascii():
        raise ValueError(f"engine URL {url!r} must be ASCII; write an international name in its xn-- form")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"engine URL {url!r} must not have a query, a fragment or credentials")
    # Operators write the URL with and without the /v1 that every route already has.
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(
        hosts=("127.0.0.1", "::1") if parts.hostname == "localhost" else (parts.hostname,),
        port=parts.port or _PORTS[parts.scheme],
        path=None,
        secure=parts.scheme == "https",
        authority=parts.netloc.encode("ascii"),
        name=parts.hostname,
        prefix=prefix.encode("ascii"),
    )


class Upstream:
    """One engine as the data plane sees it.

    Times are in seconds. ``read_timeout`` None: a silent engine is waited for without end.
    ``idle_life`` must stay below the engine's own keep-alive time. ``trust`` is used for https addresses;
    None: the system's authorities. ``on_retry`` is told of each request that was sent again.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 5.0,
        read_timeout: float | None = None,
        trust: Trust | None = None,
        idle_life: float = 4.0,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = parse_address(url)
        self._before_target = b" " + self.address.prefix
        self._behind_target = b" HTTP/1.1\r\nHost: " + self.address.authority
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._trust = (trust or Trust()) if self.address.secure else None
        self._idle_life = idle_life
        self._on_retry = on_retry
        self._hosts = self.address.hosts
        self._idle: deque[tuple[Connection, float]] = deque()  # oldest first; the time is when it expires
        self._busy: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def connections(self) -> int:
        """Connections that are open now, idle ones included."""
        return len(self._busy) + sum(connection.alive for connection, _ in self._idle)

    @property
    def busy(self) -> int:
        """Connections with a request on them."""
        return len(self._busy)

    async def request(self, method: str, target: bytes, headers: Headers, body: bytes | None) -> Response:
        """Send a request; returns when status and headers of the answer have come.

        ``headers`` must be complete but for Host and Content-Length. Raises ConnectError (nothing was
        sent), BrokenError or UpstreamTimeoutError. Cancelling closes the connection.
        """
        head = self._head(method, target, headers, body)
        pooled = self._take()
        if pooled is not None:
            try:
                return await self._exchange(pooled, method, head, body, reused=True)
            except _RaceLostError:
                self._on_retry()
        return await self._exchange(await self._connect(), method, head, body, reused=False)

    async def close(self) -> None:
        """Close every connection, those with a request on them too."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in [*self._busy, *(connection for connection, _ in self._idle)]:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # transports tell of their end in the loop's next round

    # --- requests ---

    def _head(self, method: str, target: bytes, headers: Headers, body: bytes | None) -> bytes:
        line = method.encode("ascii") + self._before_target + target + self._behind_target
        end = b"\r\n" if body is None else b"Content-Length: %d\r\n\r\n" % len(body)
        return b"\r\n".join((line, *map(b": ".join, headers), end))

    async def _exchange(
        self, connection: Connection, method: str, head: bytes, body: bytes | None, *, reused: bool
    ) -> Response:
        asked_at = monotonic()
        self._busy.add(connection)
        response = connection.start(head_only=method == "HEAD")
        begun = False
        try:
            if not connection.send(head, body) and body is not None:
                await connection.send_body(body)
            await response.wait_head()
            begun = True
        except UpstreamError as error:
            waited = monotonic() - asked_at
            if reused and await _race_lost(connection, response, method, error, waited):
                raise _RaceLostError from error
            raise
        finally:
            if not begun:
                response.abort()
                connection.abort()
                self._busy.discard(connection)
        return response

    # --- connections ---

    def _take(self) -> Connection | None:
        """The idle connection that was used last: it is the furthest from the engine's own time-out."""
        now = monotonic()
        while self._idle:
            connection, expires = self._idle.pop()
            if connection.alive and now < expires:
                return connection
            connection.abort()
        return None

    def _released(self, connection: Connection, reusable: bool) -> None:
        self._busy.discard(connection)
        if not reusable or self._closed:
            return
        self._idle.append((connection, monotonic() + self._idle_life))
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(self._idle_life, self._sweep)

    def _sweep(self) -> None:
        """Close what idled too long, or was closed by the engine; come again while any is left."""
        self._sweeper = None
        now = monotonic()
        kept = deque[tuple[Connection, float]]()
        for connection, expires in self._idle:
            if connection.alive and now < expires:
                kept.append((connection, expires))
            else:
                connection.abort()
        self._idle = kept
        if kept:
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_later(max(kept[0][1] - now, 0.01), self._sweep)

    async def _connect(self) -> Connection:
        if self._closed:
            raise ConnectError("the proxy is closing", own=True)
        failures: list[str] = []
        own = True
        try:
            async with asyncio.timeout(self._connect_timeout):
                for host in self._hosts or ("",):
                    try:
                        return await self._connect_to(host)
                    except OSError as error:
                        failures.append(str(error))
                        own = own and error.errno in OWN_WANT
        except TimeoutError:
            failures.append(f"no connection within {self._connect_timeout:g} s")
            own = False
        raise ConnectError("; ".join(failures), own=own)

    async def _connect_to(self, host: str) -> Connection:
        loop = asyncio.get_running_loop()

        def factory() -> Connection:
            return Connection(self._released, self._read_timeout)

        if self.address.path is not None:
            return (await loop.create_unix_connection(factory, self.address.path))[1]
        options: dict[str, Any] = {}
        if self._trust is not None:
            name = self._trust.server_name or self.address.name
            options = {"ssl": self._trust.context, "server_hostname": name}
        connection: Connection = (await loop.create_connection(factory, host, self.address.port, **options))[
            1
        ]
        if host != self._hosts[0]:  # such as localhost: the address that worked is tried first from now on
            self._hosts = (host, *(other for other in self._hosts if other != host))
        return connection


class _RaceLostError(Exception):
    """The pooled connection was closed before the request could have been read."""


async def _race_lost(
    connection: Connection, response: Response, method: str, error: UpstreamError, waited: float
) -> bool:
    if response.answered or not isinstance(error, BrokenError):
        return False
    return method in _SAFE or (waited < _RACE_S and await connection.was_reset())
