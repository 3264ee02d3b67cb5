"""What goes wrong on a night, in virtual time: how much is served after it, and who is preempted.

E-group of the field cases: each fault begins at a third of the run. Goodput after it is compared with the
goodput before, on arrivals of a steady rate. A pool that serves others, or answers that have grown, can serve
fewer: there it is the same gate from the start under the same load that sets the measure.
"""

import random
from dataclasses import replace
from functools import cache

import pytest

from kvctl.sim.replay import Run, Scene
from kvctl.sim.replay_faults import parse_fault, shifted
from kvctl.sim.replay_policies import Spec, run_policy
from kvctl.sim.replay_score import Target, is_good
from kvctl.sim.replay_setup import caps, engine_config, read_profile
from kvctl.sim.trace import Row

SECONDS, RATE, FAULT_AT = 150.0, 8.0, 45.0
RECOVERED_S = 30.0
TARGET = Target()
pytestmark = pytest.mark.slow


def scene(*faults: str, seed: int = 3) -> Scene:
    """Chat of some 200 tokens, a third more of it than a pool of 20,000 can serve."""
    source = random.Random(seed)
    rows: list[Row] = []
    at = 0.0
    while at < SECONDS:
        at += source.expovariate(RATE)
        prompt, output = source.randint(50, 500), min(round(source.lognormvariate(5.0, 0.7)), 1500)
        rows.append(Row(number=len(rows), at_s=at, prompt_tokens=prompt, output_tokens=output))
    engine = engine_config(read_profile("8b-24g"), 20_000, 8192)
    parsed = [parse_fault(text) for text in faults]
    return Scene(
        rows=shifted(rows, parsed, engine.max_model_len),
        engine=engine,
        cap=caps("4096"),
        seed=seed,
        faults=parsed,
    )


@cache
def served(*faults: str, seed: int = 3, lag_s: float = 0.1) -> Run:
    """The gate through it."""
    return run_policy(Spec("forecast"), replace(scene(*faults, seed=seed), telemetry_lag_s=lag_s))


def goodput(run: Run, start: float, end: float) -> float:
    """Good answers a second among those that asked in between."""
    asked = [call for call in run.calls if start <= call.row.at_s < end]
    return sum(is_good(call, TARGET) for call in asked) / (end - start)


def preempted_ratio(run: Run) -> float:
    return run.preemptions / len(run.calls)


@pytest.mark.parametrize(
    ("fault", "ends"),
    [("freeze=10@45", 55.0), ("restart=10@45", 55.0), ("neighbour=15@45", 60.0)],
)
def test_thirty_seconds_after_a_fault_all_is_as_before(fault: str, ends: float) -> None:
    run = served(fault)
    before = goodput(run, 5.0, FAULT_AT)
    assert before > 2.0
    assert goodput(run, ends + RECOVERED_S, SECONDS - 5.0) >= 0.9 * before
    assert preempted_ratio(run) <= 0.01


SEEDS = (3, 4, 5)


def test_answers_four_times_as_long_are_learned_within_half_a_minute() -> None:
    """After a shift the pool serves one in time a second: three runs together, or it is mostly noise."""
    start, end = FAULT_AT + RECOVERED_S, SECONDS - 5.0
    changed, always = (
        sum(goodput(served(fault, seed=seed), start, end) for seed in SEEDS)
        for fault in ("shift=4@45", "shift=4@0")
    )
    assert changed >= 0.9 * always


def test_answers_four_times_as_long_preempt_hardly_anybody() -> None:
    assert max(preempted_ratio(served("shift=4@45", seed=s)) for s in SEEDS) <= 0.01


def test_traffic_past_the_gate_preempts_hardly_anybody() -> None:
    """E-group: 30 % of the pool is taken by callers that no gate sees."""
    run = served("bypass=0.3@45")
    plain = served()
    start = FAULT_AT + RECOVERED_S
    assert goodput(run, start, SECONDS - 5.0) >= 0.9 * 0.7 * goodput(plain, start, SECONDS - 5.0)
    pooled = [preempted_ratio(served("bypass=0.3@45", seed=seed)) for seed in SEEDS]
    assert sum(pooled) / len(pooled) <= 0.01


@pytest.mark.parametrize("lag_s", [1.0, 5.0, 18.0])
def test_pages_that_lag_cost_next_to_nothing(lag_s: float) -> None:
    """C11: events were taken for several tokens each under lag, and a third of the goodput was gone."""
    plain = served()
    lagging = served(lag_s=lag_s)
    assert goodput(lagging, 5.0, SECONDS) >= 0.9 * goodput(plain, 5.0, SECONDS)
    assert preempted_ratio(lagging) <= 0.01
