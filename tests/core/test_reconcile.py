"""The gauge against what the ledger held."""

import pytest

from kvctl.core.reconcile import LAG_S, MOST_LAG_S, Dating, Reconciler

CAPACITY = 100_000


def polled(reconciler: Reconciler, count: int, used: float, *, held: float, start: float = 0.0) -> None:
    for i in range(count):
        now = start + i * 0.2
        reconciler.remember(held, now)
        reconciler.compare(used, CAPACITY, now)


def test_tokens_that_no_lease_explains_are_found_within_seconds() -> None:
    reconciler = Reconciler()
    polled(reconciler, 25, 70_000, held=40_000)
    assert reconciler.unattributed == pytest.approx(30_000, rel=0.02)


def test_they_fade_slowly_when_the_gauge_falls_and_end_at_zero() -> None:
    reconciler = Reconciler()
    polled(reconciler, 50, 70_000, held=40_000)
    polled(reconciler, 5, 40_000, held=40_000, start=20.0)
    assert reconciler.unattributed > 25_000
    polled(reconciler, 600, 40_000, held=40_000, start=30.0)
    assert reconciler.unattributed == 0.0


def test_a_gap_within_the_dead_zone_is_noise() -> None:
    reconciler = Reconciler()
    polled(reconciler, 100, 40_900, held=40_000)
    assert reconciler.unattributed == 0.0


def test_a_page_that_lags_is_compared_with_what_was_held_then() -> None:
    """C11: leases that ended a moment ago are still in the gauge and are nobody else's tokens."""
    reconciler = Reconciler()
    reconciler.remember(60_000, 10.0)
    reconciler.remember(5_000, 10.2)
    reconciler.compare(60_000, CAPACITY, 10.0 + LAG_S)
    assert reconciler.unattributed == 0.0
    reconciler.compare(60_000, CAPACITY, 10.3 + LAG_S)
    assert reconciler.unattributed > 0.0


def test_without_a_record_of_then_the_latest_counts() -> None:
    reconciler = Reconciler()
    reconciler.remember(60_000, 10.0)
    reconciler.compare(60_000, CAPACITY, 90.0)
    assert reconciler.unattributed == 0.0


def test_prompts_still_prefilling_are_neither_missing_nor_foreign() -> None:
    reconciler = Reconciler()
    for used in (0, 10_000, 50_000):
        reconciler.remember(50_000, 1.0)
        reconciler.compare(used, CAPACITY, 1.0)
    assert reconciler.unattributed == 0.0


def test_what_cannot_be_seen_any_more_fades() -> None:
    """Held for ever, it would keep the gate shut for as long as the page is gone."""
    reconciler = Reconciler()
    polled(reconciler, 50, 70_000, held=40_000)
    for _ in range(300):
        reconciler.blind()
    assert reconciler.unattributed < 100


def test_another_pool_holds_nothing_of_the_old_one() -> None:
    reconciler = Reconciler()
    polled(reconciler, 50, 70_000, held=40_000)
    reconciler.another_pool()
    assert reconciler.unattributed == 0.0


def test_what_is_remembered_is_bounded() -> None:
    reconciler = Reconciler()
    polled(reconciler, 5000, 0, held=0)
    assert len(reconciler._held) < 200


def dated(dating: Dating, seconds: int, lag_s: float, foreign_per_s: float = 0.0) -> float:
    """100 tokens a second through the gate, and pages that lag; how old the last one is found to be."""
    at = age = 0.0
    for beat in range(seconds * 5):
        at = beat / 5
        dating.seen_tokens += 20.0
        dating.remember(at)
        old = 20.0 + 20.0 * foreign_per_s / 100.0
        dating.page(None if beat == 0 else old if at > lag_s else 0.0, idle=False)
        age = at - dating.date(at)
    return age


@pytest.mark.parametrize("lag_s", [0.0, 1.0, 5.0, 18.0])
def test_a_page_is_dated_by_its_count_of_tokens(lag_s: float) -> None:
    assert dated(Dating(), 40, lag_s) == pytest.approx(lag_s, abs=0.5)


def test_where_others_generate_too_a_page_is_taken_for_fresh() -> None:
    assert dated(Dating(), 40, 5.0, foreign_per_s=100.0) == 0.0


def test_a_count_that_drifts_makes_no_page_older_than_pages_get() -> None:
    assert dated(Dating(), 200, 300.0) <= MOST_LAG_S + 0.5


def test_a_calm_moment_sets_the_count_right() -> None:
    dating = Dating()
    dated(dating, 40, 300.0)
    dating.page(0.0, idle=True)
    dating.remember(50.0)
    assert dating.date(50.0) == 50.0


def test_without_a_record_a_page_is_as_old_as_its_question() -> None:
    dating = Dating()
    dating.page(10.0, idle=False)
    assert dating.date(3.0) == 3.0
