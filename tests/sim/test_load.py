import random
from itertools import pairwise

import pytest

from kvctl.sim import text
from kvctl.sim.client import MAX_RETRIES, Outcome, chat_body, may_retry, retry_delay
from kvctl.sim.load import PHASES, Call, calls, phase_at
from kvctl.sim.score import first_token_times, is_good, quantile, score


def call(at: float = 0.0) -> Call:
    return Call(at_s=at, prompt_tokens=100, output_tokens=10, cap_tokens=2048)


def outcome(at: float, first: float | None, last: float | None = None, **more: bool | int) -> Outcome:
    return Outcome(call=call(at), first_at=first, last_at=last, tokens=11, **more)  # type: ignore[arg-type]


def test_the_same_seed_is_the_same_load() -> None:
    assert calls(20, 1) == calls(20, 1)
    assert calls(20, 1) != calls(20, 2)


def test_arrivals_are_in_order_bounded_and_burst() -> None:
    made = calls(100, 3)
    assert all(a.at_s <= b.at_s for a, b in pairwise(made))
    assert made[-1].at_s < PHASES[-1].until * 100
    rates = [
        sum(start * 100 <= one.at_s < phase.until * 100 for one in made) / ((phase.until - start) * 100)
        for start, phase in zip([0.0, *(p.until for p in PHASES)], PHASES, strict=False)
    ]
    for rate, phase in zip(rates, PHASES, strict=True):
        assert rate == pytest.approx(phase.rate, rel=0.35)


def test_callers_ask_for_far_more_than_they_use() -> None:
    made = calls(100, 3)
    assert all(2048 <= one.cap_tokens <= 4096 for one in made)
    assert sum(one.cap_tokens for one in made) > 10 * sum(one.output_tokens for one in made)
    assert all(one.prompt_tokens + one.output_tokens < 8192 for one in made)


def test_phases_end() -> None:
    assert phase_at(0.0) is PHASES[0]
    assert phase_at(PHASES[-1].until) is None


def test_prompt_has_the_tokens_that_the_call_says() -> None:
    assert text.count_chat(chat_body(call(), "sim")) == 100


@pytest.mark.parametrize(
    ("headers", "least", "most"),
    [
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25, 0.25),
        ({"retry-after": "3"}, 3.0, 3.0),
        ({"retry-after": "soon"}, 0.375, 0.5),
        ({"retry-after": "0"}, 0.375, 0.5),
        ({"retry-after": "999"}, 0.375, 0.5),
        ({}, 0.375, 0.5),
    ],
)
def test_hints_are_obeyed(headers: dict[str, str], least: float, most: float) -> None:
    assert least <= retry_delay(headers, 0, random.Random(1)) <= most


def test_back_off_doubles() -> None:
    assert retry_delay({}, 2, random.Random(1)) > 1.4


@pytest.mark.parametrize(
    ("status", "told", "again"),
    [
        (429, None, True),
        (503, None, True),
        (0, None, True),
        (400, None, False),
        (400, "true", True),
        (429, "false", False),
    ],
)
def test_what_is_tried_again(status: int, told: str | None, again: bool) -> None:
    assert may_retry(status, {} if told is None else {"x-should-retry": told}) is again


def test_goodput_counts_what_was_in_time_only() -> None:
    outcomes = [
        outcome(1.0, 2.0, 2.5, complete=True),  # good
        outcome(1.0, 3.5, 4.0, complete=True),  # first token late
        outcome(1.0, 2.0, 4.0, complete=True),  # too slow between tokens
        outcome(1.0, 2.0, 2.5),  # not finished
        outcome(1.0, None, refusals=3, given_up=True),  # refused
        outcome(1.0, None, given_up=True),  # failed
        outcome(1.0, None),  # waits still
    ]
    assert [is_good(one) for one in outcomes] == [True] + [False] * 6
    result = score(outcomes, 10.0)
    assert (result.good, result.goodput_rps, result.completed) == (1, 0.1, 3)
    assert (result.refused, result.failed, result.unfinished, result.refusals) == (1, 1, 2, 3)
    assert result.calls == result.completed + result.refused + result.failed + result.unfinished


def test_who_still_waits_is_not_left_out_of_the_percentiles() -> None:
    outcomes = [outcome(0.0, 0.5), outcome(2.0, None), outcome(0.0, None, given_up=True)]
    assert first_token_times(outcomes, now=10.0) == [0.5, 8.0]


def test_quantile_is_the_nearest_rank() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(list(range(1, 101)), 0.99) == 99


def test_callers_try_as_often_as_openai_python() -> None:
    assert MAX_RETRIES == 2
