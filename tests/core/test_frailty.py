"""Answers that fail to end, before history can know."""

import pytest

from kvctl.core.claim import Claim
from kvctl.core.frailty import LEAST, Frailty
from kvctl.core.ledger import Lease
from kvctl.core.survival import TO_THE_CAP, SurvivalModel, Table, survival_from_hazards
from tests.core.lengths import exponential_hazards

USUAL = Table(survival_from_hazards(exponential_hazards(200.0)))
PACE = 40.0  # tokens a second


def lease(number: int, admitted_at: float) -> Lease:
    claim = Claim(prompts=(100,), outputs=(4000,), n=1, block=16, tokens=4112, sequences=1)
    return Lease(
        id=f"{number}",
        key=("m", "chat", "t"),
        claim=claim,
        streaming=True,
        admitted_at=admitted_at,
        first_token_at=admitted_at,
    )


def served(frailty: Frailty, length: int, seconds: int, table: Table = USUAL, start: float = 0.0) -> None:
    """Four answers of ``length`` tokens begin each second, and run at PACE."""
    running: list[Lease] = []
    for beat in range(seconds * 5):
        now = start + beat / 5
        if beat % 5 == 0:
            running += [lease(round(start) * 100_000 + beat * 10 + k, now) for k in range(4)]
        for one in running.copy():
            one.output_tokens = min((now - one.admitted_at) * PACE, float(length))
            if one.output_tokens == length:
                running.remove(one)
                frailty.ended(one, lambda _: table, finished=True)
        frailty.tick(running, lambda _: table, now)
    for one in running:
        frailty.ended(one, lambda _: table, finished=False)


def test_answers_that_end_as_they_should_change_nothing() -> None:
    frailty = Frailty()
    served(frailty, length=200, seconds=60)
    assert frailty.factor == pytest.approx(1.0, abs=0.1)
    assert not frailty.outdated(60.0)


def test_answers_four_times_as_long_are_noticed_within_seconds() -> None:
    frailty = Frailty()
    served(frailty, length=800, seconds=12)
    assert LEAST <= frailty.factor < 0.6
    assert frailty.outdated(12.0)
    assert not frailty.outdated(12.5)  # once a second


def test_shorter_answers_do_not_count_as_a_reason_to_let_more_in() -> None:
    frailty = Frailty()
    served(frailty, length=20, seconds=60)
    assert frailty.factor == 1.0


def test_it_is_over_when_answers_end_again() -> None:
    frailty = Frailty()
    served(frailty, length=800, seconds=20)
    served(frailty, length=200, seconds=60, start=20.0)
    assert frailty.factor > 0.9


def test_one_endless_answer_is_no_sign() -> None:
    frailty, endless = Frailty(), lease(1, 0.0)
    for beat in range(600):
        endless.output_tokens = beat * PACE / 5
        frailty.tick([endless], lambda _: USUAL, beat / 5)
    assert frailty.factor > 0.5
    frailty.ended(endless, lambda _: USUAL, finished=True)
    assert frailty.factor <= 1.0


def test_answers_that_run_to_their_caps_are_not_watched() -> None:
    frailty = Frailty()
    served(frailty, length=800, seconds=30, table=Table(TO_THE_CAP))
    assert frailty.factor == 1.0


def test_what_shows_no_tokens_is_not_watched() -> None:
    frailty, silent = Frailty(), lease(1, 0.0)
    silent.streaming, silent.output_tokens = False, 3000.0
    frailty.tick([silent], lambda _: USUAL, 1.0)
    frailty.ended(silent, lambda _: USUAL, finished=True)
    assert frailty.factor == 1.0


def test_a_factor_makes_answers_live_longer_and_the_hazard_is_told_without_it() -> None:
    model, key = SurvivalModel(), ("m",)
    for length in range(10, 400, 4):
        model.ended(key, length, finished=True)
    usual = model.table(key, 4096)
    model.factor = 0.25
    model.refresh({})
    slow = model.table(key, 4096)
    assert slow.ahead(0).alive[8] > usual.ahead(0).alive[8]
    assert slow.hazard(0, 200) == pytest.approx(usual.hazard(0, 200), rel=0.05)


def test_what_is_forgotten_is_the_oldest_and_some_is_kept() -> None:
    model, key = SurvivalModel(), ("m",)
    for length in [50] * 400 + [800] * 60:
        model.ended(key, length, finished=True)
    for _ in range(60):
        model.forget(0.05)
    model.refresh({})
    assert model.table(key, 4096).ahead(0).alive[8] > 0.7  # at 64 tokens; some of the prior is left
    for _ in range(200):
        model.forget(0.5)
    model.refresh({})
    assert model.table(key, 4096).ahead(0).alive[8] > 0.5
