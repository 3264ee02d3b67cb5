"""Samples and knobs -> budget, with its reason.

    budget = capacity x (1 - margin) x pressure,   pressure = the least of its terms

in KV tokens of the whole engine. Capacity is the sum over ranks for the budget, and the largest single rank
for "can never fit": a request lives in one rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvctl.core.outcomes import BudgetReason, CapacitySource, Pressure
from kvctl.core.telemetry import RankSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Usable KV tokens. ``known`` False: it is from a plan or the settings' fallback, and proves nothing."""

    total: int
    largest_rank: int | None
    exact: bool
    source: CapacitySource
    block: int

    @property
    def known(self) -> bool:
        """Whether the engine or the operator gave it."""
        return self.source in _TOLD


DEFAULT_BLOCK = 16
_TOLD = frozenset({CapacitySource.ENGINE, CapacitySource.OPERATOR})


def capacity_of(
    samples: Sequence[RankSample],
    *,
    operator: int | None,
    force: bool,
    fallback: int,
    planned: int | None = None,
) -> Capacity:
    """Capacity from the latest sample of each rank.

    ``operator`` (tokens per rank) may only lower what the engine reports, unless ``force``. Where neither
    gives a capacity, ``planned`` (per rank) is used, else ``fallback`` (of all ranks).
    """
    block = max((s.block_size for s in samples if s.block_size), default=DEFAULT_BLOCK)
    reported = [s.capacity_tokens for s in samples if s.capacity_tokens]  # a pool of 0 is not a reading
    ranks = max(len(samples), 1)
    if operator is not None and (force or len(reported) < ranks):
        each = [operator] * ranks
        told = CapacitySource.OPERATOR
        return Capacity(total=sum(each), largest_rank=operator, exact=force, source=told, block=block)
    if not reported or len(reported) < ranks:
        return _guessed(planned, fallback, ranks, block)
    each = [c if operator is None else min(c, operator) for c in reported]
    exact = all(s.capacity_exact for s in samples)
    told = CapacitySource.ENGINE
    return Capacity(total=sum(each), largest_rank=max(each), exact=exact, source=told, block=block)


def _guessed(planned: int | None, fallback: int, ranks: int, block: int) -> Capacity:
    source = CapacitySource.FALLBACK if planned is None else CapacitySource.PLAN
    total = fallback if planned is None else planned * ranks
    return Capacity(total=total, largest_rank=planned, exact=False, source=source, block=block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """KV tokens that may be in flight, and what they follow from."""

    tokens: int
    capacity: int
    margin_ratio: float
    pressure: Mapping[Pressure, float]

    @property
    def pressure_ratio(self) -> float:
        """The least of the terms; 1 without any."""
        return min(self.pressure.values(), default=1.0)

    @property
    def binding_term(self) -> Pressure | None:
        """The term that holds the budget down, None when none does."""
        term = min(self.pressure, key=self.pressure.__getitem__, default=None)
        return term if term is not None and self.pressure[term] < 1.0 else None


def budget_of(capacity: int, margin_ratio: float, pressure: Mapping[Pressure, float]) -> Budget:
    """The formula of this module, rounded down to whole tokens."""
    tokens = int(capacity * (1.0 - margin_ratio) * min(pressure.values(), default=1.0))
    return Budget(tokens=tokens, capacity=capacity, margin_ratio=margin_ratio, pressure=pressure)


_TERM_REASON = {
    Pressure.PREEMPTION: BudgetReason.PREEMPTION,
    Pressure.GPU_MEMORY: BudgetReason.GPU_MEMORY,
    Pressure.TELEMETRY: BudgetReason.TELEMETRY,
    Pressure.RANKS: BudgetReason.RANKS,
}


def reason_of_change(before: Budget, after: Budget) -> BudgetReason:
    """The word for the change from ``before`` to ``after``; ``steady`` when nothing that matters moved."""
    if after.capacity != before.capacity:
        return BudgetReason.CAPACITY
    if after.margin_ratio != before.margin_ratio:
        return BudgetReason.MARGIN
    term = after.binding_term
    if after.tokens < before.tokens and term is not None:
        return _TERM_REASON[term]
    return BudgetReason.RECOVERY if after.tokens > before.tokens else BudgetReason.STEADY
