"""Applications on listening sockets: connections that are only held are closed, strangers are one line."""

import asyncio
import logging
import socket
from typing import Any

from aiohttp import http_exceptions, web

from kvctl import logs
from kvctl.admin.pace import Flow

SILENCE_S = 20.0  # longest that a caller may hold a connection without a word


class _Strangers(logging.Filter):
    """What is no HTTP is its sender's fault: one line, without a traceback and without what was sent."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let all pass, this kind in other words."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, http_exceptions.HttpProcessingError):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = f"refused a request that is not HTTP ({type(error).__name__})", ()
            record.exc_info = None
        return True


class Connection(web.RequestHandler):
    """One caller's connection; closed after ``SILENCE_S`` without a word, whatever it was about to say.

    A connection that is only held takes a descriptor from the data port. One that listens to a stream is
    silent by nature: ``listens`` takes it out, and whoever serves the stream answers for its end.
    """

    __slots__ = ("_heard_at", "_silence", "flow", "listens")

    def __init__(self, server: web.Server, logger: logging.Logger) -> None:
        options: dict[str, Any] = {"logger": logger, "access_log": None}
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._heard_at = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self.listens = False
        self.flow = Flow()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A caller came."""
        super().connection_made(transport)
        self._listen_on(SILENCE_S)

    def data_received(self, data: bytes) -> None:
        """It says something."""
        self._heard_at = asyncio.get_running_loop().time()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is gone."""
        if self._silence is not None:
            self._silence.cancel()
        super().connection_lost(exc)

    def _listen_on(self, seconds: float) -> None:
        self._silence = asyncio.get_running_loop().call_later(seconds, self._silent)

    def _silent(self) -> None:
        left = self._heard_at + SILENCE_S - asyncio.get_running_loop().time()
        if self.listens or left > 0:
            self._listen_on(SILENCE_S if self.listens else left)
        else:
            self.force_close()


class Served:
    """An application on a listening socket."""

    def __init__(self, application: web.Application) -> None:
        self._logger = logs.get("admin.http")
        if not self._logger.filters:
            self._logger.addFilter(_Strangers())
        self._runner = web.AppRunner(application, shutdown_timeout=1)
        self._listener: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> None:
        """Serve from now on."""
        await self._runner.setup()
        loop, server = asyncio.get_running_loop(), self._runner.server
        if server is None:
            raise RuntimeError("a runner without a server")
        make = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
        self._listener = await make(lambda: Connection(server, self._logger), sock=sock)

    async def close(self) -> None:
        """Stop serving."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
