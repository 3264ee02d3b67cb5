"""Server-sent events: the state once a second, made once for all who look.

Law 6: nothing slow on the loop. There are at most ``MOST_LOOKING`` streams; who does not take what is sent is
dropped, and without anybody looking nothing is made.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from kvctl.admin.serving import Connection

EVERY_S = 1.0
MOST_LOOKING = 16
SLOW_S = 10.0  # longest that one write may wait for its reader
Make = Callable[[], dict[str, Any]]


class Live:
    """All streams. ``state`` and ``history`` make what is sent: again and again, and once at first."""

    def __init__(self, state: Make, history: Make) -> None:
        self._state = state
        self._history = history
        self._looking = 0
        self._news: asyncio.Future[bytes] | None = None
        self._beat: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Serve one reader until it leaves, is too slow, or all is over."""
        if self._looking >= MOST_LOOKING:
            return web.Response(
                status=503, text="too many look at this page\n", headers={"Retry-After": "30"}
            )
        self._looking += 1
        try:
            return await self._serve(request)
        finally:
            self._looking -= 1
            if self._looking == 0:
                await self._rest()

    async def close(self, _: object = None) -> None:
        """End every stream."""
        self._over.set()
        await self._rest()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if isinstance(request.protocol, Connection):
            request.protocol.listens = True
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        first = b"retry: 2000\n\n" + _event("history", self._history()) + _event("state", self._state())
        told = await _written(request, response, first)
        while told and not self._over.is_set():
            told = await _written(request, response, await asyncio.shield(self._next()))
        return response

    def _next(self) -> "asyncio.Future[bytes]":
        """The next event, the same for everybody."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        if self._beat is None:
            self._beat = asyncio.create_task(self._beats(), name="kvctl-page-beat")
        return self._news

    async def _beats(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._over.wait()
            news, self._news = self._news, None
            if news is not None and not news.done():
                news.set_result(_event("state", self._state()))
            if self._over.is_set():
                return

    async def _rest(self) -> None:
        """Nobody looks: no more beats."""
        beat, self._beat = self._beat, None
        if beat is not None:
            beat.cancel()
            with suppress(asyncio.CancelledError):
                await beat
        if self._news is not None and not self._news.done():
            self._news.set_result(b"")
        self._news = None


async def _written(request: web.Request, response: web.StreamResponse, event: bytes) -> bool:
    """Whether the reader took it; who does not is dropped."""
    if request.transport is None or request.transport.is_closing():
        return False
    try:
        async with asyncio.timeout(SLOW_S):
            await response.write(event)
    except TimeoutError:
        request.transport.abort()
        return False
    except ConnectionError:
        return False
    return True


def _event(name: str, document: dict[str, Any]) -> bytes:
    body = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {body}\n\n".encode()
