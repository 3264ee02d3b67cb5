"""The replay's world: callers, beats, faults, figures. Virtual time, so every number is exact."""

from dataclasses import replace

import pytest

from kvctl.sim.policies import ADMITTED, Door, Offer, Verdict
from kvctl.sim.replay import Run, Scene, replay
from kvctl.sim.replay_faults import parse_fault
from kvctl.sim.replay_policies import Spec, find_best, parse_policy, run_policy
from kvctl.sim.replay_score import Target, figures, is_good, ttft
from kvctl.sim.replay_setup import engine_config, make_scene, read_profile
from kvctl.sim.trace import Row

TARGET = Target()


def rows(count: int, output: int = 120, prompt: int = 800) -> list[Row]:
    return [
        Row(
            number=n,
            at_s=float(n),
            prompt_tokens=prompt + 37 * (n % 11),
            output_tokens=output * (1 + n % 5) // 2,
        )
        for n in range(count)
    ]


def scene(count: int = 300, rate: float = 8.0, cap: str = "4096", faults: tuple[str, ...] = ()) -> Scene:
    engine = engine_config(read_profile("8b-h200"), 24_000, 8192)
    return make_scene(rows(count), engine, cap=cap, rate=rate, faults=[parse_fault(text) for text in faults])


def went(name: str, one: Scene) -> Run:
    return run_policy(parse_policy(name), one)


class Closed(Door):
    """Refuses everybody, with a hint."""

    def __init__(self, hint: float | None, *, final: bool = False, until: float = 1e9) -> None:
        self.tries: dict[str, list[float]] = {}
        self._verdict = Verdict(admitted=False, retry_after_s=hint, final=final)
        self._until = until

    def arrived(self, offer: Offer, now: float) -> Verdict:
        self.tries.setdefault(offer.id.split("-")[0], []).append(now)
        return ADMITTED if now >= self._until else self._verdict


def test_a_caller_comes_back_when_told_and_twice() -> None:
    door = Closed(1.5)
    run = replay(scene(3, 1.0), door)
    assert door.tries["1"] == pytest.approx([1.0, 2.5, 4.0])
    assert all(call.given_up and call.tries == 3 for call in run.calls)
    assert figures(run, TARGET).refused == 3
    assert figures(run, TARGET).retry_success_frac == 0.0


def test_without_a_hint_the_caller_backs_off_with_jitter() -> None:
    door = Closed(None)
    replay(scene(20, 1.0), door)
    first = [tries[1] - tries[0] for tries in door.tries.values()]
    second = [tries[2] - tries[1] for tries in door.tries.values()]
    assert all(0.375 <= wait <= 0.5 for wait in first)
    assert all(0.75 <= wait <= 1.0 for wait in second)
    assert len(set(first)) > 10


def test_a_final_refusal_is_not_tried_again() -> None:
    assert all(call.tries == 1 for call in replay(scene(3, 1.0), Closed(1.0, final=True)).calls)


def test_time_to_first_token_counts_from_the_first_attempt() -> None:
    run = replay(scene(2, 1.0), Closed(1.0, until=0.5))
    first, second = run.calls
    assert first.retries == first.retries_admitted == 1
    assert (ttft(first) or 0.0) > 1.0 > (ttft(second) or 9.0)
    assert figures(run, TARGET).retry_success_frac == 1.0
    assert not is_good(first, Target(ttft_s=1.0))


def test_the_way_in_comes_before_the_first_step() -> None:
    one = scene(5, 0.5)
    far = replace(one, engine=replace(one.engine, profile=replace(one.engine.profile, request_s=0.25)))
    firsts = [[ttft(call) or 0.0 for call in replay(each, Door()).calls] for each in (one, far)]
    assert firsts[1] == pytest.approx([first + 0.25 for first in firsts[0]])


def test_who_is_on_the_way_in_when_the_engine_dies_is_lost_with_it() -> None:
    one = scene(30, 5.0, faults=("restart=3@2",))
    far = replace(one, engine=replace(one.engine, profile=replace(one.engine.profile, request_s=0.5)))
    run = replay(far, Door())
    assert all(call.complete or call.given_up for call in run.calls)


def test_an_idle_engine_serves_everybody_alike_under_every_policy() -> None:
    quiet = scene(20, 0.5, cap="exact")
    for name in ("forecast", "static", "none", "kv-gauge", "past-future", "clairvoyant", "concurrency=4"):
        found = figures(went(name, quiet), TARGET)
        assert (found.completed, found.refused, found.preemptions) == (20, 0, 0), name
        assert found.goodput_frac == 1.0, name


def test_overload_tells_the_policies_apart() -> None:
    busy = scene(600, 30.0)
    found = {
        name: figures(went(name, busy), TARGET)
        for name in ("none", "static", "forecast", "clairvoyant", "past-future", "kv-gauge")
    }
    assert found["none"].preemptions > 50
    assert found["none"].recomputed_frac > 0.05
    assert found["forecast"].preemptions == found["clairvoyant"].preemptions == 0
    assert found["forecast"].goodput_rps > 0.85 * found["clairvoyant"].goodput_rps
    assert found["forecast"].goodput_rps > 2.0 * found["static"].goodput_rps
    assert found["past-future"].goodput_rps > found["static"].goodput_rps
    assert found["none"].goodput_rps < found["forecast"].goodput_rps


def test_the_best_limit_is_a_peak() -> None:
    busy = scene(200, 30.0)
    best = find_best(Spec("concurrency"), busy, TARGET)
    assert best.limit is not None

    def goodput(limit: int) -> float:
        return figures(run_policy(replace(best, limit=limit), busy), TARGET).goodput_rps

    assert goodput(best.limit) >= max(
        goodput(best.limit - 1), goodput(best.limit + 1), goodput(2), goodput(200)
    )


def test_the_engines_own_cap_counts_waiting_and_running() -> None:
    busy = scene(150, 30.0)
    own, proxy = went("engine-queue=12", busy), went("concurrency=12", busy)
    assert figures(own, TARGET) == figures(proxy, TARGET)


def test_a_cap_below_the_answer_cuts_it() -> None:
    run = went("none", scene(10, 0.5, cap="50"))
    assert {call.output for call in run.calls} == {50}
    assert all(call.complete for call in run.calls)


def test_same_seed_same_run() -> None:
    busy = scene(200, 30.0)
    first, second = went("forecast", busy), went("forecast", busy)
    assert figures(first, TARGET) == figures(second, TARGET)
    assert first.points == second.points


def test_a_shift_makes_answers_longer_from_then_on() -> None:
    shifted = scene(100, 10.0, faults=("shift=4@5",)).rows
    usual = scene(100, 10.0).rows
    for row, before in zip(shifted, usual, strict=True):
        assert row.output_tokens == before.output_tokens * (4 if row.at_s >= 5.0 else 1)


def test_traffic_past_the_gate_fills_its_share_and_the_gate_makes_room() -> None:
    busy = scene(400, 30.0, faults=("bypass=0.3",))
    found = figures(went("forecast", busy), TARGET)
    assert found.preemptions <= 0.05 * 400
    alone = figures(went("forecast", scene(400, 30.0)), TARGET)
    assert 0.3 * alone.goodput_rps < found.goodput_rps < alone.goodput_rps


def test_a_restart_breaks_answers_and_the_gate_serves_again() -> None:
    hit = scene(300, 10.0, faults=("restart=5@10",))
    run = went("forecast", hit)
    broken = [call for call in run.calls if call.first_at is not None and not call.complete]
    assert broken
    assert all(call.given_up for call in broken)
    again = [call for call in run.calls if call.row.at_s > 18.0 and call.complete]
    assert len(again) > 50
    assert not any(15.0 > (call.first_at or 0.0) > 10.0 for call in run.calls)


def test_a_frozen_page_does_not_stop_admission() -> None:
    run = went("forecast", scene(300, 10.0, faults=("freeze=10@10",)))
    assert sum(is_good(c, TARGET) for c in run.calls if 10.0 < c.row.at_s < 20.0) > 20


def test_a_neighbour_lowers_the_budget_while_it_is_there() -> None:
    run = went("forecast", scene(300, 10.0, faults=("neighbour=10@10",)))
    budgets = {point.at_s: point.budget or 0 for point in run.points}
    assert budgets[15.0] < 0.6 * budgets[8.0]
    assert budgets[24.0] == budgets[8.0]


@pytest.mark.parametrize("text", ["flood=3", "shift=x", "freeze=-1", "restart=5@-2", "bypass=inf"])
def test_faults_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - several texts
        parse_fault(text)


@pytest.mark.parametrize(
    "text", ["best", "concurrency", "concurrency=0", "concurrency=x", "forecast=3", "none=1"]
)
def test_policies_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_policy(text)
