"""How far lengths are taken to vary together: less, the more answers are known."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.correlation import RHO_LEAST, RHO_MOST, correlation
from kvctl.core.survival import KEPT, WINDOW, SurvivalModel
from tests.effort import examples

KEY, OTHER = ("m", "chat", "a"), ("m", "chat", "b")
classes = st.lists(st.tuples(st.integers(1, 500), st.integers(0, WINDOW)), min_size=1, max_size=6)


def model_of(answers: int) -> SurvivalModel:
    model, rng = SurvivalModel(), random.Random(answers)
    for _ in range(answers):
        model.ended(KEY, int(rng.expovariate(1 / 200)), finished=True)
    return model


@settings(max_examples=examples(100), deadline=None)
@given(classes, st.integers(0, 5), st.integers(1, 500))
def test_who_knows_more_assumes_less(known: list[tuple[int, int]], at: int, more: int) -> None:
    """Law: within its bounds, and never higher for answers that any class has seen beside."""
    one = at % len(known)
    richer = [(leases, answers + more * (i == one)) for i, (leases, answers) in enumerate(known)]
    assert RHO_LEAST <= correlation(richer) <= correlation(known) <= RHO_MOST


def test_nothing_in_flight_is_nothing_known() -> None:
    assert correlation([]) == RHO_MOST
    assert SurvivalModel().correlation() == RHO_MOST


def test_it_falls_as_answers_come_in() -> None:
    seen = []
    for answers in (0, 20, 100, 500, WINDOW):
        model = model_of(answers)
        model.refresh({KEY: [10, 20, 30]})
        seen.append(model.correlation())
    assert seen[:2] == [RHO_MOST, RHO_MOST]
    assert sorted(seen, reverse=True) == seen
    assert seen[-1] < 1.1 * RHO_LEAST


def test_a_burst_of_a_class_never_seen_is_not_taken_for_known() -> None:
    model = model_of(WINDOW)
    model.refresh({KEY: [10] * 10, OTHER: [10] * 90})
    assert model.correlation() == RHO_MOST
    model.refresh({KEY: [10] * 99, OTHER: [10]})
    assert model.correlation() < 1.2 * RHO_LEAST


def test_answers_that_were_cut_say_nothing_of_lengths() -> None:
    """Callers that hang up, errors, and lengths that nobody counted; one that filled its cap is known."""
    model = SurvivalModel()
    for _ in range(WINDOW):
        model.ended(KEY, 16, finished=False)
    model.refresh({KEY: [10]})
    assert model.correlation() == RHO_MOST
    for _ in range(200):
        model.ended(KEY, 512, finished=False, allowed=512)
    assert model.correlation() == RHO_LEAST + 1.0 / (20.0 + 200.0)


def test_where_answers_fail_to_end_what_is_known_counts_no_more() -> None:
    model = model_of(WINDOW)
    model.refresh({KEY: [10]})
    model.factor = 0.9
    assert model.correlation() == RHO_MOST
    model.factor = 1.0
    model.forget(1.0)
    assert model.correlation() == min(RHO_MOST, RHO_LEAST + 1.0 / (20.0 + KEPT))
