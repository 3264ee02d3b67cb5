"""``kvctl explain``: its words, by documents as the daemon makes them."""

from dataclasses import replace
from typing import Any

import pytest

from kvctl.cli.explain import outlook, story
from kvctl.control import decision_documents as documents
from kvctl.control.decision_log import record_of
from kvctl.core.budget import budget_of
from kvctl.core.claim import Limits, Shape, claim
from kvctl.core.decisions import DecisionRecord, EndRecord, Story
from kvctl.core.events import Admit, Arrived, Queued, Reject
from kvctl.core.outcomes import EndReason, EngineState, Policy, Priority, RejectReason

SHAPE = Shape(route="chat", model="m", prompts=(300,), asked_output=100)
CLAIM = claim(SHAPE, Limits())
MOMENT = (budget_of(10_000, 0.05, {}), EngineState.UP, Policy.FORECAST, False, 3)
REFUSED = Reject(
    "a-1",
    RejectReason.KV_BUDGET,
    needed_tokens=400,
    prompt_tokens=300,
    claim=CLAIM,
    forecast_tokens=9_700.0,
    headroom_tokens=200,
)
WAITS = Queued("a-1", RejectReason.KV_BUDGET, Priority.NORMAL, 0.42)


def record(said: Admit | Reject | Queued) -> DecisionRecord:
    return record_of("one", Arrived("a-1", SHAPE), MOMENT, said, 10.0)


def ended(reason: EndReason, seconds: float, tokens: int = 0) -> EndRecord:
    return EndRecord(
        at=10.0 + seconds,
        engine="one",
        lease_id="a-1",
        request_id="a-1",
        end=reason,
        seconds=seconds,
        first_token_s=None,
        output_tokens=tokens,
        prompt_tokens=None,
        held_tokens=tokens,
    )


def told(decision: DecisionRecord, end: EndRecord | None = None) -> str:
    return "\n".join(story(documents.story(Story(decision, end), 0.0)))


def seen(said: Admit | Reject | Queued) -> str:
    it: dict[str, Any] = {**documents.decision(record(said), 0.0), "remedies": []}
    return "\n".join(outlook({"engines": {"one": it}}))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.042, "after 0.04 s"), (0.42, "after 0.42 s"), (4.2, "after 4.2 s"), (75.0, "after 1 min 15 s")],
)
def test_a_short_answer_took_some_time(seconds: float, words: str) -> None:
    text = told(record(Admit("a-1", CLAIM, 700.0)), ended(EndReason.FINISHED, seconds, 12))
    assert f"ended   finished {words}: 12 output tokens" in text


def test_a_short_wait_is_one() -> None:
    assert "waited  0.03 s in the queue" in told(replace(record(Admit("a-1", CLAIM, 700.0)), waited_s=0.031))


def test_one_that_waits_and_one_that_left() -> None:
    text = told(record(WAITS))
    assert "its start is foreseen 0.42 s after it came" in text
    assert "waits   still" in text
    text = told(record(WAITS), ended(EndReason.CLIENT_GONE, 0.25))
    assert "left    the queue after 0.25 s" in text
    assert "held" not in text


def test_when_there_will_be_room() -> None:
    assert "when    in about 0.80 s, at the pace of the last seconds" in seen(
        replace(REFUSED, retry_after_s=0.8)
    )
    assert "when    nobody can say yet" in seen(REFUSED)
    text = seen(WAITS)
    assert "said    queue: kv_budget" in text
    assert "its start is foreseen 0.42 s after it came" in text
    assert "when" not in text
    assert "when" not in seen(Reject("", RejectReason.DRAINING, needed_tokens=300, prompt_tokens=300))
