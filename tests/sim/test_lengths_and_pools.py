"""Workloads on which the forecast was once wrong: too short a tail, and too wide a spread."""

import random
from pathlib import Path

import pytest

from kvctl.sim.replay import Run, Scene
from kvctl.sim.replay_policies import Spec, run_policy
from kvctl.sim.replay_score import Target, is_good
from kvctl.sim.replay_setup import engine_config, make_scene, read_profile
from kvctl.sim.trace import Row
from tests.bench.workloads import by_name

pytestmark = pytest.mark.slow


def scene(rows: list[Row], profile: str, pool: int, rate: float) -> Scene:
    """The rows at ``rate`` a second, callers' caps 4,096."""
    engine = engine_config(read_profile(profile), pool, 32_768)
    return make_scene(rows, engine, cap="4096", rate=rate, start=0, requests=len(rows), seed=3)


def good(run: Run) -> int:
    return sum(is_good(call, Target()) for call in run.calls)


def test_two_humps_of_lengths_preempt_hardly_anybody_after_a_start() -> None:
    """When the engine's histogram is first believed it holds short answers only."""
    rows = by_name("bimodal").rows(Path())[6002:7002]
    run = run_policy(Spec("forecast"), scene(rows, "8b-24g", 48_000, 12.08))
    assert run.preemptions <= 10


def test_a_pool_of_a_few_large_prompts_is_used() -> None:
    """Of five prompts of 25,000, two deviations of a normal law stood for a sixth beside what is there."""
    source, at, rows = random.Random(5), 0.0, []
    for number in range(250):
        at += source.expovariate(1.0)
        rows.append(
            Row(
                number=number,
                at_s=at,
                prompt_tokens=source.randint(18_000, 29_000),
                output_tokens=source.randint(20, 900),
            )
        )
    there = scene(rows, "8b-h200", 128_000, 1.4)
    forecast, clairvoyant = (run_policy(Spec(name), there) for name in ("forecast", "clairvoyant"))
    assert forecast.preemptions == 0
    assert good(forecast) >= 0.85 * good(clairvoyant)
