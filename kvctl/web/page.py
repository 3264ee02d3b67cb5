"""The routes of the status page. GET only; the files are served as they lie in the package.

The policy sent with each file forbids inline script and style and every other origin: a word that somebody
smuggles into a model's name stays a word.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

from aiohttp import web

from kvctl.admin.answers import OfNow
from kvctl.admin.port import DaemonStatus
from kvctl.admin.turns import ASKED_AT
from kvctl.web import document
from kvctl.web.live import Live
from kvctl.web.recent import Recent

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class PagePort(Protocol):
    """The daemon, as the page sees it."""

    def status(self) -> DaemonStatus:
        """The state of now."""
        ...


@dataclass(frozen=True, slots=True)
class _Asset:
    body: bytes
    kind: str
    tag: str

    async def serve(self, request: web.Request) -> web.Response:
        headers = {**_HEADERS, "ETag": self.tag}
        if request.headers.get("If-None-Match") == self.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=self.body, content_type=self.kind, charset="utf-8", headers=headers)


def _asset(name: str, kind: str) -> _Asset:
    body = files("kvctl.web").joinpath(name).read_bytes()
    return _Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')


class StatusPage:
    """Page and data. ``overrides`` gives the document of the overrides in force."""

    def __init__(self, port: PagePort, overrides: Callable[[], dict[str, Any]], recent: Recent) -> None:
        self._port = port
        self._overrides = overrides
        self._recent = recent
        self._of_now = OfNow(port.status)
        self._live = Live(self._state, self._history)
        self._assets = {path: _asset(*each) for path, each in _FILES.items()}

    def routes(self) -> Iterable[web.RouteDef]:
        """All of them."""
        yield from (web.get(path, asset.serve) for path, asset in self._assets.items())
        yield web.get("/v1/page", self._once)
        yield web.get("/v1/page/events", self._live.stream)

    async def close(self, _: object = None) -> None:
        """End the streams."""
        await self._live.close()

    async def _once(self, request: web.Request) -> web.Response:
        body = await self._of_now.body("page", self._encoded, request[ASKED_AT])
        headers = {"Cache-Control": "no-store"}
        return web.Response(body=body, content_type="application/json", charset="utf-8", headers=headers)

    def _encoded(self, status: DaemonStatus) -> bytes:
        return json.dumps(self._shown(status)).encode()

    def _state(self) -> dict[str, Any]:
        return self._shown(self._port.status())

    def _shown(self, status: DaemonStatus) -> dict[str, Any]:
        return document.page(status, self._overrides(), self._recent, time.time())

    def _history(self) -> dict[str, Any]:
        status = self._port.status()
        return document.history(status.engines, self._recent, time.time() - self._recent.now())
