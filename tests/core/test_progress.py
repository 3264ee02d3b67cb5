"""Tokens per event and the pace of answers that show nothing."""

import pytest

from kvctl.core.progress import MOST_TOKENS_PER_EVENT, UNKNOWN_PACE, Pace


def pages(pace: Pace, count: int, *, generated: float, running: int, events: int = 0) -> None:
    pace.page(None, running, 0.0)
    for i in range(1, count + 1):
        pace.events += events
        pace.page(generated, running, i * 0.2)


def test_tokens_per_event_are_learned_from_the_engines_own_counter() -> None:
    pace = Pace()
    pages(pace, 100, generated=60.0, running=10, events=20)
    assert pace.tokens_per_event == pytest.approx(3.0, rel=0.05)


def test_a_token_is_never_more_than_one_event_and_the_ratio_has_a_bound() -> None:
    few, many = Pace(), Pace()
    pages(few, 100, generated=5.0, running=10, events=20)
    pages(many, 100, generated=5e6, running=10, events=20)
    assert few.tokens_per_event == 1.0
    assert many.tokens_per_event <= MOST_TOKENS_PER_EVENT


def test_a_page_that_lags_does_not_make_events_look_like_more_tokens() -> None:
    """C11: one token each, in surges of some seconds, and a counter that is two seconds late."""
    pace, seen = Pace(), [20 if (i // 25) % 2 else 80 for i in range(600)]
    pace.page(None, 10, 0.0)
    for i in range(1, 600):
        pace.events += seen[i]
        pace.page(float(seen[i - 10] if i >= 10 else 0), 10, i * 0.2)
        assert pace.tokens_per_event <= 1.1


def test_traffic_that_shows_no_events_teaches_nothing_about_them() -> None:
    pace = Pace()
    pace.page(None, 10, 0.0)
    for i in range(1, 100):
        pace.events += 20
        pace.others_run()
        pace.page(400.0, 10, i * 0.2)
    assert pace.tokens_per_event == 1.0


def test_the_pace_of_one_sequence_is_learned() -> None:
    pace = Pace()
    assert pace.tokens_per_s == UNKNOWN_PACE
    pages(pace, 50, generated=100.0, running=10)
    assert pace.tokens_per_s == pytest.approx(50.0, rel=0.01)


def test_a_crowd_that_ended_just_before_the_page_does_not_make_the_rest_fast() -> None:
    """100 sequences made 1,000 tokens and 99 of them ended: the pace is 50, not 5,000."""
    pace = Pace()
    pages(pace, 50, generated=1000.0, running=100)
    pace.page(1000.0, 1, 50 * 0.2 + 0.2)
    assert pace.tokens_per_s == pytest.approx(50.0, rel=0.01)


@pytest.mark.parametrize("now", [0.2, 0.1])
def test_two_pages_of_one_moment_say_nothing(now: float) -> None:
    pace = Pace()
    pace.page(None, 1, 0.2)
    pace.page(1000.0, 1, now)
    assert pace.tokens_per_s == UNKNOWN_PACE


def test_silent_answers_begin_after_the_usual_first_token() -> None:
    pace = Pace()
    for _ in range(50):
        pace.first_token(2.0)
    assert pace.silent_output(1.5) == 0.0
    assert pace.silent_output(3.0) == pytest.approx(UNKNOWN_PACE, rel=0.01)
