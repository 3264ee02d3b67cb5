"""Several engines seen as one: what a probe, a status line and the metrics page say of all of them."""

from collections import Counter
from collections.abc import Mapping, Sequence

from kvctl.core.status import GateStatus
from kvctl.metrics import SourceView
from kvctl.tokens.base import CountMethod
from kvctl.tokens.calibration import Witness
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.source import Why


class SumOfCounts:
    """The token counters of all engines, as the metrics page shows one."""

    def __init__(self, counters: Sequence[ChainCounter]) -> None:
        self._counters = counters

    @property
    def waiting(self) -> int:
        """Counts that are queued or under way."""
        return sum(counter.waiting for counter in self._counters)

    @property
    def doubted(self) -> bool:
        """Whether any local tokenizer counts other than its engine."""
        return any(counter.doubted for counter in self._counters)

    @property
    def error_ratio(self) -> float | None:
        """Of the engine whose tokenizer counts worst; None: none was compared."""
        ratios = [counter.calibration.error_ratio for counter in self._counters]
        return max((ratio for ratio in ratios if ratio is not None), default=None)

    @property
    def samples(self) -> Mapping[tuple[Witness, bool], int]:
        """Comparisons of local counts with what engines told."""
        total: Counter[tuple[Witness, bool]] = Counter()
        for counter in self._counters:
            total.update(counter.calibration.samples)
        return total

    @property
    def characters(self) -> tuple[int, int]:
        """Characters that local tokenizers encoded, and that their caches spared them."""
        tallies = [counter.own.tally for counter in self._counters if counter.own is not None]
        return sum(each.tokenised for each in tallies), sum(each.spared for each in tallies)

    @property
    def fallbacks(self) -> Mapping[tuple[CountMethod, Why], int]:
        """How often which method could not, and why."""
        total: Counter[tuple[CountMethod, Why]] = Counter()
        for counter in self._counters:
            total.update(counter.fallbacks)
        return total


def worst_source(views: Sequence[SourceView]) -> SourceView:
    """One of several sources of a kind for all of them: one that is down, else the one read longest ago."""
    return min(views, key=lambda view: (view.up, view.read_at or float("-inf")))


def sentence_of(gates: Mapping[str, GateStatus]) -> str:
    """The state of things in one line; with several engines each has its name before its part."""
    if len(gates) == 1:
        return next(iter(gates.values())).sentence
    return "; ".join(f"{name}: {gate.sentence}" for name, gate in gates.items())


def readiness_of(each: Mapping[str, tuple[bool, str]]) -> tuple[bool, str]:
    """Ready where any engine serves; the reason of every engine, where there are several."""
    if len(each) == 1:
        return next(iter(each.values()))
    return any(ready for ready, _ in each.values()), "; ".join(
        f"{name}: {why}" for name, (_, why) in each.items()
    )
