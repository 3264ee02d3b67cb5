"""``GET /v1/events``: happenings as they happen, one JSON object a line, in chunks.

Law 6: nothing slow on the loop. A reader that falls behind is cut with a last line that says so; one that
does not even take that is dropped.
"""

import asyncio
import json

from aiohttp import web

from kvctl.admin.answers import ApiError
from kvctl.admin.serving import Connection
from kvctl.control.hub import Hub, Listener
from kvctl.control.journal import KINDS

BEAT_S = 10.0  # silence after which a line says that all is well
SLOW_S = 10.0  # longest that one write may wait for its reader
_PEEK_S = 1.0  # how often a reader that left is noticed


async def stream(request: web.Request, hub: Hub) -> web.StreamResponse:
    """Serve one listener until it leaves or is cut. Raises ApiError, TooManyError."""
    listener = hub.listen(_kinds(request))
    try:
        if isinstance(request.protocol, Connection):
            request.protocol.listens = True
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        response.force_close()  # the stream's end is the connection's
        await response.prepare(request)
        await _serve(request, response, listener)
        return response
    finally:
        hub.leave(listener)


def _kinds(request: web.Request) -> frozenset[str]:
    given = [each for each in request.query.get("types", "").split(",") if each]
    if unknown := sorted(set(given) - set(KINDS)):
        raise ApiError(400, "bad_request", f"{unknown[0]!r:.50} is no type; there are {', '.join(KINDS)}")
    return frozenset(given)


async def _serve(request: web.Request, response: web.StreamResponse, listener: Listener) -> None:
    loop = asyncio.get_running_loop()
    await response.write(_line({"type": "hello", "types": sorted(listener.kinds or KINDS)}))
    said_at = loop.time()
    while request.transport is not None and not request.transport.is_closing():
        batch = await listener.next(_PEEK_S)
        lines = b"".join(_line(each) for each in batch)
        if listener.cut:
            lines = _line({"type": "cut", "reason": "the reader was too slow; what it missed is gone"})
        elif not lines and loop.time() - said_at >= BEAT_S:
            lines = _line({"type": "beat"})
        if lines:
            said_at = loop.time()
            if not await _written(request, response, lines) or listener.cut:
                return


async def _written(request: web.Request, response: web.StreamResponse, lines: bytes) -> bool:
    """Whether the reader took the lines; one that does not is dropped."""
    try:
        async with asyncio.timeout(SLOW_S):
            await response.write(lines)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return False
    except ConnectionError:
        return False
    return True


def _line(document: dict[str, object]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False, default=str).encode() + b"\n"
