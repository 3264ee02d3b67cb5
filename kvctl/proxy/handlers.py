"""What happens to a request: matched, read, counted, admitted, relayed, and accounted for.

Law 1: one lease, ended once: the lease is a context manager around the relay, on every path.
Law 2: check and charge in one step: ``keeper.admit`` does both; nothing here decides.
Law 5: bytes pass unchanged: the original body goes up, the engine's answer comes down as sent.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any, TypeVar

from aiohttp import web

from kvctl import logs
from kvctl.control.gatekeeper import LeaseHandle
from kvctl.core.events import Reject
from kvctl.core.outcomes import ChoiceReason, EndReason, ProxyFault
from kvctl.engines.base import Form
from kvctl.fleet.face import ready_with_headroom
from kvctl.proxy import errors
from kvctl.proxy.afterlife import Afterlife
from kvctl.proxy.background import BackgroundLease, not_sent
from kvctl.proxy.carrying import Carrier, tell
from kvctl.proxy.conversations import AnswerTail
from kvctl.proxy.dispatch import Dispatch, Way
from kvctl.proxy.errors import Answer
from kvctl.proxy.exchange import Exchange, id_of
from kvctl.proxy.flow import Along, Flight, IdWatch, Metered
from kvctl.proxy.intake import AnswerError, ClientGoneError, Hold, Intake
from kvctl.proxy.limits import BadRequest
from kvctl.proxy.passing import Passing, not_served
from kvctl.proxy.planning import Plan, Planner, Reading
from kvctl.proxy.relay import ClientStalledError, Written, sever
from kvctl.proxy.response import ConnectError, Response, UpstreamError, UpstreamTimeoutError
from kvctl.proxy.routes import HEALTHZ, Action, Match
from kvctl.proxy.seams import Backend, ProxyConfig, ProxyMetrics, Readiness

log = logs.get("proxy")
T = TypeVar("T")

_JSON = ("Content-Type", "application/json")
_WHOLE = (EndReason.FINISHED, EndReason.CAPPED)
_CUT = "the server is shutting down; this answer was cut off and is not complete"


class Handler:
    """Handles every request of the data port. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        backends: Sequence[Backend],
        config: ProxyConfig,
        metrics: ProxyMetrics,
        ready: Readiness,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._tenancy = config.tenancy
        self._metrics = metrics
        self._ready = ready
        self._clock = clock
        self._ways = Dispatch(backends, clock)
        self._planner = Planner(self._ways, config)
        self._carrier = Carrier(config, metrics, clock)
        self.intake = Intake(config, metrics)
        self._passing = Passing(self._ways, self._planner, self._carrier, self.intake)
        self.flights: set[Flight] = set()
        self.afterlife = Afterlife(config.background_responses, clock, config.retry_after_max)
        self._landed: asyncio.Future[None] | None = None  # somebody waits until no flight is left
        self._prefix = secrets.token_hex(6)
        self._numbers = count(1)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer ``request``, whatever happens."""
        match = self._planner.match(request.method, request.raw_path)
        lease_id = f"{self._prefix}-{next(self._numbers):x}"
        own_id, signs = id_of(request, lease_id), self._config.face.headers()
        exchange = Exchange(request, match, lease_id, own_id, self._clock(), self._carrier.origins, signs)
        try:
            if match.action is not Action.OWN and (stranger := self._tenancy.judge(request)):
                return exchange.answer(errors.bad_request(match.api, stranger))
            if match.action is Action.GENERATE:
                with self.intake.hold() as hold:
                    return await self._generate(exchange, hold)
            return await self._other(exchange)
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

    async def _other(self, exchange: Exchange) -> web.StreamResponse:
        """What is not generated."""
        match = exchange.match
        if match.action is Action.PASS:
            passed = await self._passing.serve(exchange)
            self.afterlife.passed(match)
            return passed
        if match.action is Action.OWN:
            return exchange.answer(self._health() if match.route is HEALTHZ else self._readiness(match))
        return exchange.answer(not_served(match))

    async def landed(self) -> None:
        """Return when no admitted request is in course."""
        while self.flights:
            self._landed = self._landed or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._landed)

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

    def _readiness(self, match: Match) -> Answer:
        ready, reason = ready_with_headroom(self._ready(), match.target.decode("latin-1"), self._config.face)
        return Answer(
            200 if ready else 503, (_JSON,), json.dumps({"ready": ready, "reason": reason}).encode()
        )

    # --- generation ---------------------------------------------------------------------------------

    async def _generate(self, exchange: Exchange, hold: Hold) -> web.StreamResponse:
        """Read, admit and run; on another engine where the chosen one certainly never got the request."""
        request, match = exchange.request, exchange.match
        body = await self.intake.read(request, match.api, hold)
        try:
            plan = await self._planner.plan(request, match, body)
        except MemoryError:  # the process is bounded too, and large bodies are taken apart
            raise self.intake.no_memory(match.api) from None
        del body  # ``hold`` lets it go once an engine has it
        if isinstance(plan, BadRequest):
            return exchange.answer(errors.bad_request(match.api, plan))
        _count_once(self._metrics, plan.readings)
        left: Plan | None = plan
        while left is not None:
            way, reading = self._choose(exchange, left, again=left is not plan)
            verdict = await self._admit(exchange, way, reading)
            if isinstance(verdict, Answer):
                return exchange.answer(verdict)
            with verdict as admitted, self._let_in(exchange, way, reading, left, admitted) as lease:
                hold.body = reading.body
                run = self._run(exchange, way, lease, hold, last=len(left.readings) == 1)
                drains = way.backend.drains
                if isinstance(lease, BackgroundLease):
                    done = await lease.carried(run, to_the_end=drains)
                else:
                    done = await (self._to_the_end(run) if drains else run)
            if not lease.ended:  # it is generated on in the background
                exchange.end = None
            metered, reader = exchange.metered, way.backend.reader
            if metered is not None:  # what the answer told of its request, for counting what comes
                reader.learn(reading.parsed, metered.prompt_tokens)
                if metered.tail is not None and metered.end in _WHOLE:
                    await reader.remember(reading.parsed, metered.tail.document())
            if done is not None:
                return done
            left = left.without(way.backend)
        raise AssertionError("the last engine's answer is an answer")

    def _choose(self, exchange: Exchange, plan: Plan, *, again: bool) -> tuple[Way, Reading]:
        reading, several = plan.readings[0], self._ways.several
        if not several and len(reading.backend.lanes) == 1:  # by far the most
            return Way(reading.backend, reading.backend.lanes[0], ChoiceReason.ONLY), reading
        way = self._ways.choose(plan.shapes(), plan.prefixes, rank=plan.rank)
        if several:
            tell(exchange, way.backend, plan.model)
        self._metrics.chosen(
            way.backend.name,
            ChoiceReason.MAKER if plan.bound else ChoiceReason.MOVED if again else way.reason,
        )
        reading = plan.of(way.backend)
        exchange.match = reading.match
        return way, reading

    async def _admit(self, exchange: Exchange, way: Way, reading: Reading) -> LeaseHandle | Answer:
        """The request's lease, or what it is answered."""
        parsed, api = reading.parsed, exchange.match.api
        if parsed.background and (forbidden := self.afterlife.forbidden(api)) is not None:
            return forbidden
        shape, keeper = parsed.shape, way.lane.keeper
        exchange.stream, exchange.keeps = parsed.stream, parsed.begun is not None
        exchange.prompt_tokens = sum(shape.prompts)
        exchange.asked, size = self._clock(), len(reading.body)
        if parsed.background:
            no_place = self.afterlife.refusal(exchange.lease_id, shape)
            asked = keeper.admit(exchange.lease_id, shape, exchange.id, size, no_place=no_place)
            verdict = await self.afterlife.coming(asked)
        else:
            verdict = await keeper.admit(exchange.lease_id, shape, exchange.id, size)
        if isinstance(verdict, Reject):
            self._decided(exchange, verdict)
            return self._refused(exchange, verdict)
        return verdict  # nothing between here and its ``with``

    def _let_in(
        self, exchange: Exchange, way: Way, reading: Reading, plan: Plan, lease: LeaseHandle
    ) -> LeaseHandle:
        """What is noted of an admitted request, and its lease from now on. Inside it: nothing loses it."""
        self._decided(exchange, lease)
        self._config.face.admitted()
        prefixes = reading.parsed.shape.prefixes or plan.prefixes
        if prefixes and any(prefixes):
            way.lane.warm.took(prefixes, way.lane.keeper.gate.scales().capacity_tokens)
        if reading.parsed.background:
            return self.afterlife.taken(lease, reading, exchange.request.headers)
        return lease

    def _decided(self, exchange: Exchange, verdict: LeaseHandle | Reject) -> None:
        self._metrics.decided(self._clock() - exchange.asked - (verdict.waited_s or 0.0))

    async def _run(
        self, exchange: Exchange, way: Way, lease: LeaseHandle, hold: Hold, *, last: bool
    ) -> web.StreamResponse | None:
        """Ask and relay for an admitted request. Its lease ends with the word for what happened.

        None: the engine could not be reached, nothing was sent, and this was not the ``last`` that may serve.
        """
        flight, response, carrier = Flight(), None, self._carrier
        self.flights.add(flight)
        try:
            response = await carrier.ask(exchange, way.backend, hold, way.lane.rank)
            return await self._relay(exchange, way, lease, response)
        except UpstreamError as error:
            _end(exchange, lease, _word_for(error, lease))
            answer = carrier.failed(exchange, way.backend, error)
            if isinstance(error, ConnectError) and not (last or error.own):
                return None
            return exchange.answer(answer)
        except ClientStalledError:
            _end(exchange, lease, EndReason.CLIENT_STALLED)
            return await carrier.stalled(exchange)
        except asyncio.CancelledError:
            if response is not None:
                response.abort()
            _end(exchange, lease, EndReason.SHUTDOWN if flight.cut_short else EndReason.CLIENT_GONE)
            if not flight.cut_short:
                raise
            return await self._cut(exchange)
        finally:
            self.flights.discard(flight)
            if self._landed is not None and not self.flights:
                self._landed.set_result(None)
                self._landed = None
            if response is not None:
                response.abort()
            if exchange.metered is not None:
                exchange.end = exchange.metered.end

    async def _relay(self, exchange: Exchange, way: Way, lease: LeaseHandle, response: Response) -> Written:
        carrier, tail = self._carrier, None
        watch: Along | None = None
        if carrier.peeks and (refusal := await carrier.refusal_in(response)):
            _end(exchange, lease, EndReason.ENGINE_REFUSED)
            return exchange.answer(refusal)
        stream = carrier.stream(exchange, response)
        if exchange.keeps:
            tail = AnswerTail(stream=exchange.stream)
        if self._ways.several:
            watch = self._watch(exchange, way)
        if isinstance(lease, BackgroundLease):
            watch = lease.reading(lambda name: self._ways.makers.made(name, way.backend))
        metered = Metered(response, stream, self._clock, lease, watch=watch, tail=tail)
        exchange.relayed = exchange.metered = metered
        return await carrier.relay(exchange, metered)

    async def _to_the_end(self, run: Coroutine[Any, Any, T]) -> T:
        """A client that leaves is not told to the engine: its answer is read on, and the lease kept."""
        task = asyncio.create_task(run, name="kvctl-drained-answer")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await _over(task)
            raise

    def _watch(self, exchange: Exchange, way: Way) -> IdWatch | None:
        """Of several engines, remember which one keeps a stored response."""
        route = exchange.match.route
        if route is None or route.form is not Form.RESPONSES:
            return None
        return IdWatch(lambda response_id: self._ways.makers.made(response_id, way.backend))

    async def _cut(self, exchange: Exchange) -> Written:
        """The drain's end came first: a truthful error where nothing was sent yet, else a visible break."""
        if exchange.request.writer.output_size == 0:
            return exchange.answer(errors.cut_short(exchange.match.api))
        return await self._carrier.break_off(exchange, _CUT)

    # --- answers ------------------------------------------------------------------------------------

    def _refused(self, exchange: Exchange, reject: Reject) -> Answer:
        route = exchange.match.route
        exchange.reject = reject.reason
        return errors.refusal(
            exchange.match.api,
            reject,
            self._config.overload_status,
            retry_after_max_s=self._config.retry_after_max,
            form=Form.OTHER if route is None else route.form,
        )


def _count_once(metrics: ProxyMetrics, readings: Sequence[Reading]) -> None:
    """Bodies that were read for several engines at once were counted once."""
    for parsed in {id(reading.parsed): reading.parsed for reading in readings}.values():
        metrics.counted(parsed.count_method, parsed.count_seconds)


def _word_for(error: UpstreamError, lease: LeaseHandle) -> EndReason:
    """How a lease ends whose request got no answer."""
    if isinstance(error, ConnectError):
        not_sent(lease)
    return EndReason.TIMEOUT if isinstance(error, UpstreamTimeoutError) else EndReason.ENGINE_ERROR


async def _over(task: "asyncio.Task[Any]") -> None:
    """Return when ``task`` is over; whoever cancels this cancels it."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _end(exchange: Exchange, lease: LeaseHandle, reason: EndReason) -> None:
    """End the lease, with what was read of the answer if there was one."""
    if exchange.metered is not None:
        exchange.metered.close(reason)
    else:
        exchange.end = reason
        lease.end(reason)
