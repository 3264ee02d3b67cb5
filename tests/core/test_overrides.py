import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.overrides import (
    Knob,
    Override,
    OverrideError,
    Overrides,
    Refusal,
    StateError,
    bounds,
)

LIMITS = bounds(0.0, 0.5)
DAY = 86400.0


def fresh() -> Overrides:
    return Overrides(LIMITS, DAY)


def put(held: Overrides, value: object = 0.12, mono: float = 0.0, **changes: Any) -> Override:
    given: dict[str, Any] = {
        "knob": "margin",
        "ttl_s": 1800,
        "reason": "preemptions",
        "actor": "ana",
        "now_wall": 1000.0 + mono,
    }
    given |= changes
    return held.set(given.pop("knob"), value, now_mono=mono, **given)


def refusal(held: Overrides, value: object = 0.12, **changes: Any) -> Refusal:
    before = (held.revision, held.active(0))
    with pytest.raises(OverrideError) as caught:
        put(held, value, **changes)
    assert (held.revision, held.active(0)) == before
    assert str(caught.value)
    return caught.value.refusal


def test_set_and_run_out() -> None:
    held = fresh()
    made = put(held, mono=5, ttl_s=60)
    assert (made.value, made.actor, made.reason, made.revision) == (0.12, "ana", "preemptions", 1)
    assert held.active(64.9) == {Knob.MARGIN: made}
    assert made.left_s(35) == 30
    assert held.active(65) == {}
    assert held.expire(64.9) == []
    assert held.expire(65) == [made]
    assert held.expire(65) == []
    assert held.revision == 2


def test_a_new_value_replaces_the_old_one() -> None:
    held = fresh()
    put(held, 0.1)
    put(held, 0.2, mono=10)
    assert [each.value for each in held.active(11).values()] == [0.2]
    assert held.expire(1800 + 5) == []


def test_knobs_are_apart() -> None:
    held = fresh()
    put(held)
    put(held, "static", knob="policy")
    assert {knob: each.value for knob, each in held.active(1).items()} == {
        Knob.MARGIN: 0.12,
        Knob.POLICY: "static",
    }
    held.unset("margin", 1)
    assert set(held.active(1)) == {Knob.POLICY}


@pytest.mark.parametrize("value", [-0.01, 0.51, 12, 1e308])
def test_margins_out_of_bounds(value: float) -> None:
    assert refusal(fresh(), value) is Refusal.OUT_OF_BOUNDS


@pytest.mark.parametrize("value", ["0.1", None, True, float("nan"), float("inf"), 10**400, [], {}])
def test_margins_that_are_none(value: object) -> None:
    assert refusal(fresh(), value) is Refusal.BAD_VALUE


@pytest.mark.parametrize(
    ("value", "word"), [("fast", Refusal.OUT_OF_BOUNDS), (1, Refusal.BAD_VALUE), (None, Refusal.BAD_VALUE)]
)
def test_policies_that_are_none(value: object, word: Refusal) -> None:
    assert refusal(fresh(), value, knob="policy") is word


@pytest.mark.parametrize("ttl", [0, -1, 0.5, DAY + 1, float("nan"), float("inf"), 10**400, True, None, "60"])
def test_lives_out_of_bounds(ttl: object) -> None:
    assert refusal(fresh(), ttl_s=ttl) is Refusal.BAD_TTL


@pytest.mark.parametrize("reason", ["", "  \n", None, 7, "x" * 501])
def test_no_reason(reason: object) -> None:
    assert refusal(fresh(), reason=reason) is Refusal.NO_REASON


def test_a_reason_is_one_line() -> None:
    assert put(fresh(), reason=" a\nb\tc ").reason == "a b c"


@pytest.mark.parametrize("knob", ["", "Margin", "budget", "margin "])
def test_unknown_knobs(knob: str) -> None:
    assert refusal(fresh(), knob=knob) is Refusal.UNKNOWN_KNOB


def test_a_stale_revision_changes_nothing() -> None:
    held = fresh()
    put(held, if_match=0)
    assert refusal(held, 0.2, if_match=0) is Refusal.STALE_REVISION
    put(held, 0.2, if_match=1)
    with pytest.raises(OverrideError, match="stale"):
        held.unset("margin", 0, if_match=1)
    held.unset("margin", 0, if_match=2)


def test_running_out_makes_a_revision_stale() -> None:
    held = fresh()
    put(held, ttl_s=10)
    held.expire(11)
    assert refusal(held, if_match=1) is Refusal.STALE_REVISION


def test_unset_what_is_not_set() -> None:
    held = fresh()
    put(held, ttl_s=10)
    for knob, now in (("policy", 0.0), ("margin", 10.0)):
        with pytest.raises(OverrideError) as caught:
            held.unset(knob, now)
        assert caught.value.refusal is Refusal.NOT_SET


def restarted(
    held: Overrides, *, mono: float, wall: float, limits: Any = LIMITS
) -> tuple[Overrides, list[str]]:
    """Another process, whose monotonic clock has nothing to do with the first one's."""
    after = Overrides(limits, DAY)
    dropped = after.restore(json.loads(json.dumps(held.to_state())), mono, wall)
    return after, [each.knob for each in dropped]


def test_over_a_restart_by_the_wall_clock() -> None:
    held = fresh()
    put(held, mono=500, ttl_s=100, now_wall=10_000.0)
    after, dropped = restarted(held, mono=7.0, wall=10_060.0)
    (kept,) = after.active(7.0).values()
    assert dropped == []
    assert (kept.value, kept.reason, kept.actor, kept.left_s(7.0)) == (0.12, "preemptions", "ana", 40)
    assert after.revision == held.revision
    assert after.active(47.0) == {}


def test_what_ran_out_meanwhile() -> None:
    held = fresh()
    put(held, ttl_s=100, now_wall=10_000.0)
    after, dropped = restarted(held, mono=0, wall=10_100.0)
    assert dropped == ["margin"]
    assert after.active(0) == {}
    assert after.revision == held.revision + 1


def test_a_clock_set_back_prolongs_nothing() -> None:
    held = fresh()
    put(held, ttl_s=100, now_wall=10_000.0)
    after, _ = restarted(held, mono=0, wall=-5e8)
    assert after.active(99) != {}
    assert after.active(100) == {}


def test_bounds_that_were_narrowed_meanwhile() -> None:
    held = fresh()
    put(held, 0.4)
    put(held, "none", knob="policy")
    after, dropped = restarted(held, mono=0, wall=1001, limits=bounds(0, 0.3))
    assert dropped == ["margin"]
    assert set(after.active(0)) == {Knob.POLICY}


def test_a_second_restart_keeps_what_is_left() -> None:
    held = fresh()
    put(held, ttl_s=100, now_wall=1000.0)
    once, _ = restarted(held, mono=0, wall=1030.0)
    twice, _ = restarted(once, mono=0, wall=1060.0)
    (kept,) = twice.active(0).values()
    assert kept.left_s(0) == 40


ENTRY = {
    "knob": "margin",
    "value": 0.1,
    "reason": "r",
    "actor": "a",
    "ttl_s": 60.0,
    "set_wall": 0.0,
    "expires_wall": 60.0,
    "revision": 1,
}


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        "x",
        {},
        {"version": 2, "revision": 1, "overrides": []},
        {"version": "1", "revision": 1, "overrides": []},
        {"version": 1, "revision": None, "overrides": []},
        {"version": 1, "revision": True, "overrides": []},
        {"version": 1, "revision": 1},
        {"version": 1, "revision": 1, "overrides": [7]},
        *(
            {"version": 1, "revision": 1, "overrides": [ENTRY | change]}
            for change in (
                {"knob": 7},
                {"value": None},
                {"value": True},
                {"ttl_s": "60"},
                {"expires_wall": None},
                {"reason": 7},
                {"expires_wall": float("nan")},
                {"ttl_s": float("inf")},
            )
        ),
    ],
)
def test_a_foreign_state_is_refused_whole(state: object) -> None:
    held = fresh()
    made = put(held)
    with pytest.raises(StateError):
        held.restore(state, 0, 0)
    assert held.active(0) == {Knob.MARGIN: made}


def test_a_knob_of_another_version_is_dropped() -> None:
    state = {"version": 1, "revision": 3, "overrides": [ENTRY | {"knob": "gone"}, ENTRY]}
    held = fresh()
    (dropped,) = held.restore(state, 0, 0)
    assert (dropped.knob, set(held.active(0))) == ("gone", {Knob.MARGIN})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "unset", "expire"]),
            st.floats(1, 50),
            st.floats(0, 0.5),
            st.sampled_from(["margin", "policy"]),
        ),
        max_size=20,
    )
)
def test_the_revision_rises_with_every_change(steps: list[tuple[str, float, float, str]]) -> None:
    held, now = fresh(), 0.0
    for verb, time, margin, knob in steps:
        before, was = held.revision, held.to_state()["overrides"]
        now += time
        try:
            if verb == "set":
                put(held, margin if knob == "margin" else "static", mono=now, ttl_s=time * 2, knob=knob)
            elif verb == "unset":
                held.unset(knob, now)
            else:
                held.expire(now)
        except OverrideError:
            assert held.revision == before
        assert (held.revision > before) == (held.to_state()["overrides"] != was)
        assert all(each.expires_mono > now for each in held.active(now).values())
