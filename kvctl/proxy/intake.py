"""Reading request bodies: bounded in size, in time, and over the whole process, without a second copy."""

import asyncio
import io
from typing import Self

from aiohttp import web

from kvctl.core.outcomes import ProxyFault
from kvctl.engines.base import Api
from kvctl.proxy import errors
from kvctl.proxy.errors import Answer
from kvctl.proxy.limits import BadRequest
from kvctl.proxy.seams import ProxyConfig, ProxyMetrics

_CLOSE = ("Connection", "close")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LEAST_RATE = 16 * 1024  # bytes a second; else a few idle clients could hold all the memory for bodies


class AnswerError(Exception):
    """The request goes no further; ``answer`` says why."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class ClientGoneError(Exception):
    """The client left before its handler was told."""


class Hold:
    """A request's body, and what it holds of the process's memory for bodies, in bytes."""

    __slots__ = ("_intake", "body", "size")

    def __init__(self, intake: "Intake") -> None:
        self._intake = intake
        self.body: bytes | None = None
        self.size = 0

    def grow(self, size: int) -> bool:
        """Hold at least ``size`` bytes; False: the process has no room for them."""
        more = size - self.size
        if more > 0:
            intake = self._intake
            if intake.held + more > intake.config.max_body_bytes_total:
                return False
            intake.held += more
            self.size = size
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()

    def drop(self) -> None:
        """The body is not needed any more."""
        self.body = None
        if self.size:
            self._intake.held -= self.size
            self.size = 0


class Intake:
    """Reads bodies. ``held`` is the sum of what all requests hold now."""

    def __init__(self, config: ProxyConfig, metrics: ProxyMetrics) -> None:
        self.config = config
        self._metrics = metrics
        self.held = 0

    def hold(self) -> Hold:
        """A hold for one request: a context manager that drops it at the latest when the block is left."""
        return Hold(self)

    async def read(self, request: web.BaseRequest, api: Api, hold: Hold) -> bytes:
        """The whole body, kept in ``hold`` too. Raises AnswerError; the rest of it is then left unread."""
        coding = request.headers.get("Transfer-Encoding")
        if coding is not None and coding.strip().lower() != "chunked":  # no other coding can be passed on
            self._metrics.fault(ProxyFault.MALFORMED_HTTP)
            raise AnswerError(errors.malformed_http("its Transfer-Encoding is not chunked alone", 501))
        content = request.content
        if content.is_eof():  # it came together with its head, as most do
            self._charge(content.total_bytes, api, hold)
            body = content.read_nowait()
        else:
            self._charge(request.content_length or 0, api, hold)
            self._invite(request)
            body = await self._read_on(request, api, hold)
        hold.body = body
        return body

    async def _read_on(self, request: web.BaseRequest, api: Api, hold: Hold) -> bytes:
        """Read what did not come with the head. BytesIO grows in place and needs no copy at the end."""
        buffer, size = io.BytesIO(), 0
        loop = asyncio.get_running_loop()
        patience = self.config.body_timeout
        began = loop.time()
        try:
            async with asyncio.timeout(patience) as timer:
                while chunk := await request.content.readany():
                    size += len(chunk)
                    self._charge(size, api, hold)
                    buffer.write(chunk)
                    slowest = began + patience + size / _LEAST_RATE
                    timer.reschedule(min(loop.time() + patience, slowest))
        except TimeoutError:
            self._metrics.fault(ProxyFault.BODY_TIMEOUT)
            raise AnswerError(self._timed_out(api)) from None
        except web.RequestPayloadError as error:
            self._metrics.fault(ProxyFault.MALFORMED_HTTP)
            raise AnswerError(errors.malformed_http(f"its body is broken: {error}")) from None
        except RuntimeError:  # aiohttp's reader says so when the connection is already gone
            if request.transport is not None:
                raise
            raise ClientGoneError from None
        return buffer.getvalue()

    def _charge(self, size: int, api: Api, hold: Hold) -> None:
        if size > self.config.max_body_bytes:
            raise self._too_large(api)
        if not hold.grow(size):
            raise self.no_memory(api)

    def _invite(self, request: web.BaseRequest) -> None:
        """Answer ``Expect: 100-continue``, once, unless the client did not wait for it."""
        expects = request.headers.get("Expect", "").lower() == "100-continue"
        if expects and request.version >= (1, 1) and not request.content.total_bytes and request.transport:
            request.transport.write(_CONTINUE)

    def _too_large(self, api: Api) -> AnswerError:
        self._metrics.fault(ProxyFault.BODY_TOO_LARGE)
        return AnswerError(errors.too_large(api, self.config.max_body_bytes))

    def no_memory(self, api: Api) -> AnswerError:
        """What is answered where there is no room for a body, or none for what has to be made of it."""
        self._metrics.fault(ProxyFault.BODY_MEMORY)
        message = (
            "There is no memory for this request's body now: other requests have it (max_body_bytes_total, "
            "or all that the process may take). Nothing was sent to the engine. Retry in a second."
        )
        answer = _plain(api, 503, message, "service_unavailable_error", "body_memory")
        headers = (*_without_retry(answer), *errors.retry_headers(1.0), _CLOSE)
        return AnswerError(Answer(answer.status, headers, answer.body))

    def _timed_out(self, api: Api) -> Answer:
        message = (
            f"The request body did not come: silence for {self.config.body_timeout:g} s, or less than "
            f"{_LEAST_RATE // 1024} KiB/s in all. Send it again."
        )
        answer = _plain(api, 408, message, "timeout_error", "body_timeout")
        return Answer(answer.status, (*_without_retry(answer), _CLOSE), answer.body)


def _plain(api: Api, status: int, message: str, kind: str, code: str) -> Answer:
    return errors.bad_request(
        api, BadRequest(status=status, message=message, type=kind, param=None, code=code)
    )


def _without_retry(answer: Answer) -> tuple[tuple[str, str], ...]:
    return tuple(header for header in answer.headers if header[0].lower() != "x-should-retry")
