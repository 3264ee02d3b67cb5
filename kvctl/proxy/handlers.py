"""What happens to a request: matched, read, counted, admitted, relayed, and accounted for.

Law 1: one lease, ended once: the lease is a context manager around the relay, on every path.
Law 2: check and charge in one step: ``keeper.admit`` does both; nothing here decides.
Law 5: bytes pass unchanged: the original body goes up, the engine's answer comes down as sent.
"""

import asyncio
import json
import secrets
from collections.abc import Callable
from itertools import count

from aiohttp import web

from kvctl import logs
from kvctl.control.gatekeeper import LeaseHandle
from kvctl.core.events import Reject
from kvctl.core.outcomes import EndReason, ProxyFault
from kvctl.engines.base import Route
from kvctl.proxy import errors, headers
from kvctl.proxy.bodies import Parsed
from kvctl.proxy.cors import Origins
from kvctl.proxy.errors import Answer
from kvctl.proxy.exchange import Exchange
from kvctl.proxy.flow import Flight, Metered, Relayed
from kvctl.proxy.intake import AnswerError, ClientGoneError, Hold, Intake
from kvctl.proxy.limits import BadRequest
from kvctl.proxy.relay import ClientStalledError, ClientStream, Written, sever
from kvctl.proxy.response import ConnectError, Response, UpstreamError, UpstreamTimeoutError
from kvctl.proxy.routes import HEALTHZ, Action, Match, Router
from kvctl.proxy.seams import Backend, ProxyConfig, ProxyMetrics, Readiness

log = logs.get("proxy")

_JSON = ("Content-Type", "application/json")
_BODYLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_CUT = "the server is shutting down; this answer was cut off and is not complete"
_BROKE = "the connection to the engine broke; this answer is not complete"


class Handler:
    """Handles every request of the data port. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        backend: Backend,
        config: ProxyConfig,
        metrics: ProxyMetrics,
        ready: Readiness,
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._config = config
        self._metrics = metrics
        self._ready = ready
        self._clock = clock
        self._router = Router(
            backend.engine.routes,
            opened=config.opened,
            admin_opened=config.admin_opened,
            base_path=config.base_path,
        )
        self.intake = Intake(config, metrics)
        self.flights: set[Flight] = set()
        self.idle = asyncio.Event()  # no admitted request is in course
        self.idle.set()
        self._origins = Origins()
        self._pass_slots = asyncio.Semaphore(config.tokenize_concurrency)
        self._prefix = secrets.token_hex(6)
        self._numbers = count(1)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer ``request``, whatever happens."""
        match = self._router.match(request.method, request.raw_path)
        lease_id = f"{self._prefix}-{next(self._numbers):x}"
        exchange = Exchange(request, match, lease_id, self._clock(), self._origins)
        try:
            return await self._dispatch(exchange)
        except AnswerError as error:
            return exchange.answer(error.answer)
        except ClientGoneError:
            self._metrics.fault(ProxyFault.CLIENT_GONE)
            return Written(0, keep_alive=False)
        except asyncio.CancelledError:
            self._metrics.fault(ProxyFault.CLIENT_GONE)
            raise
        except Exception:
            log.exception("request %s failed by a defect of kvctl", exchange.id)
            self._metrics.fault(ProxyFault.DEFECT)
            return await self._after_defect(exchange)
        finally:
            self._metrics.served(exchange.record(self._clock()))

    async def _dispatch(self, exchange: Exchange) -> web.StreamResponse:
        match = exchange.match
        if match.action is Action.GENERATE and match.route is not None:
            return await self._generate(exchange, match.route)
        if match.action is Action.PASS:
            return await self._pass(exchange)
        if match.action is Action.OWN:
            return exchange.answer(self._health() if match.route is HEALTHZ else self._readiness())
        return exchange.answer(_not_served(match))

    async def _after_defect(self, exchange: Exchange) -> Written:
        if exchange.request.writer.output_size:
            await sever(exchange.request)
            return Written(exchange.status, keep_alive=False)
        message = "kvctl failed on this request; its log says more."
        bad = BadRequest(status=500, message=message, type="internal_error", param=None, code=500)
        return exchange.answer(errors.bad_request(exchange.match.api, bad))

    # --- own routes ---------------------------------------------------------------------------------

    def _health(self) -> Answer:
        """Alive, whatever the engine and the budget do."""
        return Answer(200, (_JSON,), b'{"status":"ok"}')

    def _readiness(self) -> Answer:
        ready, reason = self._ready()
        return Answer(
            200 if ready else 503, (_JSON,), json.dumps({"ready": ready, "reason": reason}).encode()
        )

    # --- passed routes ------------------------------------------------------------------------------

    async def _pass(self, exchange: Exchange) -> web.StreamResponse:
        request = exchange.request
        with self.intake.hold() as hold:
            if request.body_exists or request.method not in _BODYLESS:
                await self.intake.read(request, exchange.match.api, hold)
            if request.method != "POST":
                return await self._passed(exchange, hold)
            async with self._pass_slots:
                return await self._passed(exchange, hold)

    async def _passed(self, exchange: Exchange, hold: Hold) -> web.StreamResponse:
        response = None
        try:
            response = await self._ask(exchange, hold)
            exchange.relayed = Relayed(response, self._stream(exchange, response), self._clock)
            return await self._relay(exchange, exchange.relayed)
        except UpstreamError as error:
            return exchange.answer(self._upstream_failed(exchange, error))
        except ClientStalledError:
            return await self._stalled(exchange)
        finally:
            if response is not None:
                response.abort()

    # --- generation ---------------------------------------------------------------------------------

    async def _generate(self, exchange: Exchange, route: Route) -> web.StreamResponse:
        with self.intake.hold() as hold:
            body = await self.intake.read(exchange.request, route.api, hold)
            parsed = await self._backend.reader.read(route, exchange.request.headers, body)
            del body  # ``hold`` lets it go once the engine has it
            if isinstance(parsed, BadRequest):
                return exchange.answer(errors.bad_request(route.api, parsed))
            verdict = await self._admit(exchange, parsed)
            if isinstance(verdict, Reject):
                return exchange.answer(self._refusal(exchange, verdict))
            with verdict as lease:
                return await self._run(exchange, lease, hold)

    async def _admit(self, exchange: Exchange, parsed: Parsed) -> LeaseHandle | Reject:
        self._metrics.counted(parsed.count_method, parsed.count_seconds)
        exchange.stream = parsed.stream
        exchange.prompt_tokens = sum(parsed.shape.prompts)
        asked = self._clock()
        verdict = await self._backend.keeper.admit(exchange.lease_id, parsed.shape)
        self._metrics.decided(self._clock() - asked)
        if isinstance(verdict, Reject):
            exchange.reject = verdict.reason
        return verdict

    async def _run(self, exchange: Exchange, lease: LeaseHandle, hold: Hold) -> web.StreamResponse:
        """Ask and relay for an admitted request. Its lease ends with the word for what happened."""
        flight, response = Flight(), None
        self.flights.add(flight)
        self.idle.clear()
        try:
            response = await self._ask(exchange, hold)
            stream = self._stream(exchange, response)
            exchange.relayed = Metered(response, stream, self._clock, lease)
            return await self._relay(exchange, exchange.relayed)
        except UpstreamError as error:
            timed_out = isinstance(error, UpstreamTimeoutError)
            _end(exchange, lease, EndReason.TIMEOUT if timed_out else EndReason.ENGINE_ERROR)
            return exchange.answer(self._upstream_failed(exchange, error))
        except ClientStalledError:
            _end(exchange, lease, EndReason.CLIENT_STALLED)
            return await self._stalled(exchange)
        except asyncio.CancelledError:
            if response is not None:
                response.abort()
            _end(exchange, lease, EndReason.SHUTDOWN if flight.cut_short else EndReason.CLIENT_GONE)
            if not flight.cut_short:
                raise
            return await self._cut(exchange)
        finally:
            self.flights.discard(flight)
            if not self.flights:
                self.idle.set()
            if response is not None:
                response.abort()
            if isinstance(exchange.relayed, Metered):
                exchange.end = exchange.relayed.end

    async def _cut(self, exchange: Exchange) -> Written:
        """The drain's end came first: a truthful error where nothing was sent yet, else a visible break."""
        if exchange.request.writer.output_size == 0:
            return exchange.answer(errors.cut_short(exchange.match.api))
        return await self._break_off(exchange, _CUT)

    # --- the way to the engine and back -------------------------------------------------------------

    async def _ask(self, exchange: Exchange, hold: Hold) -> Response:
        """Send the request. Raises UpstreamError while nothing was answered."""
        request = exchange.request
        lines = headers.for_engine(
            request.raw_headers, peer=request.remote or None, scheme=request.scheme, request_id=exchange.id
        )
        upstream = self._backend.upstream
        response = await upstream.request(request.method, exchange.match.target, lines, hold.body)
        hold.drop()
        self._origins.learn(request, response.headers)
        return response

    def _stream(self, exchange: Exchange, response: Response) -> ClientStream:
        return ClientStream(exchange.request, response, exchange.id, self._config.client_write_timeout)

    async def _relay(self, exchange: Exchange, relayed: Relayed) -> Written:
        """Raises UpstreamError if the answer broke before a byte of it was sent on."""
        stream = relayed.stream
        relayed.response.attach(relayed)
        if relayed.error is not None and not stream.begun:
            raise relayed.error
        exchange.status = relayed.response.status
        stream.flush()
        await stream.follow()
        if relayed.error is None:
            return Written(exchange.status, keep_alive=stream.keep_alive)
        self._count_upstream_fault(relayed.error)
        return await self._break_off(exchange, _BROKE)

    async def _break_off(self, exchange: Exchange, message: str) -> Written:
        """Let the client see that the answer is not whole: an error event where one fits, then a reset."""
        relayed, words = exchange.relayed, b""
        if relayed is not None:
            if relayed.stream.event_stream and exchange.status == 200 and relayed.at_border:
                words = errors.stream_error_event(exchange.match.api, message)
            await relayed.stream.sever(words)
        return Written(exchange.status, keep_alive=False)

    async def _stalled(self, exchange: Exchange) -> Written:
        self._metrics.fault(ProxyFault.CLIENT_STALLED)
        if exchange.relayed is not None:
            exchange.relayed.response.abort()
        await sever(exchange.request, patience=0)
        return Written(exchange.status, keep_alive=False)

    # --- answers ------------------------------------------------------------------------------------

    def _refusal(self, exchange: Exchange, reject: Reject) -> Answer:
        return errors.refusal(
            exchange.match.api,
            reject,
            self._config.overload_status,
            retry_after_max_s=self._config.retry_after_max,
        )

    def _upstream_failed(self, exchange: Exchange, error: UpstreamError) -> Answer:
        self._count_upstream_fault(error)
        if isinstance(error, ConnectError) and not error.own:
            self._backend.keeper.connect_failed()
        if isinstance(error, UpstreamTimeoutError):
            return errors.gateway_timeout(exchange.match.api, str(error))
        return errors.bad_gateway(exchange.match.api, str(error))

    def _count_upstream_fault(self, error: UpstreamError) -> None:
        words = {ConnectError: ProxyFault.CONNECT_FAILED, UpstreamTimeoutError: ProxyFault.UPSTREAM_TIMEOUT}
        self._metrics.fault(words.get(type(error), ProxyFault.UPSTREAM_BROKE))


def _end(exchange: Exchange, lease: LeaseHandle, reason: EndReason) -> None:
    """End the lease, with what was read of the answer if there was one."""
    if isinstance(exchange.relayed, Metered):
        exchange.relayed.close(reason)
    else:
        exchange.end = reason
        lease.end(reason)


def _not_served(match: Match) -> Answer:
    status, kind = (405, "MethodNotAllowed") if match.action is Action.NOT_ALLOWED else (404, "NotFoundError")
    shown = match.path if len(match.path) <= 200 else match.path[:200] + "..."
    bad = BadRequest(
        status=status,
        message=f"{shown} is not served here: {match.hint}.",
        type=kind,
        param=None,
        code=status,
    )
    answer = errors.bad_request(match.api, bad)
    if not match.allow:
        return answer
    return Answer(answer.status, (*answer.headers, ("Allow", match.allow)), answer.body)
