"""When to come back."""

import pytest

from kvctl.core.retry import FLOOR_S, SPREAD, RetryHints


def draining(tokens_per_s: float) -> RetryHints:
    hints = RetryHints(longest_s=60.0)
    for i in range(50):
        hints.drained(tokens_per_s / 5, i * 0.2)
    return hints


def test_the_time_is_what_is_missing_over_the_rate_spread_upwards() -> None:
    hints = draining(1000.0)
    assert hints.rate(9.8) == pytest.approx(1000.0, rel=0.05)
    times = [hints.after(5000.0, hints.rate(9.8), 9.8) for _ in range(200)]
    assert min(times) >= 4.8
    assert max(times) <= 5.0 * (1 + SPREAD)
    assert len({round(t, 2) for t in times}) > 100


def test_the_spread_is_the_same_for_the_same_seed_only() -> None:
    one, same, other = (RetryHints(longest_s=60.0, seed=seed) for seed in (0.3, 0.3, 0.7))
    assert [one.spread(1.0) for _ in range(5)] == [same.spread(1.0) for _ in range(5)]
    assert one.spread(1.0) != other.spread(1.0)


def test_it_is_never_zero_and_never_past_the_longest() -> None:
    hints = draining(1000.0)
    assert hints.after(0.0, hints.rate(9.8), 9.8) >= FLOOR_S
    times = [hints.after(1e12, hints.rate(9.8), 9.8) for _ in range(100)]
    assert max(times) <= 60.0
    assert len({round(t, 1) for t in times}) > 50, (
        "those told the longest time must not return together either"
    )


def test_few_ends_or_old_ones_are_no_rate() -> None:
    hints = RetryHints(longest_s=60.0)
    hints.drained(500.0, 1.0)
    hints.drained(500.0, 2.0)
    assert hints.rate(2.0) is None
    hints.drained(500.0, 3.0)
    assert hints.rate(3.0) is not None
    assert hints.rate(30.0) is None
    for i in range(5):
        hints.drained(-3.0, 40.0 + i)
    assert hints.rate(44.0) is None, "a peak that did not fall drains nothing"


def test_without_a_rate_a_crowd_of_refusals_does_not_push_the_hint_up() -> None:
    """A thousand callers refused within a second are told a second, not a minute."""
    hints = RetryHints(longest_s=60.0)
    times = [hints.after(5000.0, hints.rate(i * 0.001), i * 0.001) for i in range(1000)]
    assert max(times) <= 1.5


def test_without_a_rate_it_grows_with_how_long_callers_are_refused_and_ends_with_an_admission() -> None:
    hints = RetryHints(longest_s=60.0)
    hints.after(1.0, hints.rate(0.0), 0.0)
    assert 8.0 <= hints.after(1.0, hints.rate(8.0), 8.0) <= 12.0
    assert 30.0 <= hints.after(1.0, hints.rate(5000.0), 5000.0) <= 60.0
    hints.admitted()
    assert hints.after(1.0, hints.rate(5001.0), 5001.0) <= 1.5
