"""Handlers that take turns: every step of a coroutine runs when ``Pace`` allows it, and is accounted for."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import web

from kvctl.admin.pace import Flow, Line, Pace, Seat
from kvctl.admin.serving import Connection

PROBES = frozenset({"/healthz", "/readyz"})
ASKED_AT = web.RequestKey("asked_at", float)  # of ``time.perf_counter``

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def in_turns(pace: Pace) -> Any:
    """The outermost middleware of an application: from here to the answer's last byte all takes turns."""

    @web.middleware
    async def in_turn(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[ASKED_AT] = time.perf_counter()
        protocol = request.protocol
        flow = protocol.flow if isinstance(protocol, Connection) else Flow()
        return await InTurns(pace, pace.seat(_line_of(request), flow), _answered(request, handler))

    return in_turn


class InTurns(Awaitable[T]):
    """A coroutine of which every step waits for its turn."""

    def __init__(self, pace: Pace, seat: Seat, work: Coroutine[Any, Any, T]) -> None:
        self._pace = pace
        self._seat = seat
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        """Run it to its end. A cancellation is passed on at once: cleaning up needs no turn."""
        make: Callable[[Any], Any] = self._work.send
        given: object = None
        try:
            while True:
                try:
                    yield from self._pace.turn(self._seat).__await__()
                except asyncio.CancelledError as error:
                    make, given = self._work.throw, error
                try:
                    waits_for = self._pace.step(self._seat, make, given)
                except StopIteration as done:
                    result: T = done.value
                    return result
                try:
                    make, given = self._work.send, (yield waits_for)
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - of what it waits for: its own to handle
                    make, given = self._work.throw, error
        finally:
            self._work.close()


def _line_of(request: web.Request) -> Line:
    if request.method not in ("GET", "HEAD"):
        return Line.CHANGE
    return Line.PROBE if request.path in PROBES else Line.READING


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send an answer, which is work too; nothing is done for a caller who has left."""
    if request.transport is None or request.transport.is_closing():
        return web.Response(status=503)
    response = await handler(request)
    with suppress(ConnectionError):  # the server, which sends again what is sent, knows what to make of it
        await response.prepare(request)
        await response.write_eof()
    return response
