"""What the demo shows, in virtual time: exact, repeatable, and without a word on this machine's speed."""

import pytest

from kvctl.core.outcomes import Policy
from kvctl.sim.load import NEIGHBOUR, calls
from kvctl.sim.score import score
from tests.sim.virtual import play

SECONDS = 20.0
GPU_POLL_S = 1.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_forecast_serves_far_more_in_time_than_none_and_static(seed: int) -> None:
    load = calls(SECONDS, seed)
    runs = {policy: play(policy, load, SECONDS) for policy in Policy}
    good = {policy: score(run.outcomes, SECONDS).goodput_rps for policy, run in runs.items()}
    preempted = {policy: run.scheduler.counters.preemptions for policy, run in runs.items()}
    assert good[Policy.FORECAST] >= 1.6 * good[Policy.STATIC]
    assert good[Policy.FORECAST] >= 1.6 * good[Policy.NONE]
    assert preempted[Policy.NONE] > 10
    assert preempted[Policy.FORECAST] <= max(2, 0.01 * preempted[Policy.NONE])
    assert preempted[Policy.STATIC] == 0


def test_budget_follows_the_neighbour_within_two_polls() -> None:
    run = play(Policy.FORECAST, calls(SECONDS, 1), SECONDS)
    comes, leaves = (share * SECONDS for share in NEIGHBOUR)
    usual = next(tokens for at, tokens, _ in run.budgets if at > 1.0)
    lowered = [at for at, tokens, reason in run.budgets if tokens < 0.9 * usual and reason == "gpu_memory"]
    assert comes <= lowered[0] <= comes + 2 * GPU_POLL_S
    back = next(at for at, tokens, _ in run.budgets if at > leaves and tokens == usual)
    assert back <= leaves + 2 * GPU_POLL_S


def test_same_load_gives_the_same_run_to_the_last_token() -> None:
    load = calls(5.0, 9)
    first, second = (play(Policy.FORECAST, load, 5.0) for _ in range(2))
    assert first.outcomes == second.outcomes
    assert first.budgets == second.budgets
