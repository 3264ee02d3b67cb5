"""Applications on listening sockets: idle connections are closed, malformed requests cost one log line."""

import asyncio
import logging
import resource
import socket
from typing import Any, cast

from aiohttp import http_exceptions, web

from kvctl import logs
from kvctl.admin.pace import Flow

SILENCE_S = 20.0  # longest that a caller may hold a connection without a word
DESCRIPTORS_SHARE = 32  # one of so many may be a listening socket's callers; the data port leaves two such
_FEWEST, _MOST = 16, 1024
_AT_ONCE = 4  # callers accepted in one round of the loop: those that are too many have a descriptor until cut
_WAITING = 128  # callers that the kernel keeps until they are accepted


class _Strangers(logging.Filter):
    """Malformed HTTP is its sender's fault: one line, without a traceback and without what was sent."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass; reword this kind."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, http_exceptions.HttpProcessingError):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = f"refused a request that is not HTTP ({type(error).__name__})", ()
            record.exc_info = None
        return True


class Connection(web.RequestHandler):
    """One caller's connection; closed after ``SILENCE_S`` of silence, even in the middle of a request.

    A connection that is only held takes a descriptor from the data port. One that listens to a stream is
    silent by nature: ``listens`` takes it out, and whoever serves the stream answers for its end.
    """

    __slots__ = ("_house", "_silence", "_wire", "flow", "heard_at", "listens")

    def __init__(self, server: web.Server, logger: logging.Logger, house: "Served") -> None:
        options: dict[str, Any] = {"logger": logger, "access_log": None}
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._house = house
        self._silence: asyncio.TimerHandle | None = None
        self._wire: asyncio.Transport | None = None  # aiohttp forgets its own when it begins to close
        self.heard_at = 0.0
        self.listens = False
        self.flow = Flow()

    @property
    def idle(self) -> bool:
        """Whether nothing is being answered."""
        return self._current_request is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A caller came."""
        super().connection_made(transport)
        self._wire = cast("asyncio.Transport", transport)
        self.heard_at = asyncio.get_running_loop().time()
        self._listen_on(SILENCE_S)
        self._house.came(self)

    def data_received(self, data: bytes) -> None:
        """Bytes came from the caller."""
        self.heard_at = asyncio.get_running_loop().time()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is gone."""
        if self._silence is not None:
            self._silence.cancel()
        self._house.left(self)
        super().connection_lost(exc)

    def cut(self) -> None:
        """Close at once, whatever has not left yet."""
        if self._wire is not None:
            self._wire.abort()

    def _listen_on(self, seconds: float) -> None:
        self._silence = asyncio.get_running_loop().call_later(seconds, self._silent)

    def _silent(self) -> None:
        left = self.heard_at + SILENCE_S - asyncio.get_running_loop().time()
        if self.listens or left > 0:
            self._listen_on(SILENCE_S if self.listens else left)
        else:
            self.force_close()
            self._flush(None)

    def _flush(self, before: int | None) -> None:
        """Abort a close that makes no progress: it waits for written bytes that the caller may never take."""
        unsent = 0 if self._wire is None else self._wire.get_write_buffer_size()
        if before is not None and unsent >= before:
            self.cut()
        else:
            self._silence = asyncio.get_running_loop().call_later(SILENCE_S, self._flush, unsent)


class Served:
    """An application on a listening socket."""

    def __init__(self, application: web.Application) -> None:
        self._logger = logs.get("admin.http")
        if not self._logger.filters:
            self._logger.addFilter(_Strangers())
        self._runner = web.AppRunner(application, shutdown_timeout=1)
        self._listener: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self.most = most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    async def start(self, sock: socket.socket) -> None:
        """Serve from now on."""
        await self._runner.setup()
        loop, server = asyncio.get_running_loop(), self._runner.server
        if server is None:
            raise RuntimeError("a runner without a server")
        make = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
        self._listener = await make(
            lambda: Connection(server, self._logger, self), sock=sock, backlog=_AT_ONCE
        )
        sock.listen(_WAITING)  # asyncio has one number for both

    def came(self, newcomer: Connection) -> None:
        """If there are too many, close the one silent longest, or the newcomer if all are answered."""
        self._connections.add(newcomer)
        if len(self._connections) > self.most:
            idle = [each for each in self._connections if each.idle and each is not newcomer]
            victim = min(idle, key=lambda each: each.heard_at, default=newcomer)
            self._connections.discard(victim)  # more may come before its transport tells of its end
            victim.cut()

    def left(self, connection: Connection) -> None:
        """It is gone."""
        self._connections.discard(connection)

    async def close(self) -> None:
        """Stop serving."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()


def most_connections(descriptors: int) -> int:
    """Callers of one listening socket at once; ``descriptors`` is the process's limit, -1: none."""
    if descriptors == resource.RLIM_INFINITY:
        return _MOST
    return min(max(descriptors // DESCRIPTORS_SHARE, _FEWEST), _MOST)
