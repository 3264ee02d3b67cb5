"""Routes that are relayed without being metered, and which of several engines answers them.

With one engine all of them go there. With several, the model that the body names decides; a stored response
is requested from the engine that made it; /v1/models is the merged list; everything else (/metrics, /version,
/health) goes to the engine that the query names (``?engine=NAME``), else to the first that serves.
"""

import asyncio
from urllib.parse import parse_qs, unquote

from aiohttp import web

from kvctl.proxy import errors
from kvctl.proxy.asking import ask
from kvctl.proxy.carrying import Carrier, tell
from kvctl.proxy.dispatch import Dispatch
from kvctl.proxy.errors import Answer
from kvctl.proxy.exchange import Exchange
from kvctl.proxy.headers import for_engine
from kvctl.proxy.intake import Hold, Intake
from kvctl.proxy.limits import BadRequest
from kvctl.proxy.merge import Entry, merged, model_list, one_model
from kvctl.proxy.peek import peek
from kvctl.proxy.planning import Planner, as_known
from kvctl.proxy.routes import Action, Match
from kvctl.proxy.seams import Backend

_JSON = ("Content-Type", "application/json")
_BODYLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_MODELS = "/v1/models"
_RESPONSES = "/v1/responses/"
_LIST_TIMEOUT_S = 2.0
_LIST_BYTES = 4 * 1024 * 1024
_METRICS = "/metrics"
_PAGE_BYTES = 16 * 1024 * 1024
_TEXT = ("Content-Type", "text/plain; version=0.0.4; charset=utf-8")


class Passing:
    """Relays what is not metered."""

    def __init__(self, dispatch: Dispatch, planner: Planner, carrier: Carrier, intake: Intake) -> None:
        self._dispatch = dispatch
        self._planner = planner
        self._carrier = carrier
        self._intake = intake
        self._slots = asyncio.Semaphore(intake.config.tokenize_concurrency)

    async def serve(self, exchange: Exchange) -> web.StreamResponse:
        """Answer a request of a passed route."""
        if self._dispatch.several and self._is_model_list(exchange):
            return await self._models(exchange)
        request = exchange.request
        with self._intake.hold() as hold:
            if request.body_exists or request.method not in _BODYLESS:
                await self._intake.read(request, exchange.match.api, hold)
            backend = self._backend_for(exchange, hold)
            if isinstance(backend, BadRequest):
                return exchange.answer(errors.bad_request(exchange.match.api, backend))
            if exchange.match.path == _METRICS and self._intake.config.face.overlays:
                return await self._overlaid(exchange, backend)
            if request.method != "POST":
                return await self._carrier.pass_on(exchange, backend, hold)
            async with self._slots:
                return await self._carrier.pass_on(exchange, backend, hold)

    async def _overlaid(self, exchange: Exchange, backend: Backend) -> web.StreamResponse:
        """The engine's metrics page with the gate's view laid over it."""
        status, page = await self._fetch(exchange, backend, _METRICS, _PAGE_BYTES)
        body = self._intake.config.face.page(page) if status == 200 else page
        if not status or body is None:
            return exchange.answer(errors.bad_gateway(exchange.match.api, "the engine gave no metrics page"))
        return exchange.answer(Answer(status, (_TEXT,), body))

    # --- which engine -------------------------------------------------------------------------------

    def _backend_for(self, exchange: Exchange, hold: Hold) -> Backend | BadRequest:
        if not self._dispatch.several:
            return self._dispatch.backends[0]
        model = peek(hold.body).model if hold.body else ""
        found = self._by_name(exchange.match) or self._by_maker(exchange.match)
        if found is None:
            knowing = [each for each in self._dispatch.backends if self._knows(each, exchange.request)]
            candidates = self._dispatch.candidates(model, knowing) if model else knowing
            if isinstance(candidates, BadRequest):
                return candidates
            found = self._dispatch.first(candidates)
        if isinstance(found, BadRequest):
            return found
        if hold.body and model:
            body = as_known(found, model, hold.body)
            if isinstance(body, BadRequest):
                return body
            hold.body = body
        tell(exchange, found, model)
        return found

    def _knows(self, backend: Backend, request: web.BaseRequest) -> bool:
        """Whether the engine has the route; for a preflight, with the method that it asks about."""
        return self._planner.match_of(backend, request).action is Action.PASS

    def _by_name(self, match: Match) -> Backend | BadRequest | None:
        """The engine that ``?engine=NAME`` names."""
        names = parse_qs(match.target.partition(b"?")[2].decode("latin-1")).get("engine")
        if not names:
            return None
        known = ", ".join(backend.name for backend in self._dispatch.backends)
        message = f"There is no engine {names[-1][:200]!r} here; there are {known}."
        return self._dispatch.named(names[-1]) or BadRequest(
            status=404, message=message, type="NotFoundError", param="engine", code=404
        )

    def _by_maker(self, match: Match) -> Backend | None:
        """The engine that made the stored response which the path names."""
        if not match.path.startswith(_RESPONSES):
            return None
        return self._dispatch.makers.of(match.path.removeprefix(_RESPONSES).partition("/")[0])

    # --- the models of all ----------------------------------------------------------------------------

    @staticmethod
    def _is_model_list(exchange: Exchange) -> bool:
        path = exchange.match.path
        return exchange.request.method in ("GET", "HEAD") and (
            path == _MODELS or path.startswith(_MODELS + "/")
        )

    async def _models(self, exchange: Exchange) -> web.StreamResponse:
        asked = [each for each in self._dispatch.backends if each.serving] or self._dispatch.backends
        answers = await asyncio.gather(*(self._list(exchange, backend) for backend in asked))
        good = [
            (body, backend.aliases)
            for backend, (status, body) in zip(asked, answers, strict=True)
            if status == 200
        ]
        if not good:
            return exchange.answer(_no_list(exchange, answers))
        return exchange.answer(_list_answer(exchange, merged(good)))

    async def _list(self, exchange: Exchange, backend: Backend) -> tuple[int, bytes]:
        return await self._fetch(exchange, backend, _MODELS, _LIST_BYTES)

    @staticmethod
    async def _fetch(exchange: Exchange, backend: Backend, path: str, most: int) -> tuple[int, bytes]:
        """Status and body of a small page of the engine's own; status 0: it gave none."""
        request = exchange.request
        lines = for_engine(
            request.raw_headers, peer=request.remote or None, scheme=request.scheme, request_id=exchange.id
        )
        target = path.encode()
        return await ask(backend.upstream, target, lines, most_bytes=most, timeout_s=_LIST_TIMEOUT_S)


def _list_answer(exchange: Exchange, entries: list[Entry]) -> Answer:
    model = exchange.match.path.removeprefix(_MODELS).lstrip("/")
    if not model:
        return Answer(200, (_JSON,), model_list(entries))
    body = one_model(entries, unquote(model))
    if body is not None:
        return Answer(200, (_JSON,), body)
    message = f"The model `{model[:200]}` does not exist."
    bad = BadRequest(status=404, message=message, type="NotFoundError", param="model", code=404)
    return errors.bad_request(exchange.match.api, bad)


def _no_list(exchange: Exchange, answers: list[tuple[int, bytes]]) -> Answer:
    """No engine gave its list: what the first of them said (a key is missing, say), else that none did."""
    for status, body in answers:
        if status:
            return Answer(status, (_JSON,), body)
    return errors.bad_gateway(exchange.match.api, "no engine told its models")


def not_served(match: Match) -> Answer:
    """The answer where a route is not served, with the way out."""
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
