"""What leases share, against a model that counts token positions one by one."""

from dataclasses import dataclass
from itertools import count, pairwise, zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.claim import Claim, Limits, Shape, claim
from kvctl.core.demand import Demand
from kvctl.core.events import Ended
from kvctl.core.guards import Guards
from kvctl.core.ledger import Lease
from kvctl.core.outcomes import EndReason, Policy
from kvctl.core.prefixes import DEEPEST, Prefixes
from tests.effort import examples

MODEL = "m"
BORDER = 32
LIMITS = Limits(context=100_000, block=16)
KEY = (MODEL, "chat", "")


def prefix_of(tokens: list[int], every: int = BORDER) -> tuple[tuple[int, int], ...]:
    """Borders of a prompt of token ids."""
    return tuple((end, hash(tuple(tokens[:end]))) for end in range(every, len(tokens), every))


def asked(prompts: list[list[int]], n: int = 1, output: int = 64, block: int = 16) -> Claim:
    shape = Shape(
        route="chat",
        model=MODEL,
        prompts=tuple(map(len, prompts)),
        n=n,
        asked_output=output,
        prefixes=tuple(map(prefix_of, prompts)),
    )
    return claim(shape, Limits(context=100_000, block=block))


def positions(tokens: list[int], block: int) -> set[tuple[int, tuple[int, ...]]]:
    """The blocks that others may read, each by its end and all tokens up to the border after it."""
    known = max((end for end, _ in prefix_of(tokens)), default=0)
    return {(end, tuple(tokens[: -(-end // BORDER) * BORDER])) for end in range(block, known + 1, block)}


def prompt_of(words: list[int]) -> list[int]:
    """A prompt of runs of 24 tokens, so that prompts part within and between borders and blocks."""
    return [word for word in words for _ in range(24)] + [99]


WORDS = st.lists(st.integers(1, 2), min_size=1, max_size=12)


@given(
    st.lists(st.tuples(st.lists(WORDS, min_size=1, max_size=2), st.booleans()), max_size=24),
    st.sampled_from([16, 32, 48]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(150), deadline=None)
def test_what_is_saved_is_what_the_union_of_blocks_lacks(
    steps: list[tuple[list[list[int]], bool]], block: int, random: object
) -> None:
    tree, live, numbers = Prefixes(), {}, count()
    for words, leaves in steps:
        prompts = [prompt_of(one) for one in words]
        name = str(next(numbers))
        live[name] = (prompts, asked(prompts, block=block))
        tree.open(name, MODEL, live[name][1])
        if leaves:
            gone = random.choice(sorted(live))  # type: ignore[attr-defined]
            tree.end(gone, live.pop(gone)[1])
        each = [positions(prompt, block) for prompts, _ in live.values() for prompt in prompts]
        union: set[tuple[int, tuple[int, ...]]] = set().union(*each)
        saved = sum(map(len, each)) - len(union)
        assert tree.saved == saved * block
        for lease_id, (_, one) in live.items():
            for index in range(len(one.prompts)):
                nodes = list(tree.path(lease_id, index))
                assert all(low.weight <= high.weight for low, high in pairwise(nodes))
                assert all(low.start == high.end for low, high in pairwise(nodes))
    for lease_id, (_, one) in live.items():
        tree.end(lease_id, one)
    assert (tree.saved, len(tree)) == (0, 0)


@dataclass
class Side:
    """A demand side that believes in sharing."""

    demand: Demand
    now: float = 0.0

    def open(self, name: str, one: Claim) -> None:
        candidate = self.demand.curve(one, KEY)
        self.demand.open(
            Lease(id=name, key=KEY, claim=one, streaming=True, admitted_at=self.now), candidate, self.now
        )

    def end(self, name: str) -> None:
        self.demand.ended(Ended(name, EndReason.CLIENT_GONE), self.now)

    def adds(self, one: Claim, policy: Policy = Policy.FORECAST) -> float:
        return self.demand.peak_with(one, self.demand.curve(one, KEY), policy) - self.demand.peak(policy)


@pytest.fixture
def side() -> Side:
    demand = Demand(Guards(None, None, None))
    demand.share(sharing=True)
    return Side(demand)


SYSTEM = list(range(3000))


def turn(number: int, tokens: int = 100) -> list[int]:
    return [*SYSTEM, *([10_000 + number] * tokens)]


def test_a_common_prompt_counts_once_while_anyone_holds_it(side: Side) -> None:
    ledger = side.demand.ledger
    for number in range(1, 6):
        side.open(str(number), asked([turn(number)]))
    alone = ledger.get("1")
    assert alone is not None
    shared = 3000 // BORDER * BORDER // 16 * 16
    assert ledger.shared_tokens == 4 * shared
    assert ledger.held_tokens() == 5 * alone.held_tokens() - 4 * shared
    for number in range(1, 5):
        side.end(str(number))
    assert ledger.shared_tokens == 0
    last = ledger.get("5")
    assert last is not None
    assert ledger.held_tokens() == last.held_tokens()
    side.end("5")
    assert (ledger.held_tokens(), ledger.claimed_tokens, side.demand.peak(Policy.FORECAST)) == (0, 0, 0.0)


@pytest.mark.parametrize("policy", [Policy.FORECAST, Policy.STATIC])
def test_a_newcomer_adds_only_what_nobody_holds(side: Side, policy: Policy) -> None:
    first = side.adds(asked([turn(1)]), policy)
    assert first > 3000
    side.open("1", asked([turn(1)]))
    assert side.adds(asked([turn(2)]), policy) < 250
    assert side.adds(asked([turn(2)[1:]]), policy) > 2900  # another beginning


def test_judged_and_charged_alike(side: Side) -> None:
    for number in range(1, 40):
        one = asked([turn(number)], output=400)
        foreseen = side.demand.peak_with(one, side.demand.curve(one, KEY), Policy.FORECAST)
        side.open(str(number), one)
        assert side.demand.peak(Policy.FORECAST) == pytest.approx(foreseen)


def alike(one: list[float], other: list[float]) -> None:
    assert one[: len(other)] == pytest.approx(other, abs=1e-6 * max([1.0, *map(abs, other)]))
    assert all(abs(rest) < 1e-6 for rest in one[len(other) :])


@given(
    st.lists(
        st.tuples(st.lists(WORDS, min_size=1, max_size=2), st.integers(1, 2), st.booleans()), max_size=14
    ),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(60), deadline=None)
def test_between_ticks_the_forecast_is_what_a_tick_would_make_it(
    steps: list[tuple[list[list[int]], int, bool]], random: object
) -> None:
    demand = Demand(Guards(None, None, None))
    demand.share(sharing=True)
    side, names = Side(demand), set()
    for number, (words, n, leaves) in enumerate(steps):
        name = str(number)
        names.add(name)
        side.open(name, asked([prompt_of(one) for one in words], n=n))
        if leaves:
            gone = random.choice(sorted(names))  # type: ignore[attr-defined]
            names.discard(gone)
            side.end(gone)
        judged = demand.in_flight().means
        demand._sharing._redraw()
        moved = demand.in_flight()
        demand._sharing.rebuild()
        made = demand.in_flight()
        if all(len(one) * n == 1 for one, n, _ in steps[: number + 1]):
            alike(judged, made.means)
        else:  # what the prompts of one request share is not foreseen
            pairs = zip_longest(judged, made.means, fillvalue=0.0)
            assert all(one >= other - 1e-6 for one, other in pairs)
        alike(moved.means, made.means)
        alike(moved.spreads, made.spreads)
        alike(moved.squares, made.squares)
    for name in names:
        side.end(name)
    assert (demand.ledger.held_tokens(), demand.ledger.claimed_tokens, demand.ledger.shared_tokens) == (
        0,
        0,
        0,
    )
    assert demand.peak(Policy.FORECAST) == 0.0


def test_a_request_is_never_charged_more_for_sharing(side: Side) -> None:
    apart = Side(Demand(Guards(None, None, None)))
    for number in range(20):
        one = asked([turn(number // 2)], output=2000)
        for each in (side, apart):
            each.open(str(number), one)
        assert side.demand.peak(Policy.FORECAST) <= apart.demand.peak(Policy.FORECAST) + 1.0


def test_sequences_of_one_request_hold_their_prompt_once(side: Side) -> None:
    one = asked([turn(1)], n=8)
    side.open("1", one)
    assert side.demand.ledger.shared_tokens == 7 * (3099 // 16 * 16)
    assert side.demand.peak(Policy.FORECAST) < one.tokens / 5
    assert one.tokens > 8 * 3100  # what it claims as a whole is unchanged
    side.end("1")
    assert side.demand.ledger.shared_tokens == 0


def test_one_that_waited_is_weighed_anew_when_its_companions_left(side: Side) -> None:
    side.open("1", asked([turn(1)]))
    waiting, one = side.demand.curve(asked([turn(2)]), KEY), asked([turn(2)])
    assert side.demand.peak_with(one, waiting, Policy.STATIC) < 2 * 3300
    side.end("1")
    assert side.demand.peak_with(one, waiting, Policy.STATIC) == one.tokens
    assert waiting.saved == 0


def test_a_prompt_needs_no_prefill_once_a_holder_is_past_its_own(side: Side) -> None:
    demand = side.demand
    side.open("1", asked([turn(1)]))
    assert demand.guards.prefill.backlog == 3100
    side.open("2", asked([turn(2)]))
    assert demand.guards.prefill.backlog == 6200  # nobody has computed it yet
    first = demand.ledger.get("1")
    assert first is not None
    demand.progressed(first, 1, 0.1)
    side.open("3", asked([turn(3)]))
    shared = 3000 // BORDER * BORDER
    assert demand.guards.prefill.backlog == 3100 + 3100 - shared
    for name in "123":
        side.end(name)
    assert demand.guards.prefill.backlog == 0


def test_who_stops_believing_counts_each_by_itself(side: Side) -> None:
    demand = side.demand
    for number in range(3):
        side.open(str(number), asked([turn(number)]))
    demand.share(sharing=False)
    whole = sum(lease.held_tokens() for lease in demand.ledger)
    assert (demand.ledger.shared_tokens, demand.ledger.held_tokens()) == (0, whole)
    demand.share(sharing=True)
    assert demand.ledger.held_tokens() == whole - 2 * (3000 // BORDER * BORDER // 16 * 16)
    for number in range(3):
        side.end(str(number))
    assert demand.ledger.held_tokens() == 0


def test_models_share_nothing_with_each_other(side: Side) -> None:
    demand = side.demand
    for number, model in enumerate(("m", "adapter")):
        one = asked([turn(1)])
        lease = Lease(id=str(number), key=(model, "chat", ""), claim=one, streaming=True, admitted_at=0.0)
        demand.open(lease, demand.curve(one, lease.key), 0.0)
    assert demand.ledger.shared_tokens == 0


def test_the_last_token_is_never_shared(side: Side) -> None:
    exact = SYSTEM[: 32 * 16]  # a border at its very end is left out
    one = asked([exact])
    whole = Shape(
        route="chat", model=MODEL, prompts=(512,), asked_output=1, prefixes=((*one.prefixes[0], (512, 7)),)
    )
    for name in "ab":
        side.open(name, claim(whole, LIMITS))
    assert side.demand.ledger.shared_tokens == 480


def test_a_chain_of_ever_longer_prompts_costs_no_more_than_its_depth() -> None:
    tree = Prefixes()
    for number in range(1, 60):
        one = asked([SYSTEM[: 32 * number + 1]])
        assert len(tree.match(MODEL, one, 0).nodes) <= DEEPEST
        tree.open(str(number), MODEL, one)
    for number in range(1, 60):
        tree.end(str(number), asked([SYSTEM[: 32 * number + 1]]))
    assert tree.saved == 0
