"""A request's way to its engine and the answer's way back, metered or not.

Law 5: bytes pass unchanged: the body goes up as it is held, the engine's answer comes down as sent.
"""

import asyncio
from collections.abc import Callable

from kvctl.core.outcomes import ProxyFault
from kvctl.proxy import errors, headers
from kvctl.proxy.cors import Origins
from kvctl.proxy.errors import Answer
from kvctl.proxy.exchange import Exchange
from kvctl.proxy.first_event import refusal_in
from kvctl.proxy.flow import Relayed
from kvctl.proxy.intake import Hold
from kvctl.proxy.relay import ClientStalledError, ClientStream, Written, sever, written
from kvctl.proxy.response import ConnectError, Headers, Response, UpstreamError, UpstreamTimeoutError
from kvctl.proxy.seams import Backend, ProxyConfig, ProxyMetrics

RANK_HEADER = "X-data-parallel-rank"
_COMMENT = b": keep-alive\n\n"
_BROKE = "the connection to the engine broke; this answer is not complete"
_FAULTS = {ConnectError: ProxyFault.CONNECT_FAILED, UpstreamTimeoutError: ProxyFault.UPSTREAM_TIMEOUT}


class Carrier:
    """Sends requests up and answers down, for the whole data port. ``clock`` gives monotonic seconds."""

    def __init__(self, config: ProxyConfig, metrics: ProxyMetrics, clock: Callable[[], float]) -> None:
        self._config = config
        self._metrics = metrics
        self.clock = clock
        self.origins = Origins()

    async def ask(
        self, exchange: Exchange, backend: Backend, hold: Hold, rank: str | None = None
    ) -> Response:
        """Send the request, pinned to ``rank``. Raises UpstreamError: nothing was answered.

        The body is held until then, so that after a ConnectError it can be sent to another engine.
        """
        request = exchange.request
        lines = headers.for_engine(
            request.raw_headers, peer=request.remote or None, scheme=request.scheme, request_id=exchange.id
        )
        if rank is not None and RANK_HEADER not in request.headers:
            lines.append((RANK_HEADER.encode(), rank.encode()))
        response = await backend.upstream.request(request.method, exchange.match.target, lines, hold.body)
        hold.drop()
        self.origins.learn(request, response.headers)
        if exchange.extra or exchange.signs:
            response.add([*exchange.extra, *exchange.signs])
        return response

    def stream(self, exchange: Exchange, response: Response) -> ClientStream:
        """The client's end of an answer."""
        return ClientStream(exchange.request, response, exchange.id, self._config.client_write_timeout)

    async def pass_on(self, exchange: Exchange, backend: Backend, hold: Hold) -> Written:
        """Ask and relay what is not metered."""
        response = None
        try:
            response = await self.ask(exchange, backend, hold)
            exchange.relayed = Relayed(response, self.stream(exchange, response), self.clock)
            return await self.relay(exchange, exchange.relayed)
        except UpstreamError as error:
            return exchange.answer(self.failed(exchange, backend, error))
        except ClientStalledError:
            return await self.stalled(exchange)
        finally:
            if response is not None:
                response.abort()

    async def relay(self, exchange: Exchange, relayed: Relayed) -> Written:
        """Relay the answer to its end. Raises UpstreamError if it broke before a byte of it was sent on."""
        stream = relayed.stream
        relayed.response.attach(relayed)
        if relayed.error is not None and not stream.begun:
            raise relayed.error
        exchange.status = relayed.response.status
        stream.flush()
        if not stream.over:
            await self._follow(relayed)
        if relayed.error is None:
            return written(exchange.status, keep_alive=stream.keep_alive)
        self._count(relayed.error)
        return await self.break_off(exchange, _BROKE)

    async def _follow(self, relayed: Relayed) -> None:
        seconds = self._config.stream_heartbeat
        if not seconds or not relayed.stream.event_stream:
            await relayed.stream.follow()
            return
        heartbeat = Heartbeat(relayed, seconds)
        try:
            await relayed.stream.follow()
        finally:
            heartbeat.close()

    @property
    def peeks(self) -> bool:
        """Whether streams are held for their first event."""
        return bool(self._config.first_event_peek)

    async def refusal_in(self, response: Response) -> Answer | None:
        """The refusal that a 200 stream begins with, if any; asked only where ``peeks``."""
        return await refusal_in(response, self._config.first_event_peek)

    async def break_off(self, exchange: Exchange, message: str) -> Written:
        """Show the client that the answer is not whole: an error event where one fits, then a reset."""
        relayed, words = exchange.relayed, b""
        if relayed is not None:
            if relayed.stream.event_stream and exchange.status == 200 and relayed.at_border:
                words = errors.stream_error_event(exchange.match.api, message)
            await relayed.stream.sever(words)
        return Written(exchange.status, keep_alive=False)

    async def stalled(self, exchange: Exchange) -> Written:
        """The client took nothing for too long."""
        self._metrics.fault(ProxyFault.CLIENT_STALLED)
        if exchange.relayed is not None:
            exchange.relayed.response.abort()
        await sever(exchange.request, patience=0)
        return Written(exchange.status, keep_alive=False)

    def failed(self, exchange: Exchange, backend: Backend, error: UpstreamError) -> Answer:
        """The answer where the engine gave none; the backend is told if it could not be reached."""
        self._count(error)
        if isinstance(error, ConnectError) and not error.own:
            backend.connect_failed()
        if isinstance(error, UpstreamTimeoutError):
            return errors.gateway_timeout(exchange.match.api, str(error))
        return errors.bad_gateway(exchange.match.api, str(error))

    def _count(self, error: UpstreamError) -> None:
        self._metrics.fault(_FAULTS.get(type(error), ProxyFault.UPSTREAM_BROKE))


class Heartbeat:
    """Comments on one answer's stream after each ``seconds`` of silence, until closed.

    For intermediaries that cut a silent stream. A comment stands between two whole events, where every reader
    skips it, and only where the operator asked for it (``stream_heartbeat``).
    """

    __slots__ = ("_half", "_loop", "_relayed", "_silent", "_timer")

    def __init__(self, relayed: Relayed, seconds: float) -> None:
        self._relayed = relayed
        self._half = seconds / 2
        self._loop = asyncio.get_running_loop()
        relayed.stream.stirred = False
        self._silent = 0  # halves of the time
        self._timer = self._loop.call_later(self._half, self._look)

    def close(self) -> None:
        """No more."""
        self._timer.cancel()

    def _look(self) -> None:
        stream = self._relayed.stream
        self._silent = 0 if stream.stirred else self._silent + 1
        if self._silent >= 2 and self._relayed.at_border:
            stream.remark(_COMMENT)
            self._silent = 0
        stream.stirred = False
        self._timer = self._loop.call_later(self._half, self._look)


def tell(exchange: Exchange, backend: Backend, model: str) -> None:
    """Headers that say which engine answers, and under which name it knows an aliased model."""
    extra: Headers = [(b"x-kvctl-engine", backend.name.encode("ascii", "replace"))]
    own = backend.own_name(model)
    if own != model:
        extra.append((b"x-kvctl-model", own.encode("ascii", "backslashreplace")))
    exchange.extra = extra
    exchange.engine = backend.name
