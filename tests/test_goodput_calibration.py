"""The simulated engine beside the real one: step times, ways in and paces, and what is compared."""

from dataclasses import replace
from typing import Any

import pytest

from kvctl.sim.profiles import PROFILES
from kvctl.sim.replay_policies import parse_policy, run_policy
from kvctl.sim.replay_score import figures
from tests.bench.calibration import compare, fitted, pace, simulated, tell_paces, windows
from tests.bench.goodput.bench import Group, Record, saturation, scene_of
from tests.bench.goodput.figures import TARGET
from tests.bench.goodput.stage import USUAL, Page
from tests.bench.goodput.workload import BURSTS


def looked(at: float, **more: Any) -> Page:
    plain = {"usage": 0.5, "running": 1, "waiting": 0, "preemptions": 0, "prompt_tokens": 0}
    return Page(at=at, **(plain | {"generation_tokens": 0, "steps": None} | more))


def recorded(rate: float = 18.0) -> Record:
    """A run of the simulated engine that stands for a real one, with pages that count its steps."""
    profile = PROFILES["tiny-cpu"]
    group = Group(rate=rate, seed=1, cap="2048", workload=BURSTS, seconds=8.0)
    scene = scene_of(group, profile)
    found = figures(run_policy(parse_policy("forecast"), scene), TARGET)
    pages, at = list[Page](), 0.0
    for n in range(60):
        steps, prompt, held = 20 + n % 7, 500 * (n % 3), USUAL.tokens * (0.3 + n % 5 * 0.1)
        output = steps * (10 + n % 11)
        at += profile.base_s * steps + profile.prefill_token_s * prompt
        at += profile.decode_sequence_s * output + profile.kv_token_s * steps * held
        last = pages[-1] if pages else looked(0.0, steps=0)
        pages.append(
            looked(
                at,
                usage=0.3 + n % 5 * 0.1,
                steps=(last.steps or 0) + steps,
                prompt_tokens=last.prompt_tokens + prompt,
                generation_tokens=last.generation_tokens + output,
            )
        )
    shown = {
        name: getattr(found, name) for name in ("kv_usage_mean", "ttft_p50_s", "preemptions", "goodput_rps")
    }
    shown["running_mean"] = 5.0 if rate < 10.0 else 45.0
    return Record(group, "forecast", list(scene.rows), pages, shown)


def test_step_times_are_found_from_what_an_engine_counts() -> None:
    found, wanted = fitted([recorded()]), PROFILES["tiny-cpu"]
    assert found.base_s == pytest.approx(wanted.base_s, rel=0.25)
    assert found.prefill_token_s == pytest.approx(wanted.prefill_token_s, rel=0.1)
    assert found.decode_sequence_s == pytest.approx(wanted.decode_sequence_s, rel=0.1)


def test_windows_with_or_after_a_preemption_or_without_work_say_nothing() -> None:
    pages = [
        looked(0.0, steps=1),
        looked(1.0, steps=5),
        looked(3.0, steps=9, preemptions=1),
        looked(6.0, steps=12, preemptions=1),
        looked(10.0, steps=14, preemptions=1),
        looked(15.0, steps=14, preemptions=1),
    ]
    assert [one.seconds for one in windows(pages)] == [1.0, 4.0]


def test_an_engine_agrees_with_itself_and_not_with_one_that_takes_requests_in_later() -> None:
    same = compare([recorded(rate=4.0)], PROFILES["tiny-cpu"])[0]  # a load at which chance decides little
    assert same["paces"] == [pytest.approx(1.0, abs=0.02)]
    assert same["kv_usage_ratio"] == pytest.approx(1.0, abs=0.05)
    assert all(same[name] for name in ("kv_usage_within", "ttft_p50_within", "preemptions_within"))
    later = replace(PROFILES["tiny-cpu"], request_s=0.3)
    assert not compare([recorded(rate=4.0)], later)[0]["ttft_p50_within"]


def test_a_run_is_replayed_on_an_engine_as_fast_as_it_was_then() -> None:
    half = PROFILES["tiny-cpu"].slower(0.5)
    assert pace(recorded(), half) == pytest.approx(2.0, abs=0.05)
    assert half.slower(2.0) == PROFILES["tiny-cpu"]
    usages = [simulated(recorded(rate=4.0), one)["kv_usage_mean"] for one in (half, PROFILES["tiny-cpu"])]
    assert usages[0] == pytest.approx(usages[1], rel=0.05)


def test_what_takes_requests_in_is_busy_with_the_tokens_of_others() -> None:
    true = replace(PROFILES["tiny-cpu"], request_s=0.02, request_sequence_s=0.001)
    assert true.way_in_seconds(10) == pytest.approx(0.03)
    runs = [recorded(), recorded(rate=4.0)]
    for one in runs:
        one.figures["taken_in_p50_s"] = simulated(one, true)["taken_in_p50_s"]
    found = fitted(runs)
    assert found.way_in_seconds(5) == pytest.approx(0.025, rel=0.4)
    assert found.way_in_seconds(45) == pytest.approx(0.065, rel=0.4)


def test_each_run_tells_how_fast_its_engine_was() -> None:
    slow, fast = recorded(), recorded(rate=4.0)
    twice = [replace(page, at=2.0 * page.at) for page in slow.pages]
    runs = [replace(slow, pages=twice), fast]
    assert tell_paces(runs) == [fast.figures["pace"], slow.figures["pace"]]
    assert slow.figures["pace"] == pytest.approx(2.0 * fast.figures["pace"], rel=0.02)
    assert tell_paces([replace(slow, pages=[])]) is None


def test_saturation_is_what_an_engine_serves_when_somewhat_more_come() -> None:
    group = Group(rate=0.0, seed=1, cap="2048", workload=BURSTS, seconds=1.0)
    assert 4.0 < saturation(group, PROFILES["tiny-cpu"].slower(2.5)) < 7.0
