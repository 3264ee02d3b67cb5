"""Occupancy curves: exact against a naive reference, and true against simulated answers."""

import random
from collections.abc import Sequence
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.claim import Claim, Limits, claim, round_up
from kvctl.core.correlation import RHO_LEAST, RHO_MOST
from kvctl.core.curves import CROWDED, Curve, Z, at_node, curve, sketch_or_curve, total
from kvctl.core.events import Admit
from kvctl.core.forecast import Forecast
from kvctl.core.outcomes import EndReason, Policy
from kvctl.core.supply import GateConfig
from kvctl.core.survival import STEPS, SurvivalModel, Table, survival_from_hazards
from tests.core.conversation import PAGE, Conversation, shape
from tests.core.lengths import exponential_hazards
from tests.effort import examples

TABLE = Table(survival_from_hazards(exponential_hazards(300.0)))
LIMITS = Limits(context=1 << 20, block=16)


def table_for(_: int) -> Table:
    return TABLE


def one(prompt: int, output: int, shown: int = 0, *, block: int = 16, n: int = 1) -> Curve:
    asked = claim(shape(prompt, output, n=n), Limits(context=1 << 20, block=block))
    return curve(asked, shown, table_for)


def naive_peak(leases: Sequence[tuple[Claim, int]], rho: float = RHO_MOST) -> float:
    """The formula of the module, sequence by sequence and node by node."""
    ends = [*STEPS[1:], 1 << 30]
    peak = 0.0
    for t, until in zip(STEPS, ends, strict=True):
        mean = spread = square = most = 0.0
        for asked, shown_ in leases:
            for prompt, cap in zip(asked.prompts, asked.outputs, strict=True):
                shown = min(shown_, cap)
                if t >= cap - shown and t:
                    continue
                ahead = TABLE.ahead(shown).alive[STEPS.index(t)]
                held = round_up(prompt + min(shown + until, cap), asked.block)
                s = sqrt(ahead * (1 - ahead)) * held
                mean += asked.n * ahead * held
                spread += asked.n * s
                square += asked.n * s * s
                most += asked.n * held
        peak = max(peak, min(mean + Z * sqrt((1 - rho) * square + rho * spread * spread), most))
    return peak


requests = st.tuples(
    st.integers(0, 5000),
    st.integers(0, 9000),
    st.integers(0, 9500),
    st.integers(1, 3),
    st.sampled_from([1, 16, 256]),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=8),
    st.lists(st.integers(0, 7), max_size=8),
    st.floats(RHO_LEAST, RHO_MOST),
)
def test_the_sum_of_curves_is_the_naive_forecast(
    asked: list[tuple[int, int, int, int, int]], gone: list[int], rho: float
) -> None:
    forecast, leases = Forecast(), {}
    forecast.rho = rho
    for i, (prompt, output, shown, n, block) in enumerate(asked):
        claimed = claim(shape(prompt, output, n=n), Limits(context=1 << 20, block=block))
        candidate = curve(claimed, shown, table_for)
        leases[i] = (claimed, shown)
        assert forecast.peak_with(candidate) == pytest.approx(
            naive_peak(list(leases.values()), rho), rel=1e-9
        )
        forecast.add(str(i), candidate)
        assert forecast.peak() == pytest.approx(naive_peak(list(leases.values()), rho), rel=1e-9)
        assert forecast.level == pytest.approx(forecast.peak(), rel=1e-9)
    for i in set(gone) & set(leases):
        del leases[i]
        forecast.remove(str(i))
        assert forecast.peak() == pytest.approx(naive_peak(list(leases.values()), rho), rel=1e-6, abs=1e-3)
        assert leases or forecast.peak() == 0.0


def test_another_correlation_is_another_peak_at_once() -> None:
    """Law: what was read, or tried, with one rho is not told for another."""
    forecast, late = Forecast(), one(300, 700)
    parts = {str(i): one(100 + 40 * i, 900, shown=30 * i) for i in range(20)}
    forecast.rebuild(dict(parts))
    high, high_with = forecast.peak(), forecast.peak_with(late)
    forecast.rho = RHO_LEAST
    assert forecast.peak() == total(list(parts.values())).peak(RHO_LEAST) < high
    forecast.add("late", late)
    assert forecast.peak() == pytest.approx(total([*parts.values(), late]).peak(RHO_LEAST))
    assert forecast.peak() < 0.99 * high_with
    forecast.rho = RHO_MOST
    assert forecast.peak() == pytest.approx(high_with)


@settings(max_examples=examples(60), deadline=None)
@given(requests)
def test_a_curve_is_at_each_node_what_is_read_there_alone(asked: tuple[int, int, int, int, int]) -> None:
    prompt, output, _, n, block = asked
    claimed = claim(shape(prompt, output, n=n), Limits(context=1 << 20, block=block))
    drawn = curve(claimed, 0, table_for)
    for node in range(len(drawn.means) + 2):
        assert at_node(claimed, TABLE, node) == pytest.approx(drawn.point(node), rel=1e-12), node


def test_a_few_large_prompts_are_not_forecast_beyond_what_all_of_them_can_hold() -> None:
    """Five prompts of 25,000: two deviations of a normal law would be a seventh more than all alive hold."""
    forecast = Forecast()
    for name in "abcde":
        forecast.add(name, one(25_000, 4096))
    whole = forecast.sum
    assert forecast.peak() <= max(whole.most)
    assert max(map(lambda m, q: m + Z * sqrt(q), whole.means, whole.squares)) > 1.05 * forecast.peak()


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(requests, min_size=1, max_size=3 * CROWDED), st.randoms(use_true_random=False))
def test_what_is_not_drawn_is_summed_and_taken_off_as_if_it_were(
    asked: list[tuple[int, int, int, int, int]], rng: random.Random
) -> None:
    """Law: a lease that leaves takes off the sum exactly what it put on, drawn or not."""
    sketched, drawn = Forecast(), Forecast()
    claims = [claim(shape(p, m, n=n), Limits(context=1 << 20, block=block)) for p, m, _, n, block in asked]
    parts = [(str(i), each, asked[i][2]) for i, each in enumerate(claims)]
    sketched.rebuild({name: sketch_or_curve(each, shown, table_for) for name, each, shown in parts})
    drawn.rebuild({name: curve(each, shown, table_for) for name, each, shown in parts})
    assert sketched.peak() == pytest.approx(drawn.peak(), rel=1e-12)
    for name in rng.sample([name for name, *_ in parts], len(parts) // 2):
        assert sketched.remove(name) == pytest.approx(drawn.remove(name), rel=1e-9, abs=1e-6)
    for column in ("means", "spreads", "squares", "most"):
        ours, theirs = getattr(sketched.sum, column), getattr(drawn.sum, column)
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-3), column


def test_those_let_in_without_a_look_are_put_on_together() -> None:
    together, one_by_one = Forecast(), Forecast()
    for each in (together, one_by_one):
        each.add("first", one(400, 300))
    late = {str(i): claim(shape(100 * i, 60 * i), LIMITS) for i in range(1, 30)}
    together.draw({name: sketch_or_curve(asked, 0, table_for) for name, asked in late.items()})
    for name, asked in late.items():
        one_by_one.add(name, curve(asked, 0, table_for))
    assert together.level == pytest.approx(one_by_one.level)
    assert together.peak() == pytest.approx(one_by_one.peak())
    for name in late:
        together.remove(name)
    assert together.peak() == pytest.approx(one(400, 300).peak())


def test_the_peak_lies_where_the_lesser_of_both_heights_is_highest() -> None:
    """What all can hold caps the tallest node, and another one is the peak."""
    told = Curve([10.0, 50.0, 40.0], [0.0] * 3, [0.0] * 3, [90.0, 30.0, 90.0]).crest()
    assert (told.peak, told.node, told.tall, told.most) == (40.0, 2, 50.0, 90.0)


def test_rebuilding_gives_what_adding_gave() -> None:
    added, rebuilt = Forecast(), Forecast()
    curves = {str(i): one(100 * i, 50 * i, i) for i in range(1, 20)}
    for name, each in curves.items():
        added.add(name, each)
    rebuilt.rebuild(dict(curves))
    assert added.peak() == pytest.approx(rebuilt.peak())
    rebuilt.rebuild({})
    assert rebuilt.peak() == 0.0
    assert total([]).peak() == 0.0


def test_when_all_are_gone_nothing_is_left_of_them() -> None:
    """Law 1: not even the last digits of sums of fractions."""
    forecast, rng = Forecast(), random.Random(1)
    names = [str(i) for i in range(100)]
    for name in names:
        forecast.add(name, one(rng.randint(1, 3000), rng.randint(1, 3000)))
    rng.shuffle(names)
    for name in names:
        forecast.remove(name)
    assert forecast.peak() == 0.0


def test_a_certain_request_is_forecast_at_its_claim_to_the_block() -> None:
    """E18: a sequence of 60 + 5 tokens in blocks of 64 is 128 tokens, not 64 + 5 and not 192."""
    assert one(60, 5, block=64).peak() == 128
    assert one(64, 0, block=64).peak() == 64
    assert one(1, 8, block=16).peak() == 16
    assert one(16, 1, block=16).peak() == 32
    assert one(100, 8, n=8).peak() == 8 * 112
    several = curve(claim(shape([60] * 3, 5), Limits(context=8192, block=64)), 0, table_for)
    assert several.peak() == 3 * 128


def test_no_sequence_is_forecast_beyond_its_claim() -> None:
    for prompt, output, shown, block in ((100, 4096, 0, 16), (7, 900, 899, 256), (5000, 3, 9, 64)):
        peak = one(prompt, output, shown, block=block)
        most = round_up(prompt + output, block)
        held = [mean / alive for mean, alive in zip(peak.means, TABLE.ahead(shown).alive, strict=False)]
        assert max(held) <= most + 1e-6


def test_an_answer_that_outlived_its_cap_holds_what_it_claimed() -> None:
    assert one(100, 60, 500).peak() == one(100, 60, 60).peak() == 160
    assert one(100, 1 << 20, 1 << 21).peak() == 1 << 20


def test_many_prompts_are_forecast_like_as_many_requests() -> None:
    prompts = [50 + 37 * i for i in range(40)]
    together = curve(claim(shape(prompts, 500), LIMITS), 100, table_for)
    apart = total([one(prompt, 500, 100) for prompt in prompts])
    assert together.peak() == pytest.approx(apart.peak(), rel=0.02)


def test_caps_that_differ_by_prompt_end_each_at_its_own() -> None:
    """Near the context's end, long prompts of one request have less left than short ones."""
    asked = claim(shape([100, 900], 500), Limits(context=1000, block=1))
    assert asked.outputs == (500, 100)
    together = curve(asked, 0, table_for)
    assert together.peak() == pytest.approx(naive_peak([(asked, 0)]), rel=1e-9)


def test_the_forecast_reaches_the_last_token_of_the_longest_answers() -> None:
    """Not stopping at 2,048 steps: thousands of reasoning tokens still grow the pool."""
    stubborn = Table(survival_from_hazards([0.0] * 351))
    asked = claim(shape(100, 60_000), LIMITS)
    assert curve(asked, 0, lambda _: stubborn).peak() == asked.tokens
    assert curve(asked, 30_000, lambda _: stubborn).peak() == asked.tokens


def in_flight(rng: random.Random, model: SurvivalModel, count: int) -> list[tuple[Claim, int, int]]:
    """Requests caught in the middle of a steady stream: (claim, shown, true length)."""
    caught: list[tuple[Claim, int, int]] = []
    while len(caught) < count:
        length = min(max(int(rng.lognormvariate(5.3, 0.9)), 1), 4096)
        if rng.random() < length / 4096:  # long ones are in flight longer
            asked = claim(shape(rng.randint(20, 800), 4096), LIMITS)
            caught.append((asked, rng.randrange(length), length))
    model.refresh({("m", "chat", ""): [shown for _, shown, _ in caught]})
    return caught


def realised_peak(caught: list[tuple[Claim, int, int]]) -> int:
    """The most that these requests will really hold at one time."""
    peak = 0
    for t in range(0, 4096, 4):
        alive = [(asked, shown + t) for asked, shown, length in caught if shown + t <= length]
        peak = max(peak, sum(round_up(asked.prompts[0] + out, 16) for asked, out in alive))
    return peak


def test_realised_occupancy_seldom_exceeds_the_forecast_and_is_near_it() -> None:
    """z = 2 with learned lengths: over once in fifty at most, and not by wasting half the pool."""
    rng, model, key = random.Random(11), SurvivalModel(), ("m", "chat", "")
    for _ in range(1000):
        model.ended(key, min(max(int(rng.lognormvariate(5.3, 0.9)), 1), 4096), finished=True)
    over, ratios = 0, []
    for _ in range(100):
        caught = in_flight(rng, model, 40)
        curves = [curve(asked, shown, lambda cap: model.table(key, cap)) for asked, shown, _ in caught]
        forecast, real = total(curves).peak(), realised_peak(caught)
        over += real > forecast
        ratios.append(real / forecast)
    assert over <= 2
    assert sum(ratios) / len(ratios) > 0.6


def saturated(policy: Policy, seed: int) -> tuple[float, int, int]:
    """An engine of 48,000 tokens that decodes 8 tokens a tick for all, with callers always waiting.

    Returns mean requests in flight over the second half, the most tokens held, and answers finished.
    """
    rng, talk = random.Random(seed), Conversation(GateConfig(policy=policy)).up()
    running: dict[str, list[int]] = {}
    fullest = finished = asked = crowd = 0
    for step in range(300):
        while True:
            asked += 1
            request, length = shape(rng.randint(20, 600), 4096), int(rng.lognormvariate(5.0, 0.9)) + 1
            if not isinstance(talk.ask(request, f"s{asked}"), Admit):
                break
            running[f"s{asked}"] = [request.prompts[0], 0, min(length, 4096)]
        held = sum(round_up(prompt + done, 16) for prompt, done, _ in running.values())
        fullest, crowd = max(fullest, held), crowd + (len(running) if step >= 150 else 0)
        for request_id, progress in list(running.items()):
            tokens = min(8, progress[2] - progress[1])
            progress[1] += tokens
            talk.tokens(request_id, tokens)
            if progress[1] >= progress[2]:
                talk.end(request_id, EndReason.FINISHED, progress[2])
                del running[request_id]
                finished += 1
        talk.tick()
        talk.page(kv_usage_ratio=held / 48_000, generation_tokens_total=float(step * 100))
    return crowd / 150, fullest, finished


def test_the_forecast_admits_many_times_what_worst_cases_allow_and_stays_within_the_pool() -> None:
    crowd, fullest, finished = saturated(Policy.FORECAST, 1)
    static_crowd, static_fullest, static_finished = saturated(Policy.STATIC, 1)
    capacity = PAGE.capacity_tokens
    assert capacity is not None
    assert crowd > 4 * static_crowd
    assert finished > 4 * static_finished
    assert fullest <= capacity
    assert static_fullest < 0.4 * capacity
    assert fullest > 0.7 * capacity
