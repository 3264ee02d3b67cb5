"""The side of the admin API that changes something: each change has an actor and a line in the audit log."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from kvctl.admin import documents
from kvctl.admin.answers import ApiError, Callers, body_of, if_match, switch
from kvctl.admin.desk import Change, Desk
from kvctl.admin.levels import LogLevels
from kvctl.admin.pace import Pace
from kvctl.admin.port import AdminPort, DaemonStatus
from kvctl.admin.readings import with_revision
from kvctl.control.journal import Journal
from kvctl.core.decisions import Scales, Story
from kvctl.core.hindsight import look_back, with_margin, with_policy
from kvctl.core.outcomes import Policy
from kvctl.core.overrides import DEFAULT_TTL_S, REASON_MAX, Knob, OverrideError, Refusal, Value
from kvctl.core.status import GateStatus
from kvctl.settings.errors import SettingsError

_OVERRIDE = ("value", "ttl_s", "reason")
_BYPASS = ("ttl_s", "reason")
_DRAIN = ("reason",)
_LEVEL = ("level", "ttl_s", "reason")
_RELEASE = ("for_s", "reason")
RELEASE_MAX_S = 3600.0
_LOOK_BACK_S = 300.0  # of the decision log, for a dry run


class Changes:
    """Handlers for overrides, traffic states, reload, log level and the release of cards."""

    def __init__(
        self,
        port: AdminPort,
        desk: Desk,
        journal: Journal,
        levels: LogLevels,
        *,
        callers: Callers,
        pace: Pace,
    ) -> None:
        self._port = port
        self._desk = desk
        self._journal = journal
        self._levels = levels
        self._callers = callers
        self._pace = pace

    def routes(self) -> list[web.RouteDef]:
        """The routes."""
        return [
            web.put("/v1/overrides/{knob}", self._set),
            web.delete("/v1/overrides/{knob}", self._unset),
            web.post("/v1/drain", self._drain),
            web.post("/v1/undrain", self._undrain),
            web.post("/v1/bypass", self._bypass),
            web.post("/v1/resume", self._resume),
            web.post("/v1/reload", self._reload),
            web.post("/v1/loglevel", self._level),
            web.post("/v1/gpu/release", self._release),
        ]

    # --- overrides ----------------------------------------------------------------------------------

    async def _set(self, request: web.Request) -> web.Response:
        body, wanted = await body_of(request, _OVERRIDE, needed="value"), if_match(request)
        knob = request.match_info["knob"]
        if switch(request, "dry_run"):
            change = self._desk.preview(knob, body["value"], if_match=wanted)
            stories, status = await self._journal.last(_LOOK_BACK_S), self._port.status()
            return with_revision(
                await self._pace.in_thread(_dry_run, change, status, stories, self._desk.revision)
            )
        made = await self._desk.set(
            await self._callers.of(request),
            knob,
            body["value"],
            ttl_s=body.get("ttl_s", DEFAULT_TTL_S),
            reason=body.get("reason"),
            if_match=wanted,
        )
        return _changed(made)

    async def _unset(self, request: web.Request) -> web.Response:
        wanted, who = if_match(request), await self._callers.of(request)
        return _changed(await self._desk.unset(who, request.match_info["knob"], if_match=wanted))

    # --- traffic ------------------------------------------------------------------------------------

    async def _drain(self, request: web.Request) -> web.Response:
        return await self._traffic(request, draining=True)

    async def _undrain(self, request: web.Request) -> web.Response:
        return await self._traffic(request, draining=False)

    async def _traffic(self, request: web.Request, *, draining: bool) -> web.Response:
        engine = request.query.get("engine")
        if engine is not None and engine not in (known := self._port.status().engines):
            raise ApiError(404, "not_found", f"there is no engine {engine!r}; there are {', '.join(known)}")
        reason = _reason(await body_of(request, _DRAIN)) if draining else ""
        who = await self._callers.of(request)
        self._port.drain(draining=draining, engine=engine)
        if draining:
            self._desk.drains.order(engine, who.user, reason)
        else:
            self._desk.drains.lift(engine, self._port.status().engines)
        told = {} if engine is None else {"engine": engine}
        why = {"reason": reason} if reason else {}
        kept = await self._desk.drained(who, "drain" if draining else "undrain", **told, **why)
        return web.json_response({"mode": self._mode(), "kept": kept, **told})

    async def _bypass(self, request: web.Request) -> web.Response:
        body, who = await body_of(request, _BYPASS), await self._callers.of(request)
        change = await self._desk.set(
            who,
            Knob.ENFORCE,
            0.0,
            ttl_s=body.get("ttl_s", DEFAULT_TTL_S),
            reason=body.get("reason"),
            if_match=None,
        )
        return web.json_response({"mode": self._mode(), "left_s": change.left_s, "kept": change.kept})

    async def _resume(self, request: web.Request) -> web.Response:
        who = await self._callers.of(request)
        try:
            change = await self._desk.unset(who, Knob.ENFORCE, if_match=None)
        except OverrideError as error:
            if error.refusal is not Refusal.NOT_SET:
                raise
            raise ApiError(
                404, "not_set", "no bypass is in force; kvctl enforces as its settings say"
            ) from None
        return web.json_response({"mode": self._mode(), "kept": change.kept})

    def _mode(self) -> str:
        return documents.mode(self._port.status())

    # --- the rest -----------------------------------------------------------------------------------

    async def _reload(self, request: web.Request) -> web.Response:
        who = await self._callers.of(request)
        try:
            done = await self._port.reload()
        except SettingsError as error:
            await self._desk.note(who, "reload", "reload", result="bad_settings", why=error.problems[0])
            raise
        applied, waiting = [each.key for each in done.applied], [each.key for each in done.needs_restart]
        named: dict[str, Any] = {"applied": ", ".join(applied), "needs_restart": ", ".join(waiting)}
        kept = await self._desk.note(who, "reload", "reload", **named)
        return web.json_response({**documents.plain(done), "kept": kept})

    async def _level(self, request: web.Request) -> web.Response:
        body, who = await body_of(request, _LEVEL, needed="level"), await self._callers.of(request)
        shown = self._levels.set(body["level"], body.get("ttl_s", DEFAULT_TTL_S))
        told = {
            "level": shown["level"],
            "ttl": body.get("ttl_s", DEFAULT_TTL_S),
            "reason": body.get("reason"),
        }
        kept = await self._desk.note(who, "loglevel", "level", **told)
        return web.json_response({**shown, "kept": kept})

    async def _release(self, request: web.Request) -> web.Response:
        body = await body_of(request, _RELEASE, needed="for_s")
        seconds, reason = body["for_s"], body.get("reason")
        known = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not known or not 0 <= seconds <= RELEASE_MAX_S:
            most = f"cards are let go of for {RELEASE_MAX_S:g} s (1 h) at most"
            raise ApiError(422, "bad_value", f"for_s = {seconds!r}: {most}")
        who = await self._callers.of(request)
        await self._port.release_cards(float(seconds))
        told = {} if reason is None else {"reason": str(reason)}
        kept = await self._desk.note(who, "gpu_release", "gpu", for_s=float(seconds), **told)
        return web.json_response({"released_s": float(seconds) or None, "kept": kept})


def _reason(body: Mapping[str, Any]) -> str:
    """The reason, as one printable line; empty: none was given. Raises ApiError."""
    given = body.get("reason") or ""
    if not isinstance(given, str) or len(given) > REASON_MAX:
        raise ApiError(422, "no_reason", f"a reason is a text of at most {REASON_MAX} characters")
    return " ".join("".join(each if each.isprintable() else " " for each in given).split())


def _changed(change: Change) -> web.Response:
    return with_revision(documents.plain(change))


def _dry_run(
    change: tuple[Knob, Value | None, Value], status: DaemonStatus, stories: Sequence[Story], revision: int
) -> dict[str, Any]:
    """What a change of a knob (knob, old, new) would do; ``last`` is null where the log cannot tell.

    Before and after per engine come from the gate's own figures; what the last decisions would have been
    comes from the decision log (``core.hindsight``, which says in what it is an approximation).

    ``stories`` are those of the last ``_LOOK_BACK_S``, the latest first. Slow with many of them.
    """
    knob, old, new = change
    budget = _budget_under(knob, new)
    seen = None
    if budget is not None:
        seen = documents.plain(look_back(stories, _LOOK_BACK_S, budget))
    engines = {name: _moved(knob, new, gate) for name, gate in status.engines.items()}
    return {
        "dry_run": True,
        "knob": knob.value,
        "old": documents.plain(old),
        "new": documents.plain(new),
        "revision": revision,
        "engines": engines,
        "last": seen,
    }


def _budget_under(knob: Knob, new: Value) -> Callable[[Scales], float | None] | None:
    if knob is Knob.MARGIN:
        return with_margin(float(new))
    if knob is Knob.POLICY:
        return with_policy(Policy(str(new)))
    return None


def _moved(knob: Knob, new: Value, gate: GateStatus) -> dict[str, Any]:
    """An engine's budget and headroom, now and then; null: not known before it is tried."""
    after = None
    if knob is Knob.MARGIN:
        pressure = min(gate.pressure.values(), default=1.0)
        after = int(gate.capacity_tokens * (1.0 - float(new)) * pressure)
    elif knob is Knob.POLICY:
        after = gate.budget_tokens
    headroom = None if after is None else int(after - gate.forecast_peak_tokens)
    return {
        "before": {"budget_tokens": gate.budget_tokens, "headroom_tokens": gate.headroom_tokens},
        "after": {"budget_tokens": after, "headroom_tokens": headroom},
    }
