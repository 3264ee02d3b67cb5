"""Output lengths: censoring, cold start, classes."""

import random
from itertools import pairwise
from math import exp, inf

import pytest

from kvctl.core.prior import histogram_hazards, merged
from kvctl.core.slots import LONGEST, SLOT_OF, SLOT_STARTS, slot_of
from kvctl.core.survival import (
    CAPPED_FEWEST,
    CAPPED_OF,
    MOST_CLASSES,
    MOST_TABLES,
    STEPS,
    TO_THE_CAP,
    WINDOW,
    LengthHistory,
    SurvivalModel,
    Table,
    mark_of,
    survival_from_hazards,
)
from kvctl.core.telemetry import LengthHistogram
from tests.core.lengths import exponential_hazards

KEY = ("m", "chat", "")


def mean_of(table: Table) -> float:
    """Mean output length that a table says."""
    return sum(s * (b - a) for s, (a, b) in zip(table.survival, pairwise(SLOT_STARTS), strict=False))


def survives(table: Table, tokens: int) -> float:
    return table.survival[slot_of(tokens)]


def test_slots_cover_all_lengths_in_order() -> None:
    assert list(SLOT_STARTS) == sorted(SLOT_STARTS)
    for tokens in (0, 7, 8, 511, 512, 543, 544, 4096, 32_768, LONGEST, LONGEST * 9):
        slot = slot_of(tokens)
        assert SLOT_STARTS[slot] <= tokens
        assert slot == len(SLOT_STARTS) - 1 or tokens < SLOT_STARTS[slot + 1]
    assert SLOT_OF[(LONGEST + STEPS[-1]) >> 3] == len(SLOT_STARTS) - 1


@pytest.mark.parametrize("finished", [20, 50, 100])
def test_the_short_answers_that_finish_first_do_not_look_like_all_of_them(finished: int) -> None:
    """Of a burst of 200, the first 50 have a mean of 46 where the truth is 243: law 10's censoring."""
    rng = random.Random(7)
    lengths = sorted(int(rng.expovariate(1 / 243)) + 1 for _ in range(200))
    model, now = SurvivalModel(), lengths[finished - 1]
    for length in lengths[:finished]:
        model.ended(KEY, length, finished=True)
    model.refresh({KEY: [now] * (200 - finished)})
    table = model.table(KEY, 1024)
    assert sum(lengths[:finished]) / finished < 0.5 * 243
    assert survives(table, now) == pytest.approx(1 - finished / 200, abs=0.05)
    assert mean_of(table) > 0.7 * 243


def test_answers_cut_at_their_cap_are_at_risk_that_far_and_no_further() -> None:
    """Counting cut answers as lengths would say that nobody gets past the cap."""
    model, rng = SurvivalModel(), random.Random(3)
    for _ in range(1000):
        length = int(rng.expovariate(1 / 400)) + 1
        model.ended(KEY, min(length, 256), finished=length <= 256)
    table = model.table(KEY, 4096)
    assert survives(table, 256) == pytest.approx(exp(-256 / 400), abs=0.05)
    assert survives(table, 512) > 0.2


def test_with_many_answers_and_none_cut_it_is_the_empirical_distribution() -> None:
    model, rng = SurvivalModel(), random.Random(5)
    lengths = [int(rng.lognormvariate(5, 1)) + 1 for _ in range(WINDOW)]
    for length in lengths:
        model.ended(KEY, length, finished=True)
    table = model.table(KEY, 4096)
    for tokens in (16, 64, 144, 304, 496):
        truth = sum(length >= tokens for length in lengths) / len(lengths)
        assert survives(table, tokens) == pytest.approx(truth, abs=0.03)


def test_history_and_prior_are_weighed_twenty_to_the_number_of_answers() -> None:
    """S = (k prior + n history) / (k + n) where nothing is censored, whatever the length."""
    rng, history, prior = random.Random(9), LengthHistory(), exponential_hazards(300.0)
    lengths = [rng.choice([40, 200, 333, 1000, 1000, 3000]) for _ in range(30)]
    history.take([mark_of(length, finished=True) for length in lengths], [True] * len(lengths))
    hazards = history.at_risk(history.cut([])).blended(prior)
    blended, alone = survival_from_hazards(hazards), survival_from_hazards(prior)
    for slot, start in enumerate(SLOT_STARTS[:200]):
        longer = sum(slot_of(length) >= slot for length in lengths)
        assert blended[slot] == pytest.approx((20 * alone[slot] + longer) / 50, abs=1e-9), start


def test_cold_start_is_a_quarter_of_the_cap_and_not_the_worst_case() -> None:
    table = SurvivalModel().table(KEY, 4096)
    assert mean_of(table) == pytest.approx(1024, rel=0.05)
    assert survives(table, 1024) == pytest.approx(exp(-1), abs=0.02)


def test_whatever_fits_is_not_taken_for_long() -> None:
    """A01: the rest of a large context as cap says nothing of how long the answer will be."""
    model = SurvivalModel()
    assert model.table(KEY, 131_072) is model.table(KEY, 4096)
    assert mean_of(model.table(KEY, 256)) == pytest.approx(64, rel=0.1)


def test_the_engines_own_histogram_is_the_prior_once_it_has_two_hundred_answers() -> None:
    few = LengthHistogram(bounds=(100.0, 200.0, inf), counts=(50.0, 100.0, 100.0))
    many = LengthHistogram(bounds=(100.0, 200.0, inf), counts=(150.0, 300.0, 300.0))
    model = SurvivalModel()
    model.believe([few])
    assert mean_of(model.table(KEY, 4096)) == pytest.approx(1024, rel=0.05)
    model.believe([many])
    model.refresh({})
    table = model.table(KEY, 4096)
    assert survives(table, 100) == pytest.approx(0.5, abs=0.1)
    assert survives(table, 256) < 0.01
    model.believe([few])  # fell: another process, with too few answers yet
    model.refresh({})
    assert mean_of(model.table(KEY, 4096)) == pytest.approx(1024, rel=0.05)


def test_the_histograms_of_all_ranks_are_one_prior() -> None:
    """Two ranks of different load must not take turns at being believed."""
    one = LengthHistogram(bounds=(100.0, inf), counts=(190.0, 200.0))
    two = LengthHistogram(bounds=(100.0, inf), counts=(10.0, 300.0))
    odd = LengthHistogram(bounds=(7.0, inf), counts=(10.0, 300.0))
    assert merged([one, two, odd]) == LengthHistogram(bounds=(100.0, inf), counts=(200.0, 500.0))
    model = SurvivalModel()
    model.believe([one, two])
    assert survives(model.table(KEY, 4096), 100) == pytest.approx(0.6, abs=0.1)


def test_long_answers_in_flight_count_beside_a_histogram_of_short_ones() -> None:
    """The short ones finish first: of 20,000 answers 600 had 600 tokens, and 3,000 that run are as long."""
    bounds = (100.0, 500.0, 1000.0, inf)
    finished = LengthHistogram(bounds=bounds, counts=(19400.0, 19400.0, 20000.0, 20000.0))
    model, beside = SurvivalModel(), SurvivalModel()
    beside.refresh({KEY: [600] * 3000})
    for each in (model, beside):
        each.believe([finished])
    alone, told = (each.table((), 4096) for each in (model, beside))
    assert survives(alone, 960) < 0.1 * survives(alone, 512)
    assert survives(told, 960) > 0.5 * survives(told, 512)


@pytest.mark.parametrize(
    ("bounds", "counts"),
    [((inf,), (300.0,)), ((1.0, 2.0, inf), (300.0, 300.0, 300.0)), ((8.0, 8.0, inf), (1.0, 1.0, 300.0))],
)
def test_odd_histograms_give_hazards_all_the_same(
    bounds: tuple[float, ...], counts: tuple[float, ...]
) -> None:
    hazards = histogram_hazards(LengthHistogram(bounds=bounds, counts=counts))
    assert hazards is not None
    assert all(0.0 <= hazard <= 1.0 for hazard in hazards)


def test_a_thin_class_speaks_like_its_parents_and_a_thick_one_for_itself() -> None:
    model = SurvivalModel()
    for _ in range(500):
        model.ended(("m", "chat", "a"), 400, finished=True)
    newcomer = model.table(("m", "chat", "b"), 4096)
    assert survives(newcomer, 384) > 0.9
    assert survives(newcomer, 448) < 0.1
    for _ in range(200):
        model.ended(("m", "chat", "b"), 40, finished=True)
    model.refresh({})
    assert survives(model.table(("m", "chat", "b"), 4096), 64) < 0.15
    assert survives(model.table(("m", "chat", "a"), 4096), 384) > 0.6


def test_what_is_in_flight_beats_what_history_predicted() -> None:
    """Law 10: fifty answers that are past 1,000 tokens already are no short answers."""
    model = SurvivalModel()
    for _ in range(100):
        model.ended(KEY, 50, finished=True)
    assert survives(model.table(KEY, 4096), 512) < 0.2
    model.refresh({KEY: [1000] * 50})
    assert survives(model.table(KEY, 4096), 512) > 0.2
    ahead = model.table(KEY, 4096).ahead(1000)
    assert ahead.alive[0] == 1.0
    assert ahead.alive[STEPS.index(256)] > 0.5


def test_answers_that_are_taken_in_together_count_as_those_taken_in_one_by_one() -> None:
    """Histories take several in at once, before they are read: nothing else may depend on that."""
    rng, at_once, one_by_one = random.Random(4), SurvivalModel(), SurvivalModel()
    keys = [("m", "chat", tenant) for tenant in "abc"] + [("m", "completions", "a")]
    for _ in range(300):
        key, made, finished = rng.choice(keys), rng.randrange(600), rng.random() < 0.8
        allowed = None if rng.random() < 0.3 else max(made, rng.choice([600, 4000]))
        for model in (at_once, one_by_one):
            model.ended(key, made, finished=finished, allowed=allowed)
        one_by_one.refresh({})
        one_by_one.table(key, 600)
    at_once.refresh({})
    one_by_one.refresh({})
    for key in keys:
        assert at_once.table(key, 600).survival == one_by_one.table(key, 600).survival


def test_old_answers_are_forgotten() -> None:
    history = LengthHistory()
    history.take([mark_of(2000, finished=False)] * WINDOW, [False] * WINDOW)
    assert (len(history), history.whole) == (WINDOW, 0)
    for _ in range(WINDOW):
        history.take([mark_of(20, finished=True)], [True])
    assert (len(history), history.whole) == (WINDOW, WINDOW)
    assert (sum(history.finished), sum(history.censored)) == (WINDOW, 0)


def test_classes_are_bounded_and_the_parents_stay() -> None:
    """A caller that invents tenants must not fill the memory."""
    model = SurvivalModel()
    for i in range(MOST_CLASSES + 50):
        model.ended(("m", "chat", f"t{i}"), 400, finished=True)
        model.ended(("m", "chat", "regular"), 400, finished=True)
    assert survives(model.table(("m", "chat", "t0"), 4096), 384) > 0.9
    assert len(model._histories["m", "chat", "regular"]) == MOST_CLASSES + 50, "never the oldest"
    assert len(model._histories) == MOST_CLASSES
    assert {("m",), ("m", "chat"), ("m", "chat", f"t{MOST_CLASSES + 49}")} <= set(model._histories)


def test_with_many_classes_each_table_is_renewed_in_its_turn() -> None:
    model = SurvivalModel()
    keys = [("m", "chat", f"t{i}") for i in range(40)]
    before = {key: model.table(key, 4096) for key in keys}
    for _ in range(5):
        model.refresh({})
        after = {key: model.table(key, 4096) for key in keys}
    assert all(before[key] is not after[key] for key in keys)


def test_survival_never_rises_and_never_reaches_zero() -> None:
    for hazards in (exponential_hazards(0.5), exponential_hazards(1e6), [1.0] * len(SLOT_STARTS)):
        survival = survival_from_hazards(hazards)
        assert len(survival) == len(SLOT_STARTS)
        assert survival[0] == 1.0
        assert all(0.0 < b <= a for a, b in pairwise(survival))


def test_a_history_beyond_all_lengths_leaves_the_tail_to_the_prior() -> None:
    history, prior = LengthHistory(), exponential_hazards(100.0)
    history.take([mark_of(10, finished=True)], [True])
    hazards = history.at_risk(history.cut([slot_of(20)])).blended(prior)
    assert hazards[slot_of(10)] > prior[slot_of(10)]
    assert hazards[slot_of(24) :] == prior[slot_of(24) :]


def test_where_answers_fill_their_caps_each_is_charged_its_own() -> None:
    """Caps from 40 to 4,000 that are all filled: the class's mean says nothing of the request in hand."""
    model, rng = SurvivalModel(), random.Random(2)
    for _ in range(CAPPED_FEWEST):
        cap = rng.choice([40, 200, 4000])
        model.ended(KEY, cap, finished=False, allowed=cap)
    model.refresh({})
    assert model.table(KEY, 4000).survival is TO_THE_CAP
    assert model.table(("m", "chat", "newcomer"), 4000).survival is TO_THE_CAP, "as its parents do"
    for _ in range(CAPPED_OF):
        model.ended(KEY, 300, finished=True, allowed=4000)
    model.refresh({})
    assert survives(model.table(KEY, 4000), 2000) < 0.3


def test_few_filled_caps_or_small_ones_are_no_worst_case_for_others() -> None:
    """Nine classifications of one token beside each talk of 300 in 4,096: the talk is no worst case."""
    model = SurvivalModel()
    for _ in range(CAPPED_FEWEST - 1):
        model.ended(KEY, 1, finished=True, allowed=1)
    assert model.table(KEY, 4096).survival is not TO_THE_CAP
    for number in range(200):
        made, allowed = (300, 4096) if number % 10 == 0 else (1, 1)
        model.ended(KEY, made, finished=True, allowed=allowed)
    model.refresh({})
    assert model.table(KEY, 4096).survival is not TO_THE_CAP


def test_an_answer_cut_by_its_caller_says_nothing_of_caps() -> None:
    model = SurvivalModel()
    for _ in range(100):
        model.ended(KEY, 100, finished=False)
    assert model.table(KEY, 100).survival is not TO_THE_CAP


def test_what_is_believed_of_lengths_beyond_follows_what_was_seen_before_them() -> None:
    """A cap of 4,096 says 1,024 tokens; ends seen up to 128 tokens halve that for the next stretch."""
    model, rng = SurvivalModel(), random.Random(13)
    lengths = [int(rng.expovariate(1 / 200)) + 1 for _ in range(100)]
    for length in lengths:
        if length < 128:
            model.ended(KEY, length, finished=True)
    model.refresh({KEY: [127 for length in lengths if length >= 128]})
    table = model.table(KEY, 4096)
    assert survives(table, 256) / survives(table, 128) == pytest.approx(exp(-128 / 400), abs=0.12)
    assert survives(table, 2048) / survives(table, 1024) == pytest.approx(exp(-1), abs=0.12)


def test_lengths_beyond_a_stretch_where_nobody_ends_are_believed_to_be_long() -> None:
    """Short answers, and long ones on their way: the short ones' rate is no forecast for the long ones."""
    model = SurvivalModel()
    for tokens in range(1, 61):
        model.ended(KEY, tokens, finished=True)
    model.refresh({KEY: [400] * 20})
    table = model.table(KEY, 4096)
    assert survives(table, 400) / survives(table, 100) > 0.85
    assert survives(table, 800) / survives(table, 400) > 0.6


def test_a_bucket_where_nobody_ended_yet_is_no_proof_that_nobody_ends_there() -> None:
    """One answer has come past 1,000 tokens: the other 19 that are believed in do not all live to 2,000."""
    bounds = (100.0, 1000.0, 2000.0, inf)
    finished = LengthHistogram(bounds=bounds, counts=(150.0, 300.0, 300.0, 300.0))
    hazards = histogram_hazards(finished, [1001])
    assert hazards is not None
    survival = survival_from_hazards(hazards)
    assert survival[slot_of(2000)] < 0.5 * survival[slot_of(1024)]


def test_a_new_class_with_every_request_takes_no_more_memory_for_ever() -> None:
    model = SurvivalModel()
    for number in range(MOST_TABLES + 10):
        model.table((f"model {number}", "chat", ""), 16)
    assert len(model._tables) == MOST_TABLES
    kept = model.table(("model 4000", "chat", ""), 16)
    assert model.table(("model 4000", "chat", ""), 16) is kept
