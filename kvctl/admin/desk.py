"""The desk for overrides: takes changes, puts them in force, has them stored, and records who made them.

A change is in force before it is on the disk: on-call can act while the disk is full, and is told that the
change would not survive a restart. Refused changes are recorded too.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvctl import logs
from kvctl.admin import documents
from kvctl.admin.audit import entry
from kvctl.admin.drains import Drains, open_drains
from kvctl.admin.keeper import Keeper
from kvctl.admin.peers import DAEMON, Actor
from kvctl.core.overrides import (
    Bounds,
    Knob,
    Override,
    OverrideError,
    Overrides,
    Refusal,
    StateError,
    Value,
)
from kvctl.settings.model import SPECS

log = logs.get("admin")
Values = Mapping[Knob, Value | None]  # None: a setting that is not set
Tell = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that was made. ``kept`` False: it is in force, but would not survive a restart."""

    knob: Knob
    old: Value | None
    new: Value | None
    revision: int
    kept: bool
    left_s: float | None  # None: the knob is back at its setting


class Desk:
    """The owner of the overrides: ``open`` before serving, ``expire`` on every tick, ``close`` at the end."""

    def __init__(
        self,
        *,
        limits: Bounds,
        ttl_max_s: float,
        defaults: Values,
        state_dir: Path,
        clock: Callable[[], float],
        wall: Callable[[], float],
        apply: Callable[[Values], None],
        tell: Tell = lambda _kind, _document: None,
    ) -> None:
        """``defaults`` are the knobs' settings; ``apply`` gets all values whenever one may have changed.

        ``clock`` is monotonic seconds, ``wall`` seconds since the epoch. ``tell`` gets every change.
        """
        self._held = Overrides(limits, ttl_max_s)
        self._defaults = dict(defaults)
        self._keeper = Keeper(state_dir)
        self._clock = clock
        self._wall = wall
        self._apply = apply
        self._tell = tell
        self.drains = Drains(wall)

    @property
    def revision(self) -> int:
        """A number that every change of what is in force raises."""
        return self._held.revision

    def values(self) -> dict[Knob, Value | None]:
        """The value of every knob now."""
        return self._defaults | {knob: each.value for knob, each in self.active().items()}

    def active(self) -> dict[Knob, Override]:
        """The overrides in force."""
        return self._held.active(self._clock())

    def document(self) -> dict[str, Any]:
        """The overrides, and the drains, as the API shows them."""
        more = {"drains": self.drains.document(), "kept": not self._keeper.fault}
        return documents.overrides(self._held, self._clock()) | more

    def preview(self, knob: str, value: object, *, if_match: int | None) -> tuple[Knob, Value | None, Value]:
        """(knob, its value now, the value that ``set`` would give it). Raises OverrideError."""
        known, new = self._held.judge(knob, _parsed(knob, value), if_match)
        return known, self.values()[known], new

    # --- start and end ------------------------------------------------------------------------------

    def open(self) -> None:
        """Take over what the last process left. Blocks."""
        try:
            state = self._keeper.state.read()
            dropped = [] if state is None else self._held.restore(state, self._clock(), self._wall())
        except OSError as error:
            logs.event(
                log, logging.WARNING, "state_unreadable", f"{self._keeper.state.path}: {error.strerror}"
            )
        except ValueError as error:
            self._refuse_state(error)
        else:
            for each in dropped:
                sentence = f"The override of {each.knob} did not survive the restart: {each.why}"
                logs.event(log, logging.WARNING, "override_dropped", sentence, knob=each.knob)
                line = entry(DAEMON, "restore", knob=each.knob, revision=self.revision, result=each.why)
                self._keeper.submit(line, self._held.to_state())
            self._tell_restored()
        open_drains(self.drains, self._keeper.drains)
        self._apply(self.values())

    def reconfigure(self, limits: Bounds, ttl_max_s: float, defaults: Values) -> None:
        """Adopt settings that were read again. Overrides beyond the new bounds end, with a log line."""
        self._defaults = dict(defaults)
        dropped = self._held.rebound(limits, ttl_max_s)
        for each in dropped:
            sentence = f"The override of {each.knob} ended with the new settings: {each.why}"
            logs.event(log, logging.WARNING, "override_dropped", sentence, knob=each.knob)
            line = entry(DAEMON, "reload", knob=each.knob, revision=self.revision, result=each.why)
            self._keeper.submit(line, self._held.to_state())
        self._apply(self.values())

    def _refuse_state(self, error: ValueError) -> None:
        why = str(error) if isinstance(error, StateError) else f"is not JSON ({error})"
        aside = self._keeper.state.put_away()
        logs.event(log, logging.WARNING, "state_refused", f"{self._keeper.state.path}: {why}; kept {aside}")

    def _tell_restored(self) -> None:
        for knob, each in self.active().items():
            shown, left = show(knob, each.value), each.left_s(self._clock())
            sentence = f"{knob} stays at {shown} for {left:.0f} s more, as {each.actor} set it: {each.reason}"
            logs.event(log, logging.INFO, "override_restored", sentence, knob=knob, value=each.value)

    async def close(self) -> None:
        """Wait for what is still to be written."""
        await self._keeper.close()

    # --- changes ------------------------------------------------------------------------------------

    async def set(
        self, actor: Actor, knob: str, value: object, *, ttl_s: object, reason: object, if_match: int | None
    ) -> Change:
        """Override a knob; ``value`` may be text as in the settings ("12%"). Raises OverrideError."""
        old = self._value(knob)
        line = entry(actor, "set", knob=knob, old=old, new=value, ttl=ttl_s, reason=reason)
        made = self._attempt(
            line,
            lambda: self._held.set(
                knob,
                _parsed(knob, value),
                ttl_s=ttl_s,
                reason=reason,
                actor=actor.user,
                now_mono=self._clock(),
                now_wall=self._wall(),
                if_match=if_match,
            ),
        )
        return await self._made(line | {"new": made.value}, made.knob, old, made)

    async def unset(self, actor: Actor, knob: str, *, if_match: int | None) -> Change:
        """Give a knob its setting back. Raises OverrideError, also where it was not overridden."""
        old = self._value(knob)
        line = entry(actor, "unset", knob=knob, old=old, new=self._default(knob))
        ended = self._attempt(line, lambda: self._held.unset(knob, self._clock(), if_match))
        return await self._made(line, ended.knob, old, None)

    def expire(self) -> list[Override]:
        """End the overrides that have run out, and return them. Cheap where none has."""
        ended = self._held.expire(self._clock())
        for each in ended:
            new = self._defaults[each.knob]
            moved = f"{show(each.knob, each.value)} to {show(each.knob, new)}"
            sentence = f"The override of {each.knob} ran out: {moved}"
            logs.event(
                log, logging.INFO, "override_expired", sentence, knob=each.knob, revision=self.revision
            )
            line = entry(DAEMON, "expire", knob=each.knob, old=each.value, new=new, reason=each.reason)
            self._tell("override", line | {"revision": self.revision})
            self._keeper.submit(line | {"revision": self.revision, "result": "ok"}, self._held.to_state())
        if ended:
            self._apply(self.values())
        return ended

    async def drained(self, actor: Actor, verb: str, **what: object) -> bool:
        """Record the drains as ``drains`` has them now; returns whether they would survive a restart."""
        line = self._noted(actor, verb, "traffic", what)
        return await self._keeper.keep(line, self.drains.to_state(), self._keeper.drains)

    async def note(self, actor: Actor, verb: str, kind: str, *, result: str = "ok", **what: object) -> bool:
        """Record a change of another kind (reload, log level); returns whether that is on the disk."""
        return await self._keeper.keep(self._noted(actor, verb, kind, what, result))

    def _noted(
        self, actor: Actor, verb: str, kind: str, what: Mapping[str, object], result: str = "ok"
    ) -> dict[str, Any]:
        line = entry(actor, verb, **what, revision=self.revision, result=result)
        logs.event(log, logging.INFO, f"admin_{verb}", f"{actor.user}: {verb} ({result})", **what)
        self._tell(kind, line)
        return line

    def _value(self, knob: str) -> Value | None:
        known = _known(knob)
        return None if known is None else self.values()[known]

    def _default(self, knob: str) -> Value | None:
        known = _known(knob)
        return None if known is None else self._defaults[known]

    def _attempt(self, line: Mapping[str, Any], act: Callable[[], Override]) -> Override:
        try:
            return act()
        except OverrideError as error:
            self._keeper.submit({**line, "revision": self.revision, "result": error.refusal.value})
            raise

    async def _made(
        self, line: Mapping[str, Any], knob: Knob, old: Value | None, made: Override | None
    ) -> Change:
        """Put a change in force, announce it, store it."""
        new, revision = self.values()[knob], self.revision
        before = new if old is None else old
        self._apply(self.values())
        sentence = f"{line['user']} {line['verb']} {knob}: {show(knob, before)} to {show(knob, new)}"
        word = f"override_{line['verb']}"
        why = {"reason": line["reason"]} if line.get("reason") else {}
        self._tell("override", {**line, "new": logs.plain(new), "revision": revision})
        logs.event(log, logging.INFO, word, sentence, knob=knob, revision=revision, **why)
        kept = await self._keeper.keep({**line, "revision": revision, "result": "ok"}, self._held.to_state())
        left = None if made is None else made.ttl_s
        return Change(knob=knob, old=before, new=new, revision=revision, kept=kept, left_s=left)


def show(knob: Knob, value: Value | None) -> str:
    """A knob's value as an operator would write it."""
    return SPECS[knob].show(value)


def _known(knob: str) -> Knob | None:
    return Knob(knob) if knob in set(Knob) else None


def _parsed(knob: str, value: object) -> object:
    known = _known(knob)
    if known is None or not isinstance(value, str):
        return value
    try:
        return SPECS[known].read(value)
    except ValueError as error:
        raise OverrideError(Refusal.BAD_VALUE, f"{knob} = {value!r} {error}") from None
