"""Requests whose end nobody tells: none is given up while it may live, none is kept for ever."""

from dataclasses import replace

import pytest

from kvctl.core.outcomes import EndReason, EngineState
from kvctl.core.telemetry import RankSample
from kvctl.core.unseen import (
    DOUBTED,
    EMPTY_STATES,
    LEAST_S,
    SETTLE_S,
    STALL_SHARE,
    TIMES_ITS_TOKENS,
    TOOL_SILENCE_S,
    TURNS,
    EngineWork,
    Unseen,
)

STALL = 30.0
EMPTY = RankSample(
    rank="0",
    at=0.0,
    running=0,
    waiting=0,
    prompt_tokens_total=9.0,
    generation_tokens_total=9.0,
    started_at=1.0,
)
BUSY = replace(EMPTY, running=3)


def work(
    now: float, *samples: RankSample, state: EngineState = EngineState.UP, step_s: float = 0.05
) -> EngineWork:
    return EngineWork(state=state, at=now, samples=samples, seconds_per_step=step_s, stall_timeout_s=STALL)


def moved(sample: RankSample, tokens: int) -> RankSample:
    return replace(sample, generation_tokens_total=9.0 + tokens)


def ends_at(
    unseen: Unseen, *samples: RankSample, until: float, **more: object
) -> tuple[float, EndReason | None]:
    """Looks once a second; when it was given up, and why."""
    now = 0.0
    while now < until:
        now += 1.0
        reason = unseen.look(work(now, *samples, **more), now)  # type: ignore[arg-type]
        if reason is not None:
            return now, reason
    return until, None


def test_an_empty_engine_that_stands_still_is_believed_before_it_counts_as_wedged() -> None:
    at, reason = ends_at(Unseen(0.0, 8000), EMPTY, until=600.0)
    assert reason is EndReason.ENGINE_IDLE
    assert STALL_SHARE * STALL <= at - SETTLE_S < STALL


def test_empty_pages_at_several_states_of_the_counters_are_proof() -> None:
    """Others come and go; between two of the pages a step ended, which began with all that had come."""
    unseen = Unseen(0.0, 8000)
    for number in range(EMPTY_STATES):
        at = 2.0 + number
        reason = unseen.look(work(at, moved(EMPTY, number)), at)
        assert reason is (EndReason.ENGINE_IDLE if number == EMPTY_STATES - 1 else None)


def test_a_page_from_before_it_says_nothing() -> None:
    unseen = Unseen(100.0, 8000)
    for now in range(100, 140):
        assert unseen.look(work(100.0 + SETTLE_S, EMPTY), float(now)) is None


def test_one_rank_that_works_is_enough() -> None:
    assert ends_at(Unseen(0.0, 10**6), EMPTY, replace(BUSY, rank="1"), until=300.0) == (300.0, None)


@pytest.mark.parametrize("hidden", ["running", "waiting"])
def test_unknown_is_not_zero(hidden: str) -> None:
    page = replace(EMPTY, **{hidden: None})  # type: ignore[arg-type]
    assert ends_at(Unseen(0.0, 10**6), page, until=300.0) == (300.0, None)


@pytest.mark.parametrize(
    "state",
    [EngineState.WEDGED, EngineState.ASLEEP, EngineState.UNREACHABLE, EngineState.STALE, EngineState.FAULT],
)
def test_a_page_that_is_not_believed_proves_nothing(state: EngineState) -> None:
    assert ends_at(Unseen(0.0, 10**6), EMPTY, until=900.0, state=state) == (900.0, None)


def test_a_page_of_two_processes_proves_nothing() -> None:
    page = replace(EMPTY, unsupported="two processes")
    assert ends_at(Unseen(0.0, 10**6), page, until=300.0) == (300.0, None)


def test_where_nobody_waits_it_is_overdue_after_some_times_its_tokens() -> None:
    at, reason = ends_at(Unseen(0.0, 4000), BUSY, until=10_000.0, step_s=0.05)
    assert reason is EndReason.OVERDUE
    assert at == pytest.approx(TIMES_ITS_TOKENS * 4000 * 0.05, abs=1.0)


def test_a_short_answer_has_time_for_its_prompt() -> None:
    at, reason = ends_at(Unseen(0.0, 1), BUSY, until=10_000.0)
    assert reason is EndReason.OVERDUE
    assert at == pytest.approx(LEAST_S, abs=1.0)


@pytest.mark.parametrize(
    ("page", "state"),
    [(replace(BUSY, waiting=1), EngineState.UP), (BUSY, EngineState.STALE), (BUSY, EngineState.NO_TELEMETRY)],
)
def test_where_it_may_be_waiting_the_time_is_ten_times_as_long(page: RankSample, state: EngineState) -> None:
    """It may be starved by others' requests, yet it is not kept for ever."""
    at, reason = ends_at(Unseen(0.0, 4000), page, until=100_000.0, state=state)
    assert reason is EndReason.OVERDUE
    assert at == pytest.approx(TIMES_ITS_TOKENS * 4000 * 0.05 / DOUBTED, rel=0.01)


def test_an_engine_that_does_not_serve_takes_no_time() -> None:
    """It holds whatever it held; what the time is counted for begins when it serves again."""
    unseen = Unseen(0.0, 100)
    assert ends_at(unseen, BUSY, until=5000.0, state=EngineState.UNREACHABLE) == (5000.0, None)
    assert unseen.look(work(5001.0, BUSY), 5001.0) is None


def test_a_machine_that_stood_still_counts_for_a_moment_only() -> None:
    unseen = Unseen(0.0, 100)
    assert unseen.look(work(3600.0, BUSY), 3600.0) is None
    assert unseen.look(work(7200.0, BUSY), 7200.0) is None


def test_tools_of_the_engine_may_be_silent_for_long() -> None:
    at, reason = ends_at(Unseen(0.0, 8000, turns=True), EMPTY, until=5000.0)
    assert reason is EndReason.ENGINE_IDLE
    assert at == pytest.approx(TOOL_SILENCE_S + SETTLE_S, abs=2.0)
    at, _ = ends_at(Unseen(0.0, 100, turns=True), BUSY, until=5000.0)
    assert at == pytest.approx(TIMES_ITS_TOKENS * TURNS * 100 * 0.05, abs=1.0)


def test_empty_pages_between_turns_are_no_proof() -> None:
    unseen = Unseen(0.0, 8000, turns=True)
    for number in range(100):
        assert unseen.look(work(2.0 + number, moved(EMPTY, number)), 2.0 + number) is None


def test_a_restart_is_seen_once_and_for_all() -> None:
    unseen = Unseen(0.0, 8000)
    unseen.look(work(2.0, BUSY), 2.0)
    assert not unseen.restarted
    unseen.look(work(3.0, replace(BUSY, started_at=2.0)), 3.0)
    unseen.look(work(4.0, replace(BUSY, started_at=2.0)), 4.0)
    assert unseen.restarted


def test_two_processes_in_turn_are_no_restart() -> None:
    unseen = Unseen(0.0, 8000)
    for number in range(10):
        page = replace(BUSY, started_at=float(number % 2), unsupported="two processes")
        unseen.look(work(2.0 + number, page), 2.0 + number)
    assert not unseen.restarted
