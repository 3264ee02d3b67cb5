"""Decisions that look at no curve are those that a look at the curve gives."""

import random
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvctl.core.case import Case, Obstacle
from kvctl.core.claim import Limits, Prefix, Shape, claim
from kvctl.core.correlation import RHO_LEAST, RHO_MOST
from kvctl.core.curves import Z, curve, total
from kvctl.core.events import Admit, Arrived, Reject
from kvctl.core.gate import Gate
from kvctl.core.newcomers import Newcomers
from kvctl.core.outcomes import Policy
from kvctl.core.retry import WINDOW_S
from kvctl.core.supply import GateConfig
from kvctl.core.survival import SurvivalModel
from tests.core.conversation import MODEL, PAGE, Conversation, shape
from tests.effort import examples

KEY = (MODEL, "chat", "")


class LookingGate(Gate):
    """Looks at the curve for every arrival."""

    def _obstacle(self, case: Case, now: float, *, exact: bool = True) -> Obstacle | None:  # noqa: ARG002 - one signature
        return super()._obstacle(case, now, exact=True)


class Traffic:
    """The same random requests for every gate that is asked."""

    def __init__(self, seed: int, *, sharing: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.sharing = sharing
        self.capacity = rng.choice([8_000, 48_000, 200_000, 1_000_000])
        caps: list[list[int | None]] = [[512], [None], [4096], [16, 64, 512, 2048, None]]
        self.caps = rng.choice(caps)
        self.prompt = rng.choice([40, 400, 2000])
        self.each_tick = rng.choice([1, 4, 16])
        self.chance_to_end = rng.choice([0.2, 0.05, 0.01])

    def arrival(self) -> Shape:
        rng = self.rng
        prompts = [int(rng.expovariate(1 / self.prompt)) + 1]
        if rng.random() < 0.05:
            prompts.append(prompts[0] // 2 + 1)
        n = 1 if rng.random() < 0.9 else 3
        asked = shape(prompts, rng.choice(self.caps), n=n, stream=rng.random() < 0.8)
        return replace(asked, prefixes=tuple(map(self._prefix, prompts))) if self.sharing else asked

    def _prefix(self, prompt: int) -> Prefix:
        own, common = self.rng.getrandbits(60), self.rng.choice([0, 256, 1024])
        return tuple((at, at if at <= common else own + at) for at in range(64, prompt, 64))


def gate_of(kind: type[Gate], traffic: Traffic, policy: Policy = Policy.FORECAST) -> Conversation:
    talk = Conversation()
    talk.gate = kind(GateConfig(policy=policy))
    return talk.up(replace(PAGE, capacity_tokens=traffic.capacity, prefix_caching=traffic.sharing))


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([Policy.FORECAST, Policy.FORECAST, Policy.NONE]))
def test_every_decision_is_the_one_that_the_curve_gives(seed: int, policy: Policy) -> None:
    traffic = Traffic(seed)
    quick, looking = gate_of(Gate, traffic, policy), gate_of(LookingGate, traffic, policy)
    live: list[str] = []
    for number in range(100):
        asked, name = traffic.arrival(), f"a{number}"
        one, other = quick.ask(asked, name), looking.ask(asked, name)
        assert type(one) is type(other)
        assert one.forecast_tokens is not None
        assert other.forecast_tokens is not None
        if isinstance(one, Reject) and isinstance(other, Reject):
            assert (one.reason, one.headroom_tokens) == (other.reason, other.headroom_tokens)
            assert one.forecast_tokens == pytest.approx(other.forecast_tokens)
        else:
            live.append(name)
            assert one.forecast_tokens >= other.forecast_tokens * (1.0 - 1e-9)
        for gone in [each for each in live if traffic.rng.random() < traffic.chance_to_end]:
            live.remove(gone)
            for talk in (quick, looking):
                talk.end(gone)
        if number % traffic.each_tick == 0:
            for each in live:
                made = traffic.rng.randrange(9)
                for talk in (quick, looking):
                    talk.tokens(each, made)
            for talk in (quick, looking):
                talk.tick()
            assert quick.status.forecast_peak_tokens == pytest.approx(looking.status.forecast_peak_tokens)
    for each in live:
        quick.end(each)
    assert quick.status.forecast_peak_tokens == 0.0


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 1 << 30))
def test_with_common_prefixes_the_peak_is_never_above_its_bound(seed: int) -> None:
    traffic = Traffic(seed, sharing=True)
    talk = gate_of(Gate, traffic)
    live: list[str] = []
    for number in range(100):
        verdict = talk.ask(traffic.arrival())
        for gone in [each for each in live if traffic.rng.random() < traffic.chance_to_end]:
            live.remove(gone)
            talk.end(gone)
        if isinstance(verdict, Admit):
            live.append(verdict.request_id)
        if number % 7 == 6:
            demand = talk.gate._demand
            bound = demand.most_with(claim(shape(0, 0), Limits()), KEY)
            assert deepcopy(demand).peak(Policy.FORECAST) <= bound * (1.0 + 1e-9)
        if number % traffic.each_tick == 0:
            talk.tick()


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1 << 30))
@example(67)
@example(148)
@example(443)
def test_whoever_is_leaned_on_may_leave(seed: int) -> None:
    """A newcomer that was weighed by the curve counts what another holds already; then that one leaves."""
    rng = random.Random(seed)
    common, talk = rng.choice([1024, 4096, 8192]), gate_of(Gate, Traffic(0, sharing=True))
    caps = rng.choice([[64], [512], [2048], [4096], [64, 2048]])
    system = tuple((at, at) for at in range(64, common + 1, 64))
    talk.page(capacity_tokens=100 * common)

    def sharing(name: str) -> bool:
        asked = shape(common + rng.choice([1, 16]), rng.choice(caps))
        return isinstance(talk.ask(replace(asked, prefixes=(system,)), name), Admit)

    for number in range(rng.choice([0, 0, 30])):
        talk.ask(shape(10, 2048), f"history-{number}")
        talk.tokens(f"history-{number}", int(rng.expovariate(1 / 300)) + 1)
        talk.end(f"history-{number}")
    leaned_on = [name for name in ("a", "b")[: rng.choice([1, 1, 2])] if sharing(name)]
    for name in leaned_on:
        talk.tokens(name, rng.choice([0, 1, 100]))
    talk.tick()
    talk.tick()
    for number in range(rng.choice([0, 1, 3])):
        talk.ask(shape(rng.choice([16, common // 4]), rng.choice(caps)), f"other-{number}")
    if rng.random() < 0.5:
        talk.tick()
        talk.tick()
    demand = talk.gate._demand
    tight = demand.peak(Policy.FORECAST) + rng.choice([0.05, 0.3, 0.8]) * common
    talk.page(capacity_tokens=int(tight / 0.9) + 64)
    for name in ("c", "d")[: rng.choice([1, 2])]:
        sharing(name)
    for name in leaned_on:
        talk.end(name)
        bound = demand.most_with(claim(shape(0, 0), Limits()), KEY)
        assert deepcopy(demand).peak(Policy.FORECAST) <= bound * (1.0 + 1e-9)


def test_a_newcomer_is_weighed_against_the_prefixes_of_now() -> None:
    """Who came and left unseen changed what can be shared: that is drawn before anybody is weighed by it."""
    talk = gate_of(Gate, Traffic(0, sharing=True))
    talk.page(capacity_tokens=4_000_000)
    system = tuple((at, at) for at in range(64, 3000, 64))
    asked = replace(shape(3000, 200), prefixes=(system,))
    talk.admit(asked)
    talk.tick()
    for _ in range(5):
        talk.admit(asked)
    told = talk.gate.outlook(asked, talk.now)
    drawn = deepcopy(talk.gate._demand)
    drawn._sharing.rebuild()
    one = claim(asked, talk.gate._supply.limits)
    again = drawn.peak_with(one, drawn.curve(one, KEY), Policy.FORECAST)
    assert isinstance(told, Admit)
    assert told.forecast_tokens == pytest.approx(again)
    assert again < 3000 + 7 * 300


def test_no_curve_is_drawn_where_there_is_room() -> None:
    talk = gate_of(Gate, Traffic(0))
    talk.page(capacity_tokens=4_000_000)
    first = talk.admit(shape(300, 512))
    talk.tick()
    names = [talk.admit(shape(300, 512)) for _ in range(20)]
    assert len(talk.gate._demand._forecast._curves) == 1
    talk.end(names.pop())
    talk.end(first)
    assert talk.gate._demand._forecast._curves == {}
    assert talk.status.forecast_peak_tokens > 19 * 300  # whoever reads it finds all of them
    assert len(talk.gate._demand._forecast._curves) == 19


def test_what_one_guard_refuses_is_told_with_the_peak_itself() -> None:
    """A bound is no figure for a caller that is turned away."""
    refused = []
    for kind in (Gate, LookingGate):
        talk = Conversation()
        talk.gate = kind(GateConfig(max_num_seqs=5))
        talk.up()
        for _ in range(5):
            talk.admit(shape(100, 4000))
        refused.append(talk.refuse(shape(100, 4000)))
    assert refused[0] == refused[1]


@pytest.mark.parametrize("cap", [0, 1, 7, 8, 9, 512, 513, 4096, 100_000, 3_000_000])
@pytest.mark.parametrize("n", [1, 4])
def test_a_newcomer_is_never_higher_than_its_bound(cap: int, n: int) -> None:
    model = SurvivalModel()
    rng = random.Random(cap)
    for _ in range(100):
        model.ended(KEY, int(rng.expovariate(1 / 300)), finished=True)
    model.refresh({})
    for prompt in (0, 1, 15, 16, 17, 5000):
        asked = claim(shape(prompt, cap, n=n), Limits(context=1 << 22))
        drawn = curve(asked, 0, lambda cap: model.table(KEY, cap))
        tallest = max(mean + Z * spread for mean, spread in zip(drawn.means, drawn.spreads, strict=True))
        bound = Newcomers(model.table).tall(asked, KEY)
        assert tallest <= bound
        assert bound <= 1.3 * tallest + 3 * 16 * n


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 9000), st.integers(1, 3)), min_size=1, max_size=20
    ),
    st.floats(RHO_LEAST, RHO_MOST),
)
def test_a_sum_is_never_higher_than_its_parts_at_their_highest(
    asked: list[tuple[int, int, int]], rho: float
) -> None:
    """Law: whatever the correlation, a spread is a norm; what all can hold adds up."""
    model = SurvivalModel()
    for length in range(0, 3000, 20):
        model.ended(KEY, length, finished=True)
    model.refresh({})
    claims = [claim(shape(prompt, cap, n=n), Limits(context=1 << 22)) for prompt, cap, n in asked]
    parts = [curve(each, 0, lambda cap: model.table(KEY, cap)) for each in claims]
    whole, bounds = total(parts).crest(rho=rho), Newcomers(model.table)
    assert whole.tall <= sum(part.crest(rho=rho).tall for part in parts) * (1.0 + 1e-9)
    assert whole.tall <= sum(bounds.tall(each, KEY) for each in claims)
    assert whole.most <= sum(each.tokens for each in claims)


def test_the_drain_rate_is_that_of_the_peak() -> None:
    """What an end takes off is read at the node of the last peak, and not by two looks for the peak."""
    rng, live, fell = random.Random(5), list[str](), list[tuple[float, float]]()
    quick, watched = (gate_of(kind, Traffic(0)) for kind in (Gate, LookingGate))
    for talk in (quick, watched):
        talk.page(capacity_tokens=400_000)
    for step in range(50):
        for number in range(3):
            name, asked = f"{step}.{number}", shape(rng.randrange(50, 800), 1024)
            live.append(name)
            for talk in (quick, watched):
                assert isinstance(talk.ask(asked, name), Admit)
        for name in rng.sample(live, min(3, len(live) // 20)):
            live.remove(name)
            before = watched.status.forecast_peak_tokens
            for talk in (quick, watched):
                talk.end(name)
            fell.append((watched.now, before - watched.status.forecast_peak_tokens))
        for talk in (quick, watched):
            for name in live:
                talk.tokens(name, 5)
            talk.tick()
    recent = [(at, tokens) for at, tokens in fell if at >= watched.now - WINDOW_S]
    rate = sum(tokens for _, tokens in recent) / (watched.now - recent[0][0])
    for talk in (quick, watched):
        assert talk.status.drain_rate_tokens_per_s == pytest.approx(rate, rel=0.1)


def test_one_that_left_at_once_leaves_nothing() -> None:
    talk = gate_of(Gate, Traffic(0))
    talk.say(Arrived("a", shape(100, 100)))
    talk.end("a")
    newcomers = talk.gate._demand._sharing.newcomers
    assert (newcomers._tall, newcomers._most, newcomers._open) == (0, 0, {})
