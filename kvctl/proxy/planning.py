"""Which engines may serve a request by its model's name, and what it asks of each of them.

Law 4: a 400 needs proof. A body that one engine's reader refuses is refused only where all readers do.
A body is read and counted once for all engines that read alike: same adapter, same tokenizer, same model.
"""

from collections.abc import Sequence
from functools import partial

import msgspec
from aiohttp import web
from msgspec.structs import replace

from kvctl.core.claim import Prefix, Shape
from kvctl.engines.base import Form, Route
from kvctl.proxy import jsonbody
from kvctl.proxy.bodies import Parsed
from kvctl.proxy.carrying import RANK_HEADER
from kvctl.proxy.dispatch import Dispatch
from kvctl.proxy.limits import BadRequest
from kvctl.proxy.peek import Peek, peek, renamed
from kvctl.proxy.routes import Action, LiveRouter, Match
from kvctl.proxy.seams import Backend, ProxyConfig
from kvctl.proxy.structure import has_too_many_parts, too_many_parts


class Reading(msgspec.Struct, frozen=True):
    """A request as one engine is to receive it, and what it asks of that engine."""

    backend: Backend
    match: Match
    body: bytes
    parsed: Parsed


class Plan(msgspec.Struct, frozen=True):
    """Who may serve a request. ``model`` as the caller wrote it; ``rank`` as the caller pinned it."""

    model: str
    prefixes: tuple[Prefix, ...]
    rank: str | None
    readings: tuple[Reading, ...]
    bound: bool = False  # only one engine holds what the request continues

    def shapes(self) -> list[tuple[Backend, Shape]]:
        """Each engine with the shape that its gates are to judge."""
        return [(reading.backend, reading.parsed.shape) for reading in self.readings]

    def of(self, backend: Backend) -> Reading:
        """The request as that engine reads it."""
        for reading in self.readings:
            if reading.backend is backend:
                return reading
        raise LookupError(backend.name)

    def without(self, backend: Backend) -> "Plan | None":
        """The plan without an engine; None: no other is left."""
        if len(self.readings) == 1:
            return None if self.readings[0].backend is backend else self
        left = tuple([reading for reading in self.readings if reading.backend is not backend])
        return Plan(self.model, self.prefixes, self.rank, left) if left else None


class Planner:
    """Plans for all metered requests of the data port."""

    def __init__(self, dispatch: Dispatch, config: ProxyConfig) -> None:
        self._dispatch = dispatch
        self._several = dispatch.several
        self._tenancy = config.tenancy
        self._routers = {
            backend.name: LiveRouter(
                backend.engine,
                opened=config.opened,
                admin_opened=config.admin_opened,
                base_path=config.base_path,
            )
            for backend in dispatch.backends
        }
        self._first_router = self._routers[dispatch.backends[0].name]

    def match(self, method: str, target: str) -> Match:
        """What a request line means to the first engine that knows the route."""
        first = self._first_router.match(method, target)
        if first.action is not Action.NOT_FOUND or not self._several:
            return first
        routers = tuple(self._routers.values())[1:]
        others = (router.match(method, target) for router in routers)
        return next((match for match in others if match.action is not Action.NOT_FOUND), first)

    def match_of(self, backend: Backend, request: web.BaseRequest) -> Match:
        """What a request line means to one engine."""
        return self._routers[backend.name].match(request.method, request.raw_path)

    async def plan(self, request: web.BaseRequest, match: Match, body: bytes) -> Plan | BadRequest:
        """Who may serve a request whose ``match`` some engine meters; or the refusal to answer with."""
        large = len(body) > jsonbody.LARGE and match.route is not None and match.route.form is not Form.AUDIO
        if large and await jsonbody.in_thread(has_too_many_parts, body):
            return too_many_parts()
        if self._several:
            return await self._plan_several(request, body)
        backend = self._dispatch.backends[0]
        parsed = await backend.reader.read(_metered(match), request.headers, body)
        if isinstance(parsed, BadRequest):
            return parsed
        reading = (Reading(backend, match, body, self._attributed(parsed, request)),)
        if len(backend.lanes) == 1:
            return Plan("", (), None, reading)
        return Plan("", (await _peeked(body)).prefixes, request.headers.get(RANK_HEADER), reading)

    async def _plan_several(self, request: web.BaseRequest, body: bytes) -> Plan | BadRequest:
        seen, backends = await _peeked(body), self._dispatch.backends
        maker = self._dispatch.makers.of(seen.previous) if seen.previous else None
        matches = {backend: self.match_of(backend, request) for backend in backends}
        knowing = [backend for backend, each in matches.items() if each.action is Action.GENERATE]
        candidates = [maker] if maker in knowing else self._dispatch.candidates(seen.model, knowing)
        if isinstance(candidates, BadRequest):
            return candidates
        metering = [(backend, matches[backend]) for backend in candidates]
        readings = await self._readings(metering, seen.model, request, body)
        if isinstance(readings, BadRequest):
            return readings
        rank = request.headers.get(RANK_HEADER)
        return Plan(seen.model, seen.prefixes, rank, readings, bound=maker is not None)

    async def _readings(
        self, metering: Sequence[tuple[Backend, Match]], model: str, request: web.BaseRequest, body: bytes
    ) -> tuple[Reading, ...] | BadRequest:
        """The body as each engine reads it; those that serve now read first, since their counting works."""
        read: dict[tuple[str, str, str], tuple[bytes, Parsed | BadRequest]] = {}
        for backend, match in sorted(metering, key=lambda each: not each[0].serving):
            key = (backend.engine.name, backend.tokenizer, backend.own_name(model))
            if key not in read:
                read[key] = await self._read(backend, _metered(match), model, request, body)
        made: list[Reading] = []
        for backend, match in metering:
            sent, parsed = read[(backend.engine.name, backend.tokenizer, backend.own_name(model))]
            if isinstance(parsed, Parsed):
                made.append(Reading(backend, match, sent, parsed))
        refused = (parsed for _, parsed in read.values() if isinstance(parsed, BadRequest))
        return tuple(made) or next(refused)

    async def _read(
        self, backend: Backend, route: Route, model: str, request: web.BaseRequest, body: bytes
    ) -> tuple[bytes, Parsed | BadRequest]:
        if len(body) > jsonbody.LARGE and backend.own_name(model) != model:
            sent = await jsonbody.in_thread(partial(as_known, backend, model), body)
        else:
            sent = as_known(backend, model, body)
        if isinstance(sent, BadRequest):
            return body, sent
        parsed = await backend.reader.read(route, request.headers, sent)
        return sent, parsed if isinstance(parsed, BadRequest) else self._attributed(parsed, request)

    def _attributed(self, parsed: Parsed, request: web.BaseRequest) -> Parsed:
        """``parsed`` with its tenant, and the priority that it asks for."""
        shape = self._tenancy.attribute(parsed.shape, request.headers)
        return parsed if shape is parsed.shape else replace(parsed, shape=shape)


async def _peeked(body: bytes) -> Peek:
    """``peek``; in a thread where the body is large."""
    return peek(body) if len(body) <= jsonbody.LARGE else await jsonbody.in_thread(peek, body)


def _metered(match: Match) -> Route:
    if match.route is None:
        raise AssertionError("a metered match has its route")
    return match.route


def as_known(backend: Backend, model: str, body: bytes) -> bytes | BadRequest:
    """The body as the engine is to receive it: as sent, unless ``model`` is one of its aliases."""
    own = backend.own_name(model)
    if own == model:
        return body
    changed = renamed(body, own)
    if changed is None:
        message = f"The model {model[:200]!r} is an alias, which is understood in a body of UTF-8 JSON alone."
        return BadRequest(message=message, param="model")
    return changed
