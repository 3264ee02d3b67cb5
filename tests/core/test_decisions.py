from dataclasses import replace

from kvctl.core.decisions import Asked, DecisionRecord, EndRecord, Ring, Scales, Story
from kvctl.core.hindsight import look_back, remedies, with_margin, with_policy
from kvctl.core.outcomes import (
    DECISION_OF,
    Decision,
    EndReason,
    EngineState,
    Limit,
    Policy,
    Pressure,
    RejectReason,
)

SCALES = Scales(
    state=EngineState.UP,
    policy=Policy.FORECAST,
    draining=False,
    capacity_tokens=10_000,
    budget_tokens=9_500,
    margin_ratio=0.05,
    pressure_ratio=1.0,
    pressure_term=None,
    leases=3,
)
ASKED = Asked(
    lease_id="l-0",
    request_id="r-0",
    route="chat",
    model="m",
    tenant="",
    prompts=(100,),
    n=1,
    asked_output=400,
    exact=True,
    stream=True,
)
ADMITTED = DecisionRecord(
    at=0.0,
    engine="e",
    asked=ASKED,
    scales=SCALES,
    decision=Decision.ADMIT,
    claim_tokens=512,
    allowed_output=400,
    forecast_tokens=9_000.0,
)
REFUSED = replace(
    ADMITTED,
    decision=Decision.REJECT_LATER,
    reason=RejectReason.KV_BUDGET,
    needed_tokens=500,
    free_tokens=290,
    forecast_tokens=9_700.0,
    retry_after_s=1.0,
)


def record(number: int, like: DecisionRecord = ADMITTED, request: str = "") -> DecisionRecord:
    asked = replace(ASKED, lease_id=f"l-{number}", request_id=request or f"r-{number}")
    return replace(like, asked=asked, at=float(number))


def ended(number: int, seconds: float = 2.0) -> EndRecord:
    return EndRecord(
        at=number + seconds,
        engine="e",
        lease_id=f"l-{number}",
        request_id=f"r-{number}",
        end=EndReason.FINISHED,
        seconds=seconds,
        first_token_s=0.2,
        output_tokens=50,
        prompt_tokens=100,
        held_tokens=160,
    )


def test_the_ring_forgets_the_oldest() -> None:
    ring = Ring(3)
    for number in range(5):
        ring.add(record(number))
    assert len(ring) == 3
    assert ring.find("l-1") is None
    assert ring.find("r-1") is None
    assert ring.ids() == ["l-4", "l-3", "l-2"]
    ring.resize(1)
    assert ring.ids() == ["l-4"]


def test_an_end_joins_its_decision_and_one_of_a_forgotten_is_dropped() -> None:
    ring = Ring(2)
    ring.add(record(1))
    ring.add(ended(1))
    ring.add(ended(7))
    story = ring.find("r-1")
    assert story is not None
    assert story.end == ended(1)
    assert len(ring) == 1


def test_of_retries_under_one_id_the_last_counts() -> None:
    ring = Ring(2)
    ring.add(record(1, REFUSED, "same"))
    ring.add(record(2, ADMITTED, "same"))
    found = ring.find("same")
    assert found is not None
    assert found.decision.asked.lease_id == "l-2"
    ring.add(record(3))  # forgets l-1, whose id is l-2's by now
    assert ring.find("same") is found


def test_a_request_that_waited_keeps_its_place() -> None:
    ring = Ring(2)
    ring.add(record(1, REFUSED))
    ring.add(replace(record(1), waited_s=3.0))
    assert len(ring) == 1
    found = ring.find("l-1")
    assert found is not None
    assert found.decision.waited_s == 3.0


def test_an_empty_ring_of_no_size() -> None:
    ring = Ring(0)
    ring.add(record(1))
    assert (len(ring), ring.find("l-1")) == (0, None)


def test_headroom_and_the_limit_that_bound() -> None:
    assert (ADMITTED.headroom_tokens, ADMITTED.binding_limit) == (500, None)
    assert (REFUSED.headroom_tokens, REFUSED.binding_limit) == (-200, Limit.KV_BUDGET)
    drained = replace(REFUSED, reason=RejectReason.DRAINING, forecast_tokens=None)
    assert (drained.headroom_tokens, drained.binding_limit) == (None, None)


def test_remedies_of_the_budget_would_have_sufficed() -> None:
    fewer, margin = remedies(REFUSED)
    assert fewer.startswith("200 KV tokens fewer")
    assert margin == "a margin of at most 3% (it was 5%)"
    assert 10_000 * (1 - 0.03) >= 9_700
    assert remedies(ADMITTED) == []


def test_remedies_name_pressure_and_a_missing_cap() -> None:
    pressed = replace(SCALES, pressure_ratio=0.5, pressure_term=Pressure.PREEMPTION, budget_tokens=4_750)
    asked = replace(ASKED, asked_output=None)
    told = remedies(replace(REFUSED, scales=pressed, asked=asked, forecast_tokens=9_000.0))
    assert any("no pressure from preemption" in each for each in told)
    assert any("max_tokens" in each for each in told)
    assert not any("margin" in each for each in told)  # no margin would have helped


def test_every_reason_has_a_remedy() -> None:
    for reason in RejectReason:
        told = remedies(replace(REFUSED, reason=reason, limit_tokens=100, largest_output=0))
        assert told, reason
        of_the_engine = DECISION_OF[reason] is Decision.UNAVAILABLE
        assert any("an engine that serves" in each for each in told) is of_the_engine, reason


def test_who_waited_for_a_rank_that_is_gone_is_not_told_to_end_a_drain() -> None:
    told = remedies(replace(REFUSED, reason=RejectReason.RANK_GONE, scales=replace(SCALES, draining=True)))
    assert told
    assert not any("drain" in each for each in told)


def test_looking_back_at_a_lower_margin() -> None:
    """Each that the look back lets in takes room from those after it, for as long as requests hold."""
    stories = stories_of(_ring(record(1, REFUSED), record(2, REFUSED), record(30, REFUSED)))
    seen = look_back(stories, 300.0, with_margin(0.02))
    assert (seen.decisions, seen.refusals, seen.refusals_admitted) == (3, 3, 2)
    assert look_back(stories, 300.0, with_margin(0.05)).refusals_admitted == 0


def test_looking_back_at_a_higher_margin() -> None:
    stories = stories_of(_ring(record(1), record(2, REFUSED)))
    seen = look_back(stories, 300.0, with_margin(0.2))
    assert (seen.refusals_admitted, seen.admissions_refused) == (0, 1)


def test_a_guard_is_no_matter_of_the_margin() -> None:
    guarded = replace(REFUSED, reason=RejectReason.SEQUENCE_SLOTS, forecast_tokens=10.0)
    assert look_back(stories_of(_ring(record(1, guarded))), 300.0, with_margin(0.0)).refusals_admitted == 0


def test_looking_back_without_a_limit() -> None:
    free = with_policy(Policy.NONE)
    assert free is not None
    stories = stories_of(_ring(record(1, REFUSED), record(2, REFUSED)))
    assert look_back(stories, 300.0, free).refusals_admitted == 2
    assert with_policy(Policy.STATIC) is None


def test_the_hold_is_that_of_the_ended() -> None:
    ring = _ring(record(1), record(2, REFUSED), record(4, REFUSED))
    ring.add(ended(1, seconds=1.0))
    assert look_back(stories_of(ring), 300.0, with_margin(0.02)).refusals_admitted == 2


def _ring(*records: DecisionRecord) -> Ring:
    ring = Ring(100)
    for each in records:
        ring.add(each)
    return ring


def stories_of(ring: Ring) -> list[Story]:
    return [story for some_id in ring.ids() if (story := ring.find(some_id)) is not None]
