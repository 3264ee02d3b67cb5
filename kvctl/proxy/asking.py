"""What kvctl itself asks an engine for: small documents, taken whole or not at all."""

import asyncio

from kvctl.proxy.pool import Upstream
from kvctl.proxy.response import Headers, UpstreamError


class _Collected:
    """A sink that keeps an answer whole, unless it is too large."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._body = bytearray()
        self._error: UpstreamError | None = None

    def data(self, data: bytes, framed: bytes = b"") -> None:
        """More of the body."""
        del framed
        if len(self._body) <= self._most:
            self._body += data

    def finished(self, error: UpstreamError | None) -> None:
        """The engine's part is over."""
        self._error = error

    def taken(self) -> bytes | None:
        """The whole body; None: it broke off, or was too large."""
        return bytes(self._body) if self._error is None and len(self._body) <= self._most else None


async def ask(
    upstream: Upstream, target: bytes, headers: Headers, *, most_bytes: int, timeout_s: float
) -> tuple[int, bytes]:
    """Status and body of ``GET target``; status 0: nothing usable came within ``timeout_s``."""
    sink = _Collected(most_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            response = await upstream.request("GET", target, headers, None)
            try:
                response.attach(sink)
                await response.wait()
            finally:
                response.abort()
    except (UpstreamError, TimeoutError):
        return 0, b""
    body = sink.taken()
    return (0, b"") if body is None else (response.status, body)
