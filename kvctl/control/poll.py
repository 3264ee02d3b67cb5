"""One bounded GET to the engine, with the word for why it brought nothing.

Law 6: nothing slow. A deadline over the whole answer, a bound on its size while it is read, no redirects
(a stranger could choose where kvctl gets its telemetry), no decompression.
"""

import asyncio
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from kvctl.control.certificates import Trust
from kvctl.control.dialing import base_of, connector_to, trusting
from kvctl.core.outcomes import SourceFault


class PollError(Exception):
    """A poll that brought nothing, with the word for why, and the status of an answer other than 200."""

    def __init__(self, fault: SourceFault, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """A 200. Times are of the clock handed in."""

    body: bytes
    asked_at: float
    answered_at: float  # when the head came; the page was written before that


class Poller:
    """GETs below one base URL over at most one connection of its own. ``trust``: of an https engine."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 1.0,
        max_bytes: int = 16 * 1024 * 1024,
        authorization: str | None = None,
        trust: Trust | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = base_url.rstrip("/")
        self._base = base_of(base_url)
        self._trust = trust
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
        parts = urlsplit(self._url)
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
        options = trusting(self._url, self._trust)
        async with session.get(
            self._base + path, headers=headers, allow_redirects=False, **options
        ) as response:
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
            self._session = aiohttp.ClientSession(
                connector=connector_to(self._url, limit=1),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            )
        return self._session


# kvctl's own lack of descriptors, ports or memory says nothing of the engine
OWN_WANT = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM}
)

# the first match counts; what matches none is ``failed``
_FAULTS: tuple[tuple[type[BaseException], SourceFault], ...] = (
    (aiohttp.ClientConnectionError, SourceFault.REFUSED),  # no name, no connection, no TLS, closed at once
    (aiohttp.ClientPayloadError, SourceFault.REFUSED),  # cut in the middle
    (ConnectionError, SourceFault.REFUSED),
    (aiohttp.ClientResponseError, SourceFault.UNPARSABLE),  # what came was no HTTP
)


_LONGEST_WORDS = 200


def _fault(error: Exception) -> SourceFault:
    if isinstance(error, OSError) and error.errno in OWN_WANT:
        return SourceFault.FAILED
    return next((fault for kind, fault in _FAULTS if isinstance(error, kind)), SourceFault.FAILED)


def _told(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ClientResponseError):  # whose words quote what came, which may be anything
        return "what it answers is no HTTP"
    return " ".join(str(error).split())[:_LONGEST_WORDS] or type(error).__name__
