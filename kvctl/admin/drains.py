"""On-call's drains: orders that stand until somebody takes them back, across restarts and crashes.

Whoever drained a box before an upgrade or a repair decides when it serves again, not the process that happens
to start next. The drain with which a process ends is not such an order, and is not stored.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvctl import logs
from kvctl.admin.state import StateFile

log = logs.get("admin")

ALL = "*"  # the order for all engines, whatever their names are after the next start
STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrder:
    """Who drained, when (seconds since the epoch) and why; ``reason`` is empty where none was given."""

    actor: str
    since: float
    reason: str = ""


class Drains:
    """The orders in force: one for all engines, or by an engine's name."""

    def __init__(self, wall: Callable[[], float]) -> None:
        """``wall`` is seconds since the epoch."""
        self._wall = wall
        self._orders: dict[str, DrainOrder] = {}

    def order(self, engine: str | None, actor: str, reason: str = "") -> None:
        """Drain one engine, or all (None). An order that stands already keeps its beginning."""
        name = ALL if engine is None else engine
        before = self._orders.get(name) or self._orders.get(ALL)
        since = self._wall() if before is None else before.since
        made = DrainOrder(actor=actor, since=since, reason=reason)
        self._orders = {ALL: made} if engine is None else self._orders | {name: made}

    def lift(self, engine: str | None, engines: Iterable[str]) -> None:
        """Take an order back: for all (None), or for one of ``engines`` while the others stay drained."""
        if engine is None:
            self._orders = {}
            return
        for_all = self._orders.pop(ALL, None)
        if for_all is not None:
            self._orders = dict.fromkeys(engines, for_all) | self._orders
        self._orders.pop(engine, None)

    def standing(self, engines: Iterable[str]) -> list[str]:
        """Which of ``engines`` are drained."""
        return [name for name in engines if ALL in self._orders or name in self._orders]

    def document(self) -> dict[str, Any]:
        """The orders as the API shows them, by engine; ``*``: all."""
        now = self._wall()
        return {
            name: asdict(each) | {"for_s": round(max(now - each.since, 0.0), 3)}
            for name, each in self._orders.items()
        }

    def to_state(self) -> dict[str, Any]:
        """What another process needs to go on, as JSON values."""
        return {
            "version": STATE_VERSION,
            "drains": {name: asdict(each) for name, each in self._orders.items()},
        }

    def restore(self, state: object) -> None:
        """Go on from ``to_state`` of another process. Raises ValueError, with nothing changed."""
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise ValueError("is no state of drains that this version knows")
        orders = state.get("drains")
        if not isinstance(orders, dict) or not all(map(_is_order, orders.values())):
            raise ValueError("holds what is no drain")
        self._orders = {name: DrainOrder(**each) for name, each in orders.items()}


def open_drains(drains: Drains, file: StateFile) -> None:
    """Read what the last process left, and tell it loudly. Blocks.

    A state that cannot be read is put aside and told: kvctl then admits, as it would without one.
    """
    try:
        state = file.read()
        if state is not None:
            drains.restore(state)
    except OSError as error:
        logs.event(log, logging.WARNING, "state_unreadable", f"{file.path}: {error.strerror}")
    except ValueError as error:
        sentence = f"{file.path}: {error}; no drain is in force; kept {file.put_away()}"
        logs.event(log, logging.WARNING, "state_refused", sentence)
    for name, each in drains.document().items():
        logs.event(log, logging.WARNING, "drain_restored", sentence_of(name, each), engine=name)


def sentence_of(engine: str, order: Mapping[str, Any]) -> str:
    """One order of the document in words."""
    whom = "all engines are" if engine == ALL else f"{engine} is"
    why = f": {order['reason']}" if order["reason"] else ""
    back = "kvctl undrain" if engine == ALL else f"kvctl undrain --engine {engine}"
    return f"{whom} drained by {order['actor']}, over restarts, until {back}{why}"


def _is_order(entry: object) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"actor", "since", "reason"}:
        return False
    since = entry["since"]
    return (
        isinstance(entry["actor"], str)
        and isinstance(entry["reason"], str)
        and isinstance(since, int | float)
        and not isinstance(since, bool)
        and 0 <= since < 1e12  # json reads NaN
    )
