"""One bounded GET to the engine, with the word for why it brought nothing.

Law 6: nothing slow. A deadline over the whole answer, a bound on its size while it is read, no redirects
(they would let a stranger choose whom kvctl believes), no decompression.
"""

import asyncio
import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from kvctl.core.outcomes import SourceFault

_LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_IDLE_S = 3.0  # uvicorn drops idle connections after 5 s: be first


class PollError(Exception):
    """A poll that brought nothing, with the word for it, and the status of an answer that was no 200."""

    def __init__(self, fault: SourceFault, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """A 200. Times are of the clock handed in."""

    body: bytes
    asked_at: float
    answered_at: float  # when the head came: the page had been written by then


class LoopbackResolver(AbstractResolver):
    """``localhost`` is both loopback addresses, whatever the hosts file says; other names are looked up."""

    def __init__(self) -> None:
        self._names = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses in the order in which they are tried."""
        if host.rstrip(".").lower() != "localhost":
            return await self._names.resolve(host, port, family)
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
            )
            for kind, address in _LOOPBACK
        ]

    async def close(self) -> None:
        """Nothing is held."""
        await self._names.close()


class Poller:
    """GETs below one base URL over at most one connection of its own."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 1.0,
        max_bytes: int = 16 * 1024 * 1024,
        authorization: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._headers = {"Accept-Encoding": "identity"}
        if authorization is not None:
            self._headers["Authorization"] = authorization
        self.clock = clock
        self._session: aiohttp.ClientSession | None = None

    @property
    def shown_url(self) -> str:
        """The base URL without credentials, for messages."""
        parts = urlsplit(self._base)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, accept: str) -> Answer:
        """The body of a 200 to ``GET path``. Raises PollError for everything else."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._get(path, accept)
        except TimeoutError:
            raise PollError(SourceFault.TIMEOUT, f"{path}: no answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PollError(_fault(error), f"{path}: {_told(error)}") from None

    async def _get(self, path: str, accept: str) -> Answer:
        session = self._open_session()
        asked_at = self.clock()
        headers = {**self._headers, "Accept": accept}
        async with session.get(self._base + path, headers=headers, allow_redirects=False) as response:
            answered_at = self.clock()
            if response.status != 200:
                message = f"{path} answers {response.status}"
                raise PollError(SourceFault.HTTP_STATUS, message, response.status)
            body = await self._read(response, path)
        return Answer(body, asked_at, answered_at)

    async def _read(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > self._max_bytes:
                response.close()
                raise PollError(SourceFault.TOO_LARGE, f"{path} answers more than {self._max_bytes} bytes")
        return bytes(body)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=1, resolver=LoopbackResolver(), keepalive_timeout=_IDLE_S)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            )
        return self._session


# Our own want of files, ports or memory says nothing of the engine.
OWN_WANT = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM}
)

# First match counts. What is in none of them: failed.
_FAULTS: tuple[tuple[type[BaseException], SourceFault], ...] = (
    (aiohttp.ClientConnectionError, SourceFault.REFUSED),  # no name, no connection, no TLS, closed at once
    (aiohttp.ClientPayloadError, SourceFault.REFUSED),  # cut in the middle
    (ConnectionError, SourceFault.REFUSED),
    (aiohttp.ClientResponseError, SourceFault.UNPARSABLE),  # what came was no HTTP
)


def _fault(error: Exception) -> SourceFault:
    if isinstance(error, OSError) and error.errno in OWN_WANT:
        return SourceFault.FAILED
    return next((fault for kind, fault in _FAULTS if isinstance(error, kind)), SourceFault.FAILED)


def _told(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    return str(error) or type(error).__name__
