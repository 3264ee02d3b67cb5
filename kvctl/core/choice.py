"""Which of several gates (engines, or ranks of one) a request is sent to.

First counts what each would say of it now: those that would admit it come before those that would not, and
one on trial comes last among them. Among those that admit, the one with the most relative headroom, with the
request admitted, wins; a pool that holds the prompt's prefix is preferred while its headroom is behind by no
more than ``AFFINITY`` times the share of the prompt that it holds. So affinity is bounded: a warm replica
keeps its sessions until others have clearly more room, and never gets what it would refuse.

Where none admits, the request gets the refusal of the nearest one: the one that would have room the soonest,
else one that may serve at all. A proof that it never fits counts only if all of them have such a proof (law
4).

Law 7: no randomness: among equal offers the first wins.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.core.claim import Prefix
from kvctl.core.outcomes import ChoiceReason, Decision

AFFINITY = 0.5
"""Relative headroom by which a replica that holds the whole prompt may be behind.

600 requests of coding agents over four pools, 14 in flight: 0.42 of the prompt tokens are in the cache where
requests go in turn, 0.68 at 0.25, 0.72 at 0.5 and 0.74 at 1; the busiest pool then has 1.15, 1.34, 1.48 and
1.52 times the average load.
"""

_ORDER = (
    Decision.ADMIT,
    Decision.QUEUE,
    Decision.REJECT_LATER,
    Decision.UNAVAILABLE,
    Decision.REJECT_NEVER,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What an arrival would be told now. ``headroom``: share of the gate's limit left with it admitted."""

    decision: Decision
    headroom: float = 0.0  # for reject_never: the limit in KV tokens, the largest being the nearest
    wait_s: float = 0.0  # for reject_later: until it might fit
    on_trial: bool = False


def choose(offers: Sequence[Offer], warm: Sequence[float]) -> tuple[int, ChoiceReason]:
    """The index of the best offer, and why. ``warm``: share of the prompt that each pool holds, 0..1."""
    places = range(len(offers))
    best = max(places, key=lambda at: _rank(offers[at], warm[at]))
    if len(offers) == 1:
        return best, ChoiceReason.ONLY
    if offers[best].decision is not Decision.ADMIT:
        return best, ChoiceReason.NEAREST
    if warm[best] > 0.0:
        return best, ChoiceReason.PREFIX
    behind = any(warm[at] > 0.0 for at in places)
    return best, ChoiceReason.PREFIX_BEHIND if behind else ChoiceReason.HEADROOM


def _rank(offer: Offer, warm: float) -> tuple[int, int, float]:
    """The sort key of an offer: the larger, the better."""
    order = -_ORDER.index(offer.decision)
    if offer.decision is Decision.ADMIT:
        return order, -int(offer.on_trial), offer.headroom + AFFINITY * warm
    waits = offer.decision in (Decision.QUEUE, Decision.REJECT_LATER)
    return order, 0, -offer.wait_s if waits else offer.headroom


class WarmPrefixes:
    """The prefixes that one pool took in lately, and that its prefix cache may still hold.

    Bounded like the cache by the tokens of the pool, and by ``most`` entries; the least recently used go
    first. The engine may have dropped them: a wrong guess costs a prefill, nothing else.
    """

    def __init__(self, most: int = 65536) -> None:
        self._most = most
        self._tokens = 0
        self._seen: OrderedDict[int, int] = OrderedDict()  # hash -> tokens beyond the prefix before it

    def __len__(self) -> int:
        return len(self._seen)

    def took(self, prefixes: Sequence[Prefix], capacity: int) -> None:
        """A request with these prefixes was admitted to a pool of ``capacity`` tokens."""
        for prefix in prefixes:
            before = 0
            for cumulative, key in prefix:
                if key not in self._seen:
                    self._seen[key] = cumulative - before
                    self._tokens += cumulative - before
                before = cumulative
            for _, key in reversed(prefix):  # the longer ones are dropped first
                self._seen.move_to_end(key)
        while self._seen and (self._tokens > capacity or len(self._seen) > self._most):
            self._tokens -= self._seen.popitem(last=False)[1]

    def warm_tokens(self, prefixes: Sequence[Prefix]) -> int:
        """Tokens of the prompts' beginnings that the pool may hold."""
        total = 0
        for prefix in prefixes:
            longest = 0
            for cumulative, key in prefix:
                if key not in self._seen:
                    break
                longest = cumulative
            total += longest
        return total

    def forget(self) -> None:
        """The engine restarted: its cache is empty."""
        self._seen.clear()
        self._tokens = 0
