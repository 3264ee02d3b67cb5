"""Runs that once showed a defect, and a few that cover each kind of fault: none shows any now.

``python -m tests.bench.fuzz`` searches further.
"""

import pytest

from kvctl.sim.replay_faults import FaultKind
from tests.bench.fuzz import Lie, examine, plot

SHUT_BY_A_BROKEN_NUMBER = 15
"""The limit of sequences stood between two whole numbers, and stayed at the lower one for the whole run."""


def test_a_limit_between_two_whole_numbers_does_not_stay_shut() -> None:
    assert examine(SHUT_BY_A_BROKEN_NUMBER) == []


@pytest.mark.xfail(strict=True, reason="2 % of all requests are preempted, with true and prompt telemetry")
def test_a_small_pool_is_not_filled_beyond_what_it_holds() -> None:
    assert examine(1018) == []


def _one_of_each() -> list[int]:
    """The first seed of each kind of fault, and of each lie of a page."""
    first: dict[object, int] = {}
    for seed in range(1, 200):
        story = plot(seed, 50)
        kinds: list[object] = [fault.kind for fault in story.scene.faults] or [story.lie]
        for kind in kinds:
            first.setdefault(kind, seed)
    assert set(first) == {*FaultKind, *Lie}
    return sorted(set(first.values()))


@pytest.mark.parametrize("seed", _one_of_each())
def test_no_fault_makes_the_gate_misbehave(seed: int) -> None:
    assert examine(seed, 150) == []


def test_the_same_seed_is_the_same_run() -> None:
    assert plot(3, 50).scene.rows == plot(3, 50).scene.rows
