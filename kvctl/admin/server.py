"""The admin API on its unix socket, and the metrics port.

GET changes nothing, and over TCP nothing changes anything. Who may connect to the socket (mode 0660) may use
all of it; the kernel says who that was.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from aiohttp import http_exceptions, web

from kvctl import logs
from kvctl.admin import documents
from kvctl.admin.desk import Change, Desk
from kvctl.admin.listeners import OwnedSocket, tcp_socket
from kvctl.admin.peers import Actor, credentials, user_name
from kvctl.admin.port import AdminPort, PublicPort
from kvctl.core.overrides import DEFAULT_TTL_S, OverrideError, Refusal
from kvctl.settings.document import as_document
from kvctl.settings.units import Address

BODY_MAX = 64 * 2**10
NAME_DEADLINE_S = 2.0
SILENCE_S = 20.0  # longest that a caller may hold a connection without a word
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS = {Refusal.UNKNOWN_KNOB: 404, Refusal.NOT_SET: 404, Refusal.STALE_REVISION: 412}
_WORD = {404: "not_found", 413: "too_large"}  # of aiohttp's own answers
_BODY_KEYS = frozenset({"value", "ttl_s", "reason"})


class ApiError(Exception):
    """An answer that is no success: status, a word of a closed set, and a sentence."""

    def __init__(self, status: int, word: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.word = word


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as the same JSON object."""
    try:
        return await handler(request)
    except OverrideError as error:
        return _error(_STATUS.get(error.refusal, 422), error.refusal.value, str(error))
    except ApiError as error:
        return _error(error.status, error.word, str(error))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _error(405, "method_not_allowed", f"{request.path} knows {allowed}", {"Allow": allowed})
    except web.HTTPException as error:
        word = _WORD.get(error.status, "bad_request")
        return _error(error.status, word, f"{request.path}: {error.reason}")


def _error(status: int, word: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"code": word, "message": message}}, status=status, headers=headers)


class AdminApi:
    """The handlers of the unix socket."""

    def __init__(self, port: AdminPort, desk: Desk) -> None:
        self._port = port
        self._desk = desk
        self._names = ThreadPoolExecutor(1, "kvctl-names")

    def close(self) -> None:
        """Let the thread go."""
        self._names.shutdown(wait=False)

    def application(self) -> web.Application:
        """All routes."""
        app = web.Application(middlewares=[_errors], client_max_size=BODY_MAX)
        app.router.add_get("/v1/status", self._status)
        app.router.add_get("/v1/budget", self._budget)
        app.router.add_get("/v1/config", self._config)
        app.router.add_get("/v1/overrides", self._overrides)
        app.router.add_put("/v1/overrides/{knob}", self._set)
        app.router.add_delete("/v1/overrides/{knob}", self._unset)
        app.router.add_post("/v1/drain", self._drain)
        app.router.add_post("/v1/undrain", self._undrain)
        return app

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(documents.status(self._port.status(), self._desk.document()))

    async def _budget(self, _: web.Request) -> web.Response:
        return web.json_response(documents.budget(self._port.status()))

    async def _config(self, _: web.Request) -> web.Response:
        return web.json_response(as_document(self._port.settings()))

    async def _overrides(self, _: web.Request) -> web.Response:
        return self._with_revision(self._desk.document())

    async def _set(self, request: web.Request) -> web.Response:
        body, if_match, who = await _body(request), _if_match(request), await self._actor(request)
        change = await self._desk.set(
            who,
            request.match_info["knob"],
            body["value"],
            ttl_s=body.get("ttl_s", DEFAULT_TTL_S),
            reason=body.get("reason"),
            if_match=if_match,
        )
        return self._changed(change)

    async def _unset(self, request: web.Request) -> web.Response:
        if_match, who = _if_match(request), await self._actor(request)
        return self._changed(await self._desk.unset(who, request.match_info["knob"], if_match=if_match))

    async def _drain(self, request: web.Request) -> web.Response:
        return await self._traffic(request, draining=True)

    async def _undrain(self, request: web.Request) -> web.Response:
        return await self._traffic(request, draining=False)

    async def _traffic(self, request: web.Request, *, draining: bool) -> web.Response:
        who = await self._actor(request)
        self._port.drain(draining=draining)
        kept = await self._desk.note(who, "drain" if draining else "undrain")
        return web.json_response({"mode": documents.mode(self._port.status()), "kept": kept})

    async def _actor(self, request: web.Request) -> Actor:
        """Who asks. The name may come from a directory service, which is not waited for for long."""
        if request.transport is None:
            raise ApiError(400, "gone", "the caller is gone")
        pid, uid, gid = credentials(request.transport)
        looking = asyncio.get_running_loop().run_in_executor(self._names, user_name, uid)
        done, _ = await asyncio.wait([looking], timeout=NAME_DEADLINE_S)
        return Actor(uid=uid, gid=gid, pid=pid, user=looking.result() if done else str(uid))

    def _changed(self, change: Change) -> web.Response:
        return self._with_revision(documents.plain(change))

    def _with_revision(self, document: documents.Document) -> web.Response:
        return web.json_response(document, headers={"ETag": f'"{document["revision"]}"'})


def _if_match(request: web.Request) -> int | None:
    given = request.headers.get("If-Match", "*").strip()
    if given == "*":
        return None
    try:
        return int(given.removeprefix('"').removesuffix('"'))
    except ValueError:
        raise ApiError(400, "bad_request", f"If-Match is {given!r}, not a revision") from None


async def _body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = json.loads(await _read(request), parse_constant=_no_constant)
    except ValueError as error:  # UnicodeDecodeError and RecursionError's kin included
        raise ApiError(400, "bad_request", f"the body is not JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "bad_request", "the body is nested too deeply") from None
    if not isinstance(body, dict) or "value" not in body:
        raise ApiError(422, "bad_request", "the body is an object with value, reason and ttl_s")
    if unknown := sorted(body.keys() - _BODY_KEYS):
        raise ApiError(422, "bad_request", f"the body has {unknown[0]!r}; it knows value, reason and ttl_s")
    return body


async def _read(request: web.Request) -> bytes:
    """The whole body; a caller who breaks off in its middle is no defect of ours."""
    try:
        return await request.read()
    except (OSError, web.RequestPayloadError) as error:
        raise ApiError(400, "bad_request", f"the body broke off: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


class PublicApi:
    """The handlers of the TCP port: read only."""

    def __init__(self, port: PublicPort) -> None:
        self._port = port

    def application(self) -> web.Application:
        """All routes."""
        app = web.Application(middlewares=[_errors], client_max_size=BODY_MAX)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._ready)
        return app

    async def _metrics(self, _: web.Request) -> web.Response:
        page, content_type = self._port.metrics()
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        ready, sentence = self._port.readiness()
        return web.Response(text=f"{sentence}\n", status=200 if ready else 503)


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


class _Connection(web.RequestHandler):
    """One caller's connection; closed after ``SILENCE_S`` without a word, whatever it was about to say.

    A connection that is only held takes a descriptor from the data port.
    """

    __slots__ = ("_heard_at", "_silence")

    def __init__(self, server: web.Server, logger: logging.Logger) -> None:
        options: dict[str, Any] = {"logger": logger, "access_log": None}
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._heard_at = 0.0
        self._silence: asyncio.TimerHandle | None = None

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
        if left > 0:
            self._listen_on(left)
        else:
            self.force_close()


class _Served:
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
        self._listener = await make(lambda: _Connection(server, self._logger), sock=sock)

    async def close(self) -> None:
        """Stop serving."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()


class AdminServer:
    """The unix socket in service."""

    def __init__(self, api: AdminApi, listener: OwnedSocket) -> None:
        self._api = api
        self._served = _Served(api.application())
        self._listener = listener

    async def start(self) -> None:
        """Serve from now on."""
        await self._served.start(self._listener.socket)

    async def close(self) -> None:
        """Stop serving and give the path away."""
        await self._served.close()
        self._listener.close()
        self._api.close()


class PublicServer:
    """The metrics port in service."""

    def __init__(self, api: PublicApi, address: Address) -> None:
        """Raises ListenError."""
        self._served = _Served(api.application())
        self._socket = tcp_socket("admin_listen", address)
        self.port: int = self._socket.getsockname()[1]

    async def start(self) -> None:
        """Serve from now on."""
        await self._served.start(self._socket)

    async def close(self) -> None:
        """Stop serving."""
        await self._served.close()
        self._socket.close()
