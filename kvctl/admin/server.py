"""The admin API on its unix socket, and the metrics port.

GET changes nothing, and over TCP nothing changes anything. Who may connect to the socket (mode 0660) may use
all of it; the kernel says who that was.
"""

from collections.abc import Iterable
from typing import Protocol

from aiohttp import web

from kvctl.admin.answers import BODY_MAX, Callers, SharedPage, errors
from kvctl.admin.changes import Changes
from kvctl.admin.desk import Desk
from kvctl.admin.levels import LogLevels
from kvctl.admin.listeners import OwnedSocket, tcp_socket
from kvctl.admin.pace import Pace
from kvctl.admin.port import AdminPort, PublicPort
from kvctl.admin.readings import Readings
from kvctl.admin.serving import Served
from kvctl.admin.turns import ASKED_AT, in_turns
from kvctl.control.journal import Journal
from kvctl.settings.units import Address


class AdminApi:
    """Everything that the unix socket answers."""

    def __init__(self, port: AdminPort, desk: Desk, journal: Journal, pace: Pace) -> None:
        self.levels = LogLevels(lambda: port.settings().log_level, lambda: port.settings().override_ttl_max)
        self._callers = Callers()
        self._pace = pace
        self._readings = Readings(port, desk, journal, self.levels, pace)
        self._changes = Changes(port, desk, journal, self.levels, callers=self._callers, pace=pace)

    def close(self) -> None:
        """End threads and timers."""
        self._callers.close()
        self.levels.close()

    def application(self) -> web.Application:
        """All routes."""
        app = web.Application(middlewares=[in_turns(self._pace), errors], client_max_size=BODY_MAX)
        app.add_routes([*self._readings.routes(), *self._changes.routes()])
        return app


class Page(Protocol):
    """Further routes of the TCP port, which change nothing either."""

    def routes(self) -> Iterable[web.RouteDef]:
        """All of them."""
        ...

    async def close(self, _: object = None) -> None:
        """End what runs on them."""
        ...


class PublicApi:
    """The handlers of the TCP port: read only."""

    def __init__(self, port: PublicPort, pace: Pace, more: Page | None = None) -> None:
        """``more`` is served beside the probes."""
        self._port = port
        self._pace = pace
        self._more = more
        self._page = SharedPage(port.metrics)

    def application(self) -> web.Application:
        """All routes."""
        app = web.Application(middlewares=[in_turns(self._pace), errors], client_max_size=BODY_MAX)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._ready)
        if self._more is not None:
            app.add_routes(self._more.routes())
            app.on_shutdown.append(self._more.close)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        page, content_type = await self._page.get(request[ASKED_AT])
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        ready, sentence = self._port.readiness()
        return web.Response(text=f"{sentence}\n", status=200 if ready else 503)


class AdminServer:
    """The unix socket in service."""

    def __init__(self, api: AdminApi, listener: OwnedSocket) -> None:
        self._api = api
        self._served = Served(api.application())
        self._listener = listener

    async def start(self) -> None:
        """Serve from now on."""
        await self._served.start(self._listener.socket)

    async def close(self) -> None:
        """Stop serving and release the path."""
        await self._served.close()
        self._listener.close()
        self._api.close()


class PublicServer:
    """The metrics port in service."""

    def __init__(self, api: PublicApi, address: Address) -> None:
        """Raises ListenError."""
        self._served = Served(api.application())
        self._socket = tcp_socket("admin_listen", address)
        self.port: int = self._socket.getsockname()[1]

    async def start(self) -> None:
        """Serve from now on."""
        await self._served.start(self._socket)

    async def close(self) -> None:
        """Stop serving."""
        await self._served.close()
        self._socket.close()
