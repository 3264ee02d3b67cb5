"""Quotas with an honest time, and shares by weight that cost nothing while nobody contends."""

import random

import pytest

from kvctl.core.outcomes import RejectReason
from kvctl.core.tenants import DEFAULT, MOST_EXPECTED, OTHER, Quotas, Shares, TenantRule, Tenants


def quotas(**limits: int) -> Quotas:
    return Quotas({"a": TenantRule(name="a", **limits)})  # type: ignore[arg-type]


def test_a_request_too_many_frees_when_the_oldest_is_a_minute_old() -> None:
    held = quotas(requests_per_minute=2)
    for number, at in enumerate((0.0, 10.0)):
        assert held.refuse("a", 1.0, at) is None
        held.opened(f"{number}", "a", 1.0, at)
    over = held.refuse("a", 1.0, 20.0)
    assert over is not None
    assert over.reason is RejectReason.TENANT_REQUESTS_PER_MINUTE
    assert over.seconds == pytest.approx(40.0)
    assert held.refuse("a", 1.0, 59.9) is not None
    assert held.refuse("a", 1.0, 60.0) is None


def test_tokens_of_the_minute_are_what_was_held_once_that_is_known() -> None:
    held = quotas(tokens_per_minute=1000)
    held.opened("x", "a", 900.0, 0.0)
    over = held.refuse("a", 200.0, 30.0)
    assert over is not None
    assert over.reason is RejectReason.TENANT_TOKENS_PER_MINUTE
    assert over.seconds == pytest.approx(30.0)
    held.ended("x", 100, 30.0)
    assert held.refuse("a", 200.0, 30.0) is None


def test_the_time_is_when_enough_of_the_minute_has_passed() -> None:
    held = quotas(tokens_per_minute=1000)
    for number, at in enumerate((0.0, 20.0, 40.0)):
        held.opened(f"{number}", "a", 300.0, at)
    one, two = held.refuse("a", 350.0, 50.0), held.refuse("a", 700.0, 50.0)
    assert one is not None
    assert two is not None
    assert one.seconds == pytest.approx(10.0)
    assert two.seconds == pytest.approx(30.0)


@pytest.mark.parametrize("limit", ["tokens_per_minute", "tokens_in_flight"])
def test_what_is_larger_than_the_quota_passes_when_the_quota_is_untouched(limit: str) -> None:
    """Refused, it could come back for ever."""
    held = quotas(**{limit: 1000})
    assert held.refuse("a", 5000.0, 0.0) is None
    held.opened("x", "a", 5000.0, 0.0)
    assert held.refuse("a", 10.0, 1.0) is not None
    held.ended("x", 5000, 2.0)
    assert held.refuse("a", 5000.0, 63.0) is None


def test_tokens_in_flight_free_at_the_pace_at_which_the_tenants_own_end() -> None:
    held = quotas(tokens_in_flight=1000)
    for number in range(5):
        held.opened(f"{number}", "a", 200.0, 0.0)
    first = held.refuse("a", 200.0, 1.0)
    assert first is not None
    assert (first.reason, first.seconds) == (RejectReason.TENANT_TOKENS_IN_FLIGHT, None)
    held.ended("0", 200, 2.0)
    held.opened("5", "a", 200.0, 2.0)
    second = held.refuse("a", 400.0, 4.0)
    assert second is not None
    assert second.seconds == pytest.approx(4.0)
    assert held.refuse("b", 1e9, 4.0) is None


def test_when_nothing_runs_a_tenant_holds_exactly_nothing() -> None:
    held = quotas(tokens_in_flight=1000)
    for number in range(30):
        held.opened(f"{number}", "a", 0.1 * number, 0.0)
    for number in range(30):
        held.ended(f"{number}", 1, 1.0)
    assert held.in_flight("a") == 0.0
    assert held.ended("0", 1, 1.0) is None


def shares(**weights: float) -> Shares:
    return Shares({name: TenantRule(name=name, weight=weight) for name, weight in weights.items()})


def test_alone_a_tenant_may_have_everything() -> None:
    held = shares(a=1.0, b=1.0)
    held.opened("a", 900.0, 0.0)
    assert held.owed_to_others("a", 100.0, 900.0, 1000.0, 0.0) == 0.0


def test_what_another_wanted_of_late_is_kept_for_it_up_to_its_share() -> None:
    held = shares(a=1.0, b=1.0)
    held.opened("a", 900.0, 0.0)
    held.expected("b", 100.0, 1.0, 0.0)
    owed = held.owed_to_others("a", 100.0, 900.0, 1000.0, 0.5)
    assert 100.0 <= owed <= 410.0  # what it wants, and room for its next ones
    for _ in range(20):
        held.expected("b", 100.0, 1.0, 0.5)
    assert held.owed_to_others("a", 100.0, 900.0, 1000.0, 0.5) == pytest.approx(500.0)
    assert held.owed_to_others("b", 100.0, 900.0, 1000.0, 0.5) == 0.0


def test_weights_move_the_share() -> None:
    held = shares(a=3.0, b=1.0)
    held.opened("a", 900.0, 0.0)
    for _ in range(20):
        held.expected("b", 100.0, 1.0, 0.0)
    assert held.owed_to_others("a", 100.0, 900.0, 1000.0, 0.0) == pytest.approx(250.0)


def test_who_wants_little_leaves_the_rest_to_the_others() -> None:
    held = shares(a=1.0, b=1.0, c=1.0)
    held.opened("a", 800.0, 0.0)
    held.opened("c", 100.0, -100.0)
    held.ended("c", 100.0, -99.0)
    for _ in range(20):
        held.expected("b", 100.0, 1.0, 0.0)
    assert held.owed_to_others("a", 100.0, 800.0, 1000.0, 0.0) > 450.0  # half, not a third


def test_who_hammers_costs_no_more_than_others() -> None:
    """Refused again and again with long hints, it is expected back a bounded number of times."""
    held = shares(a=1.0, b=1.0)
    held.opened("b", 900.0, 0.0)
    for n in range(100_000):
        held.expected("a", 1.0, 60.0, n * 1e-4)
    (stake,) = [one for one in held._stakes.values() if one.expected]
    assert len(stake.expected) == MOST_EXPECTED
    assert stake.awaited == MOST_EXPECTED
    for n in range(MOST_EXPECTED):
        held.opened("a", 0.0, 10.0 + n * 1e-4)
    assert (len(stake.expected), stake.awaited) == (0, 0.0)


def test_tenants_that_have_gone_leave_nothing_behind() -> None:
    names = [f"t{n}" for n in range(2_000)]
    held = shares(**dict.fromkeys(names, 1.0))
    for name in names:
        held.opened(name, 50.0, 0.0)
        held.ended(name, 50.0, 1.0)
    held.owed_to_others("t0", 100.0, 900.0, 1000.0, 5.0)
    assert len(held._stakes) == 2_000
    held.opened("t7", 50.0, 500.0)
    held.owed_to_others("t0", 100.0, 900.0, 1000.0, 900.0)
    assert list(held._stakes) == ["t7"]  # it is still there
    held.ended("t7", 50.0, 900.0)
    assert held.used("t7", 900.0) > 0.0


def test_what_is_owed_at_most_is_no_less_than_what_is_owed() -> None:
    """Who fits beside all that anybody may be owed is let in without a look at each."""
    draw = random.Random(3)
    held = shares(a=1.0, b=2.0, c=1.0, d=0.5)
    open_by: dict[str, list[float]] = {name: [] for name in "abcd"}
    for step in range(2_000):
        now, name, tokens = step * 0.05, draw.choice("abcd"), float(draw.randint(10, 200))
        if draw.random() < 0.3:
            held.expected(name, tokens, draw.random() * 4.0, now)
        elif draw.random() < 0.5:
            open_by[name].append(tokens)
            held.opened(name, tokens, now)
        elif open_by[name]:
            held.ended(name, open_by[name].pop(), now)
        peak = sum(map(sum, open_by.values())) * draw.uniform(0.4, 1.0)
        asks = draw.choice("abcd")
        most = held.owed_to_others_at_most(asks)
        assert held.owed_to_others(asks, tokens, peak, draw.uniform(100.0, 4_000.0), now) <= most + 1e-6


def test_nothing_is_kept_for_who_has_gone() -> None:
    held = shares(a=1.0, b=1.0)
    held.opened("a", 900.0, 0.0)
    held.expected("b", 400.0, 1.0, 0.0)
    assert held.owed_to_others("a", 100.0, 900.0, 1000.0, 120.0) == 0.0


def test_use_is_counted_in_token_seconds_by_weight_and_fades() -> None:
    held = shares(a=1.0, b=2.0)
    for name in ("a", "b"):
        held.opened(name, 100.0, 0.0)
        held.ended(name, 100.0, 10.0)
    assert held.used("a", 10.0) == pytest.approx(2.0 * held.used("b", 10.0))
    assert held.used("a", 200.0) < 0.01 * held.used("a", 10.0) or held.used("a", 200.0) < 10.0
    assert held.used("nobody", 0.0) == 0.0


def test_without_rules_nobody_is_told_apart() -> None:
    off = Tenants(())
    assert (off.on, off.known("x"), off.label("x"), off.labels) == (False, "", "", ())


def test_labels_are_bounded() -> None:
    """C28: no series for each of many names."""
    many = Tenants([TenantRule(name=f"t{n}") for n in range(30)])
    assert many.known("stranger") == DEFAULT
    labels = {many.label(many.known(f"t{n}")) for n in range(40)}
    assert labels == {*(f"t{n}" for n in range(20)), OTHER, DEFAULT} == set(many.labels)
