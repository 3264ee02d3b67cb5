"""The first half minute behind an engine that nobody has seen before."""

from pathlib import Path

import pytest

from kvctl.sim.replay_policies import Spec, run_policy
from kvctl.sim.replay_score import Target, figures
from kvctl.sim.replay_setup import engine_config, make_scene, read_profile
from tests.bench.workloads import by_name

SEEDS = (1, 2, 3, 4)


def goodput(policy: str, seed: int) -> float:
    """Of 500 requests with caps of 4,096, some 200 tokens long in truth, at twice what the engine serves."""
    workload = by_name("sharegpt-like")
    engine = engine_config(read_profile(workload.profile), workload.capacity, workload.context)
    rows = workload.rows(Path())
    scene = make_scene(
        rows, engine, cap="4096", rate=15.0, start=(seed - 1) * 3001 % 11_000, requests=500, seed=seed
    )
    return figures(run_policy(Spec(policy), scene), Target()).goodput_rps


@pytest.mark.slow
def test_caps_that_say_little_hold_next_to_nothing_back_at_the_start() -> None:
    """A quarter of the cap, believed of all lengths that nobody had reached yet, cost a tenth of them."""
    told, known = (sum(goodput(policy, seed) for seed in SEEDS) for policy in ("forecast", "clairvoyant"))
    assert told >= 0.95 * known
