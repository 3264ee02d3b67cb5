"""Whether answers end as often as their classes' history says that they should.

History moves slowly: it takes hundreds of answers to learn that all have become longer, and by then the pool
is full of them. What shows it within seconds is that answers fail to end. Each answer in flight should end
with a known hazard; summed over answers and seconds that is how many ends were to be expected, beside those
that were seen. Where fewer are seen than chance explains, every hazard is scaled by one factor (a shared
frailty), so that answers in flight live ``(S(g + t) / S(g)) ^ factor``, and the oldest answers are forgotten
until history explains what is seen. The factor never goes above 1: shorter answers are no danger.

Answers beyond what their class is known for say little, so each is watched up to a cumulated hazard of
``MOST_HAZARD``. Those whose class runs to the cap, and what shows no tokens, are not watched.
"""

from collections.abc import Callable, Iterable
from math import exp, inf, sqrt

from kvctl.core.ledger import Lease
from kvctl.core.survival import Table

LOOK_EVERY_S = 0.5
FADE_S = 15.0  # time constant of both sums
CHANCE = 1.0  # standard deviations of the ends to be expected that are put down to chance
FEWEST = 1.0  # ends to be expected before anything is judged
MOST_HAZARD = 3.0
LEAST = 0.1  # factor
UNEXPLAINED = 0.8  # factor under which history is held to be about other times
FORGET_EVERY_S = 1.0
FORGOTTEN = 0.05  # of what is remembered, each time

_NEW = 0, 0.0  # of what is watched
TableOf = Callable[[Lease], Table]


class Frailty:
    """The factor of one engine, in [LEAST, 1]."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._expected = self._seen = 0.0  # ends, fading
        self._watched: dict[str, tuple[int, float]] = {}  # output at the last look, cumulated hazard
        self._looked_at = self._forgot_at = -inf

    def tick(self, leases: Iterable[Lease], table_of: TableOf, now: float) -> None:
        """Time passes."""
        passed = now - self._looked_at
        if passed < LOOK_EVERY_S:
            return
        self._looked_at = now
        fade = exp(-passed / FADE_S)
        self._expected *= fade
        self._seen *= fade
        for lease in leases:
            if _watchable(lease):
                self._watch(lease, table_of(lease))
        self.factor = self._judged()

    def ended(self, lease: Lease, table_of: TableOf, *, finished: bool) -> None:
        """A lease is over: its answer ended by itself, or was cut."""
        if not _watchable(lease):
            return
        table = table_of(lease)
        before, so_far = self._watched.pop(lease.id, _NEW)
        if so_far < MOST_HAZARD:
            self._expected += _passed(lease, table, before, so_far)
            if finished and not table.to_the_cap:
                self._seen += 1.0

    def outdated(self, now: float) -> bool:
        """Whether some of the history should be forgotten now."""
        if self.factor >= UNEXPLAINED or now - self._forgot_at < FORGET_EVERY_S:
            return False
        self._forgot_at = now
        return True

    def _watch(self, lease: Lease, table: Table) -> None:
        """Add the hazard that it has passed through since the last look."""
        before, so_far = self._watched.get(lease.id, _NEW)
        if so_far < MOST_HAZARD:
            more = _passed(lease, table, before, so_far)
            self._expected += more
            self._watched[lease.id] = lease.output_per_sequence, so_far + more

    def _judged(self) -> float:
        if self._expected < FEWEST:
            return 1.0
        most = self._seen + CHANCE * sqrt(self._expected)
        return max(min(most / self._expected, 1.0), LEAST)


def _passed(lease: Lease, table: Table, before: int, so_far: float) -> float:
    """The hazard on its way from ``before`` tokens to now, as far as it is watched."""
    return min(table.hazard(before, lease.output_per_sequence), MOST_HAZARD - so_far)


def _watchable(lease: Lease) -> bool:
    """A single answer whose tokens are seen as they come."""
    return lease.streaming and lease.first_token_at is not None and lease.claim.sequences == 1
