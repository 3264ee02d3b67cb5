"""What can go wrong in a replay: ``KIND[=VALUE][@SECONDS]``, seconds of the run at which it begins.

``shift=4@60``: answers are four times as long from then on. ``bypass=0.3``: traffic that no gate sees holds
that share of the pool. ``freeze=10@60``: for ten seconds the metrics page shows what it showed.
``restart=20@60``: the engine dies, and is back empty after 20 seconds. ``neighbour=30@60``: somebody else's
process takes most of what is free of the card's memory for 30 seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from kvctl.sim.trace import Row


class FaultKind(StrEnum):
    """See the module."""

    SHIFT = "shift"
    BYPASS = "bypass"
    FREEZE = "freeze"
    RESTART = "restart"
    NEIGHBOUR = "neighbour"


_USUAL: Mapping[FaultKind, float] = MappingProxyType(
    {
        FaultKind.SHIFT: 4.0,
        FaultKind.BYPASS: 0.3,
        FaultKind.FREEZE: 10.0,
        FaultKind.RESTART: 20.0,
        FaultKind.NEIGHBOUR: 30.0,
    }
)


LONGEST_S = 1e6
_MOST: Mapping[FaultKind, float] = MappingProxyType({FaultKind.SHIFT: 1e6, FaultKind.BYPASS: 1.0})


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``value``: a factor, a share of the pool, or how many seconds it lasts."""

    kind: FaultKind
    value: float
    at_s: float = 0.0

    @property
    def until_s(self) -> float:
        """When a fault that lasts ends."""
        return self.at_s + self.value


def parse_fault(text: str) -> Fault:
    """``KIND[=VALUE][@SECONDS]``. Raises ValueError."""
    head, _, at = text.partition("@")
    word, _, value = head.partition("=")
    if word not in set(FaultKind):
        raise ValueError(f"no such kind; there are {', '.join(FaultKind)}")
    kind = FaultKind(word)
    try:
        fault = Fault(kind, float(value) if value else _USUAL[kind], float(at) if at else 0.0)
    except ValueError:
        raise ValueError("write KIND=VALUE@SECONDS with numbers, such as shift=4@60") from None
    most = _MOST.get(kind, LONGEST_S)
    if not (0.0 < fault.value <= most and 0.0 <= fault.at_s <= LONGEST_S):
        raise ValueError(f"out of range: above 0 and at most {most:g}, from second 0 to {LONGEST_S:g} on")
    return fault


def active(faults: Sequence[Fault], kind: FaultKind, now: float) -> Fault | None:
    """The fault of that kind that lasts at ``now``."""
    return next((one for one in faults if one.kind is kind and one.at_s <= now < one.until_s), None)


def shifted(rows: Sequence[Row], faults: Sequence[Fault], context_tokens: int) -> list[Row]:
    """The rows with longer answers after a shift, as far as the context allows."""
    made = list(rows)
    for fault in faults:
        if fault.kind is FaultKind.SHIFT:
            made = [_longer(row, fault, context_tokens) for row in made]
    return made


def _longer(row: Row, fault: Fault, context_tokens: int) -> Row:
    if row.at_s < fault.at_s:
        return row
    wanted = max(round(row.output_tokens * fault.value), 1)
    return replace(row, output_tokens=max(min(wanted, context_tokens - row.prompt_tokens), 1))
