"""Capacity over ranks, the budget's formula, and the word for each change."""

from dataclasses import replace

import pytest

from kvctl.core.budget import Budget, budget_of, capacity_of, reason_of_change
from kvctl.core.outcomes import BudgetReason, CapacitySource, Pressure
from tests.core.conversation import PAGE

RANK = replace(PAGE, capacity_tokens=50_000)
OTHER = replace(RANK, rank="1", capacity_tokens=30_000)


def test_ranks_are_summed_for_the_budget_and_never_for_what_fits() -> None:
    """C02: a request lives in one rank."""
    capacity = capacity_of([RANK, OTHER], operator=None, force=False, fallback=1)
    assert (capacity.total, capacity.largest_rank, capacity.exact) == (80_000, 50_000, True)


@pytest.mark.parametrize("reading", [None, 0])
def test_without_a_capacity_the_fallback_stands_in_and_proves_nothing(reading: int | None) -> None:
    """C04, C27: the label None, and a 0 read after an outage, are unknown and not "nothing fits"."""
    unknown = replace(RANK, capacity_tokens=reading)
    for samples in ([], [unknown], [RANK, replace(unknown, rank="1")]):
        capacity = capacity_of(samples, operator=None, force=False, fallback=16_384)
        assert (capacity.total, capacity.largest_rank) == (16_384, None)
        assert not capacity.known
        assert not capacity.exact


@pytest.mark.parametrize("reading", [None, 0])
def test_a_plan_stands_in_before_the_fallback_and_proves_nothing(reading: int | None) -> None:
    unknown = replace(RANK, capacity_tokens=reading)
    both = [unknown, replace(unknown, rank="1")]
    capacity = capacity_of(both, operator=None, force=False, fallback=16_384, planned=40_000)
    assert (capacity.total, capacity.largest_rank, capacity.source) == (80_000, 40_000, CapacitySource.PLAN)
    assert not capacity.known
    assert not capacity.exact


def test_a_plan_is_silent_where_engine_or_operator_tell() -> None:
    told = capacity_of([RANK], operator=None, force=False, fallback=1, planned=40_000)
    assert (told.total, told.source) == (50_000, CapacitySource.ENGINE)
    unknown = replace(RANK, capacity_tokens=None)
    told = capacity_of([unknown], operator=30_000, force=False, fallback=1, planned=40_000)
    assert (told.total, told.source) == (30_000, CapacitySource.OPERATOR)


def test_one_uncertain_rank_makes_the_capacity_uncertain() -> None:
    samples = [RANK, replace(OTHER, capacity_exact=False)]
    assert not capacity_of(samples, operator=None, force=False, fallback=1).exact


def test_the_operator_may_lower_what_the_engine_reports_but_not_raise_it() -> None:
    lowered = capacity_of([RANK, OTHER], operator=40_000, force=False, fallback=1)
    assert (lowered.total, lowered.largest_rank) == (70_000, 40_000)
    raised = capacity_of([RANK], operator=90_000, force=False, fallback=1)
    assert (raised.total, raised.exact) == (50_000, True)
    forced = capacity_of([RANK, OTHER], operator=90_000, force=True, fallback=1)
    assert (forced.total, forced.largest_rank, forced.exact) == (180_000, 90_000, True)


def test_the_operators_figure_stands_in_where_the_engine_reports_none() -> None:
    capacity = capacity_of([replace(RANK, capacity_tokens=None)], operator=40_000, force=False, fallback=1)
    assert (capacity.total, capacity.known, capacity.exact) == (40_000, True, False)


def test_the_largest_block_size_of_the_ranks_rounds() -> None:
    samples = [RANK, replace(OTHER, block_size=64)]
    assert capacity_of(samples, operator=None, force=False, fallback=1).block == 64
    assert capacity_of([], operator=None, force=False, fallback=1).block == 16


def of(capacity: int = 1000, margin: float = 0.05, **terms: float) -> Budget:
    return budget_of(capacity, margin, {Pressure(name): value for name, value in terms.items()})


def test_budget_is_capacity_less_margin_times_the_least_term() -> None:
    assert of().tokens == 950
    assert of(preemption=0.9, gpu_memory=0.5, telemetry=1.0).tokens == 475
    assert of(preemption=0.9, gpu_memory=0.5).binding_term is Pressure.GPU_MEMORY
    assert of(preemption=1.0).binding_term is None
    assert of(margin=0.0).tokens == 1000


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (of(), of(), BudgetReason.STEADY),
        (of(), of(2000), BudgetReason.CAPACITY),
        (of(), of(margin=0.12), BudgetReason.MARGIN),
        (of(preemption=1.0), of(preemption=0.9), BudgetReason.PREEMPTION),
        (of(gpu_memory=1.0), of(gpu_memory=0.3), BudgetReason.GPU_MEMORY),
        (of(telemetry=1.0), of(telemetry=0.3), BudgetReason.TELEMETRY),
        (of(telemetry=0.3), of(telemetry=0.4), BudgetReason.RECOVERY),
    ],
)
def test_each_change_has_its_word(before: Budget, after: Budget, reason: BudgetReason) -> None:
    assert reason_of_change(before, after) is reason
