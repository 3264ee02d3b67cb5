"""Which gate is chosen, and which prefixes a pool is thought to hold."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.choice import AFFINITY, Offer, WarmPrefixes, choose
from kvctl.core.claim import Prefix
from kvctl.core.outcomes import ChoiceReason, Decision

offers = st.builds(
    Offer,
    decision=st.sampled_from(Decision),
    headroom=st.floats(-2, 1),
    wait_s=st.floats(0, 60),
    on_trial=st.booleans(),
)
crowds = st.lists(st.tuples(offers, st.floats(0, 1)), min_size=1, max_size=6)


def admit(headroom: float, *, on_trial: bool = False) -> Offer:
    return Offer(decision=Decision.ADMIT, headroom=headroom, on_trial=on_trial)


def later(wait_s: float) -> Offer:
    return Offer(decision=Decision.REJECT_LATER, headroom=-0.1, wait_s=wait_s)


NEVER = Offer(decision=Decision.REJECT_NEVER, headroom=8192)
GONE = Offer(decision=Decision.UNAVAILABLE)


@pytest.mark.parametrize(
    ("asked", "warm", "place", "reason"),
    [
        ([admit(0.1)], [0.0], 0, ChoiceReason.ONLY),
        ([admit(0.1), admit(0.5)], [0, 0], 1, ChoiceReason.HEADROOM),
        ([admit(0.5), admit(0.5)], [0, 0], 0, ChoiceReason.HEADROOM),
        ([admit(0.4), admit(0.5)], [0.9, 0], 0, ChoiceReason.PREFIX),
        ([admit(0.0), admit(0.5)], [0.9, 0], 1, ChoiceReason.PREFIX_BEHIND),
        ([admit(0.4), admit(0.5)], [0.1, 0], 1, ChoiceReason.PREFIX_BEHIND),
        ([admit(0.9, on_trial=True), admit(0.1)], [1, 0], 1, ChoiceReason.PREFIX_BEHIND),
        ([later(1), admit(0.01)], [1, 0], 1, ChoiceReason.PREFIX_BEHIND),
        ([GONE, admit(-3)], [0, 0], 1, ChoiceReason.HEADROOM),
        ([later(3), later(1), GONE], [0, 0, 0], 1, ChoiceReason.NEAREST),
        ([GONE, NEVER], [0, 0], 0, ChoiceReason.NEAREST),
        ([NEVER, later(50)], [0, 0], 1, ChoiceReason.NEAREST),
        ([NEVER, Offer(decision=Decision.REJECT_NEVER, headroom=9000)], [0, 0], 1, ChoiceReason.NEAREST),
    ],
)
def test_the_choice(asked: list[Offer], warm: list[float], place: int, reason: ChoiceReason) -> None:
    assert choose(asked, warm) == (place, reason)


@given(crowds)
def test_whoever_admits_is_preferred_and_affinity_is_bounded(crowd: list[tuple[Offer, float]]) -> None:
    asked, warm = [offer for offer, _ in crowd], [share for _, share in crowd]
    at, reason = choose(asked, warm)
    chosen = asked[at]
    decisions = {offer.decision for offer in asked}
    if Decision.ADMIT in decisions:
        assert chosen.decision is Decision.ADMIT
        firm = [offer for offer in asked if offer.decision is Decision.ADMIT and not offer.on_trial]
        assert not (chosen.on_trial and firm)
        same = firm or [offer for offer in asked if offer.decision is Decision.ADMIT]
        assert chosen.headroom >= max(offer.headroom for offer in same) - AFFINITY
    else:
        assert reason in {ChoiceReason.NEAREST, ChoiceReason.ONLY}
        assert chosen.decision is not Decision.REJECT_NEVER or decisions == {Decision.REJECT_NEVER}


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1)), min_size=2, max_size=4))
def test_the_order_of_the_engines_is_no_matter(crowd: list[tuple[float, float]]) -> None:
    """But for ties: the chosen one's worth is the same in every order."""
    worth = {
        max(headroom + AFFINITY * share for headroom, share in [order[at]])
        for order in permutations(crowd)
        for at in [choose([admit(h) for h, _ in order], [w for _, w in order])[0]]
    }
    assert len(worth) == 1


def chain(*keys: int, tokens: int = 100) -> tuple[Prefix, ...]:
    return (tuple((tokens * (at + 1), key) for at, key in enumerate(keys)),)


def test_the_longest_known_beginning_is_warm() -> None:
    pool = WarmPrefixes()
    pool.took(chain(1, 2, 3), 1000)
    assert pool.warm_tokens(chain(1, 2, 3, 4)) == 300
    assert pool.warm_tokens(chain(1, 2, 9)) == 200
    assert pool.warm_tokens(chain(9, 2, 3)) == 0


def test_it_holds_no_more_than_the_pool() -> None:
    pool = WarmPrefixes()
    pool.took(chain(1, 2, 3), 300)
    pool.took(chain(1, 5), 300)
    assert pool.warm_tokens(chain(1, 5)) == 200
    assert pool.warm_tokens(chain(1, 2, 3)) == 200  # the last of it went, as it does in the engine
    pool.took(chain(7, 8, 9), 300)
    assert pool.warm_tokens(chain(1)) == 0


def test_a_restart_makes_it_cold() -> None:
    pool = WarmPrefixes()
    pool.took(chain(1), 1000)
    pool.forget()
    assert pool.warm_tokens(chain(1)) == 0
    assert len(pool) == 0


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8), max_size=40), st.integers(1, 2000))
def test_the_books_of_a_pool_agree(requests: list[list[int]], capacity: int) -> None:
    pool = WarmPrefixes(most=16)
    for keys in requests:
        pool.took(chain(*keys), capacity)
        assert len(pool) <= 16
        assert pool._tokens == sum(pool._seen.values()) <= capacity
