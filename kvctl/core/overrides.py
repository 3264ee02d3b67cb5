"""Overrides of knobs: bounded, expiring, each with a reason and who set it.

Law 7: no clock. Callers hand in monotonic time, by which a running process counts down, and wall-clock time,
by which an override is judged once when a process starts from the state that another one left. Every change
of what is in force raises ``revision``; a change may name the revision that it was decided on.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kvctl.core.outcomes import Policy

STATE_VERSION = 1
DEFAULT_TTL_S = 1800.0
LEAST_TTL_S = 1.0
REASON_MAX = 500

Value = float | str


class Knob(StrEnum):
    """What on-call may override while kvctl runs."""

    MARGIN = "margin"
    POLICY = "policy"
    ENFORCE = "enforce"  # the share of refusals that are enforced; 0 is the bypass
    CAPACITY_TOKENS = "capacity_tokens"
    MAX_CONTEXT = "max_context"
    QUEUE_MAX_WAIT = "queue_max_wait"


class Refusal(StrEnum):
    """Why an override was not taken: API field, audit field and exit code of the command."""

    UNKNOWN_KNOB = "unknown_knob"
    BAD_VALUE = "bad_value"  # not of the knob's kind
    OUT_OF_BOUNDS = "out_of_bounds"
    BAD_TTL = "bad_ttl"
    NO_REASON = "no_reason"
    STALE_REVISION = "stale_revision"
    NOT_SET = "not_set"


class OverrideError(ValueError):
    """An override was refused; nothing changed."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


class StateError(ValueError):
    """The state left by another process cannot be used: it is refused instead of guessed at."""


@dataclass(frozen=True, slots=True)
class Range:
    """Shares of one from ``low`` to ``high``, both allowed. ``named``: where the operator sets these."""

    low: float
    high: float
    named: str = ""

    def accept(self, value: object) -> float:
        """The number. Raises OverrideError."""
        if (amount := _finite(value)) is None:
            raise OverrideError(Refusal.BAD_VALUE, f"{value!r:.50} is not a number")
        if not self.low <= amount <= self.high:
            raise OverrideError(
                Refusal.OUT_OF_BOUNDS,
                f"{_share(amount)} is outside {_share(self.low)} to {_share(self.high)}{self.named}",
            )
        return amount


@dataclass(frozen=True, slots=True)
class Seconds:
    """Times from ``low`` to ``high`` seconds, both allowed."""

    low: float
    high: float

    def accept(self, value: object) -> float:
        """The seconds. Raises OverrideError."""
        if (amount := _finite(value)) is None:
            raise OverrideError(Refusal.BAD_VALUE, f"{value!r:.50} is not a number of seconds")
        if not self.low <= amount <= self.high:
            text = f"{_span(amount)} is outside {_span(self.low)} to {_span(self.high)}"
            raise OverrideError(Refusal.OUT_OF_BOUNDS, text)
        return amount


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def accept(self, value: object) -> str:
        """The word. Raises OverrideError."""
        if not isinstance(value, str):
            raise OverrideError(Refusal.BAD_VALUE, f"{value!r:.50} is not a word")
        if value not in self.words:
            raise OverrideError(Refusal.OUT_OF_BOUNDS, f"{value!r:.50} is not one of {', '.join(self.words)}")
        return str(value)


@dataclass(frozen=True, slots=True)
class Whole:
    """KV tokens from ``low`` to ``high``, both allowed."""

    low: int
    high: int

    def accept(self, value: object) -> int:
        """The number. Raises OverrideError."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise OverrideError(Refusal.BAD_VALUE, f"{value!r:.50} is not a whole number")
        if not self.low <= value <= self.high:
            raise OverrideError(Refusal.OUT_OF_BOUNDS, f"{value!r:.50} is outside {self.low} to {self.high}")
        return value


Bounds = Mapping[Knob, Range | Choice | Whole | Seconds]
MOST_TOKENS = 10**9
MOST_WAIT_S = 3600.0


def bounds(margin_min: float, margin_max: float, most_tokens: int = MOST_TOKENS) -> Bounds:
    """The bounds of every knob; margins are shares of one."""
    return {
        Knob.MARGIN: Range(margin_min, margin_max, " (margin_min to margin_max)"),
        Knob.POLICY: Choice(tuple(Policy)),
        Knob.ENFORCE: Range(0.0, 1.0),
        Knob.CAPACITY_TOKENS: Whole(1, most_tokens),
        Knob.MAX_CONTEXT: Whole(1, most_tokens),
        Knob.QUEUE_MAX_WAIT: Seconds(0.0, MOST_WAIT_S),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One knob's value until ``expires_mono``; ``expires_wall`` is the same moment for the next process."""

    knob: Knob
    value: Value
    reason: str
    actor: str
    ttl_s: float
    set_wall: float
    expires_wall: float
    expires_mono: float
    revision: int

    def left_s(self, now_mono: float) -> float:
        """Seconds of life left."""
        return max(self.expires_mono - now_mono, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """An override in the state left by another process that is not restored, and why."""

    knob: str
    why: str


class Overrides:
    """The overrides in force."""

    def __init__(self, limits: Bounds, ttl_max_s: float) -> None:
        """``limits`` bounds every knob that may be set; ``ttl_max_s`` every life."""
        self._limits = limits
        self._ttl_max_s = ttl_max_s
        self._set: dict[Knob, Override] = {}
        self.revision = 0

    def set(
        self,
        knob: str,
        value: object,
        *,
        ttl_s: object,
        reason: object,
        actor: str,
        now_mono: float,
        now_wall: float,
        if_match: int | None = None,
    ) -> Override:
        """Put an override in force, in place of one of the same knob. Raises OverrideError.

        ``value``, ``ttl_s`` (seconds) and ``reason`` may come from anybody: they are validated here.
        """
        self._match(if_match)
        known = self._known(knob)
        accepted = self._limits[known].accept(value)
        ttl, why = self._life(ttl_s), _reason(reason)
        self.revision += 1
        made = Override(
            knob=known,
            value=accepted,
            reason=why,
            actor=actor,
            ttl_s=ttl,
            set_wall=now_wall,
            expires_wall=now_wall + ttl,
            expires_mono=now_mono + ttl,
            revision=self.revision,
        )
        self._set[known] = made
        return made

    def judge(self, knob: str, value: object, if_match: int | None = None) -> tuple[Knob, Value]:
        """The knob and the value that ``set`` would put in force; nothing changes. Raises OverrideError."""
        self._match(if_match)
        known = self._known(knob)
        return known, self._limits[known].accept(value)

    def rebound(self, limits: Bounds, ttl_max_s: float) -> list[Dropped]:
        """Use other bounds from now on; ends and returns the overrides that they do not allow."""
        self._limits, self._ttl_max_s = limits, ttl_max_s
        dropped = []
        for each in list(self._set.values()):
            try:
                limits[each.knob].accept(each.value)
            except OverrideError as error:
                del self._set[each.knob]
                dropped.append(Dropped(knob=each.knob, why=str(error)))
        self.revision += bool(dropped)
        return dropped

    def unset(self, knob: str, now_mono: float, if_match: int | None = None) -> Override:
        """End an override before its time; returns it. Raises OverrideError, also where none is in force."""
        self._match(if_match)
        known = self._known(knob)
        if known not in self.active(now_mono):
            raise OverrideError(Refusal.NOT_SET, f"no override of {known} is in force")
        self.revision += 1
        return self._set.pop(known)

    def active(self, now_mono: float) -> dict[Knob, Override]:
        """The overrides in force, whether or not ``expire`` was called since the last one ended."""
        return {knob: each for knob, each in self._set.items() if each.expires_mono > now_mono}

    def expire(self, now_mono: float) -> list[Override]:
        """Remove those whose time is over; returns them, each exactly once."""
        ended = [each for each in self._set.values() if each.expires_mono <= now_mono]
        for each in ended:
            del self._set[each.knob]
        self.revision += bool(ended)
        return ended

    def to_state(self) -> dict[str, Any]:
        """What another process needs to take over, as JSON values; monotonic times mean nothing there."""
        kept = [{k: v for k, v in asdict(each).items() if k != "expires_mono"} for each in self._set.values()]
        return {"version": STATE_VERSION, "revision": self.revision, "overrides": kept}

    def restore(self, state: object, now_mono: float, now_wall: float) -> list[Dropped]:
        """Take over ``to_state`` of another process; returns what did not survive.

        A lifetime can only shrink: a wall clock that was set back prolongs nothing. Raises StateError, with
        nothing changed, for a state of another version or form.
        """
        revision, entries = _parse_state(state)
        dropped = []
        self._set.clear()
        self.revision = revision
        for entry in entries:
            try:
                made = self._revive(entry, now_mono, now_wall)
            except OverrideError as error:
                dropped.append(Dropped(knob=entry["knob"], why=str(error)))
                continue
            self._set[made.knob] = made
        self.revision += bool(dropped)
        return dropped

    def _revive(self, entry: Mapping[str, Any], now_mono: float, now_wall: float) -> Override:
        knob = self._known(entry["knob"])
        value = self._limits[knob].accept(entry["value"])
        left = min(entry["expires_wall"] - now_wall, entry["ttl_s"], self._ttl_max_s)
        if left <= 0:
            raise OverrideError(Refusal.BAD_TTL, f"ended {-left:.0f} s before this start")
        return Override(
            knob=knob,
            value=value,
            reason=entry["reason"],
            actor=entry["actor"],
            ttl_s=entry["ttl_s"],
            set_wall=entry["set_wall"],
            expires_wall=now_wall + left,
            expires_mono=now_mono + left,
            revision=entry["revision"],
        )

    def _match(self, if_match: int | None) -> None:
        if if_match is not None and if_match != self.revision:
            message = f"revision {if_match} is stale, the overrides are at {self.revision}"
            raise OverrideError(Refusal.STALE_REVISION, message)

    def _known(self, knob: str) -> Knob:
        known = {str(each): each for each in self._limits}
        if knob not in known:
            raise OverrideError(
                Refusal.UNKNOWN_KNOB, f"{knob!r:.50} is no knob; there are {', '.join(known)}"
            )
        return known[knob]

    def _life(self, ttl_s: object) -> float:
        if (life := _finite(ttl_s)) is None:
            raise OverrideError(Refusal.BAD_TTL, f"{ttl_s!r:.50} is not a number of seconds")
        if not LEAST_TTL_S <= life <= self._ttl_max_s:
            bounds_ = f"{_span(LEAST_TTL_S)} to {_span(self._ttl_max_s)}"
            message = f"it would hold for {_span(life)}, which is outside {bounds_} (override_ttl_max)"
            raise OverrideError(Refusal.BAD_TTL, message)
        return life


def _share(amount: float) -> str:
    """A share as on-call writes it: 12%."""
    return f"{amount * 100:g}%"


def _span(seconds: float) -> str:
    """A length of time in the largest unit that keeps it above one."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


def _reason(reason: object) -> str:
    text = reason if isinstance(reason, str) else ""
    clean = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    if not clean:
        raise OverrideError(Refusal.NO_REASON, "an override needs a reason")
    if len(clean) > REASON_MAX:
        raise OverrideError(Refusal.NO_REASON, f"a reason has at most {REASON_MAX} characters")
    return clean


_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "knob": str,
    "value": (int, float, str),
    "reason": str,
    "actor": str,
    "ttl_s": (int, float),
    "set_wall": (int, float),
    "expires_wall": (int, float),
    "revision": int,
}


def _parse_state(state: object) -> tuple[int, Iterable[Mapping[str, Any]]]:
    if not isinstance(state, dict):
        raise StateError("the state is not an object")
    if state.get("version") != STATE_VERSION:
        raise StateError(f"the state is of version {state.get('version')!r}, this is {STATE_VERSION}")
    revision, entries = state.get("revision"), state.get("overrides")
    if not isinstance(revision, int) or isinstance(revision, bool) or not isinstance(entries, list):
        raise StateError("the state lacks its revision or its overrides")
    if bad := [entry for entry in entries if not _is_entry(entry)]:
        raise StateError(f"the state holds {bad[0]!r}, which is no override")
    return revision, entries


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and all(_is_field(entry.get(name), kind) for name, kind in _FIELDS.items())


def _is_field(value: object, kind: type | tuple[type, ...]) -> bool:
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    return isinstance(value, str) or _finite(value) is not None  # json accepts NaN, which would never expire


def _finite(value: object) -> float | None:
    """The number as a float; None where it is none, or not finite, or an integer too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        amount = float(value)
    except OverflowError:
        return None
    return amount if math.isfinite(amount) else None
