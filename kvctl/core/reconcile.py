"""Compares the engine's gauge with the ledger: tokens in the pool that no lease explains.

Usage is compared with the most that the ledger held over the time that the page may speak of, including whole
prompts that are still prefilling: pages lag, and prompts are allocated chunk by chunk. Compared with the
present ledger alone, a lag of seconds would make every lull look like foreign traffic. The page itself shows
how far it lags: its count of generated tokens equalled the ledger's count at the moment that it speaks of.
Where others generate too, the page is ahead of the ledger and is taken for fresh.

What leases share is in the ledger once, as it is in the gauge. If usage stays above the ledger by a good part
of what sharing saves, the engine does not share prefixes, unless its own counter of cache hits says that it
does: then the surplus is foreign traffic.
"""

from collections import deque
from math import inf

LAG_S = 1.5  # how far a page may lag behind its date: gauges and counters are of different moments
MOST_LAG_S = 20.0  # an older page cannot be told from a drifting count
DEAD_ZONE = 0.01  # of capacity
RISE_PER_POLL = 0.20
FALL_PER_POLL = 0.02
WORTH_DOUBT = 0.05  # of capacity: with less saved the gauge cannot tell
UNSHARED = 0.5  # of what sharing saves, found missing
DOUBTFUL_PAGES = 15
DOUBTED_S = 600.0  # after which sharing is tried again
HITS_FADE = 0.98  # a page
HITS_ENOUGH = 0.5  # of what should have been found in the cache


class Dating:
    """Finds the moment of a page: where the ledger's count of tokens, up to a constant, was the engine's.

    The constant is what the engine had generated before, and what others generated since; it is set anew
    whenever a page would be dated after it was asked for, and when neither side has anything to do.
    """

    def __init__(self) -> None:
        self.seen_tokens = self._counted = 0.0  # by the ledger, and by the engine since the first page
        self._offset = 0.0
        self._marks: deque[tuple[float, float]] = deque()  # (when, seen by then)

    def remember(self, now: float) -> None:
        """Note the ledger's count at ``now``."""
        self._marks.append((now, self.seen_tokens))
        while len(self._marks) > 1 and self._marks[1][0] < now - MOST_LAG_S:
            self._marks.popleft()

    def page(self, generated: float | None, *, idle: bool) -> None:
        """A page counts ``generated`` tokens more than the one before; None: it cannot be compared."""
        self._counted += generated or 0.0
        if generated is None or idle:
            self._offset = self.seen_tokens - self._counted

    def date(self, asked_at: float) -> float:
        """When the last page was true, ``asked_at`` at the latest."""
        counted = self._counted + self._offset
        then = [(at, seen) for at, seen in self._marks if at <= asked_at]
        if not then:
            return asked_at
        if counted >= then[-1][1]:
            self._offset = then[-1][1] - self._counted
            return asked_at
        if counted < then[0][1]:
            self._offset = then[0][1] - self._counted
        return next((at for at, seen in reversed(then) if seen <= counted), then[0][0])


class Reconciler:
    """Estimates the KV tokens held by traffic that did not come through the gate."""

    def __init__(self) -> None:
        self.unattributed = 0.0
        self._held: deque[tuple[float, float]] = deque()  # (when, KV tokens)
        self.saved = 0.0  # KV tokens saved by sharing, at the last comparison
        self.above = 0.0  # the part of the last page's usage that the ledger does not explain

    def remember(self, held_tokens: float, now: float, saved_tokens: float = 0.0) -> None:
        """Note what the ledger held at ``now``, including whole prompts that are still prefilling.

        ``saved_tokens``: what it would have held in addition if nothing were shared.
        """
        self.saved = saved_tokens
        self._held.append((now, held_tokens))
        while len(self._held) > 1 and self._held[1][0] < now - MOST_LAG_S - 2.0 * LAG_S:
            self._held.popleft()

    def compare(self, used_tokens: float, capacity: int, date: float) -> None:
        """A page that is true for ``date`` or later: ``used_tokens`` of ``capacity`` are taken."""
        latest = self._held[-1][1] if self._held else 0.0
        ours = max((held for at, held in self._held if at >= date - LAG_S), default=latest)
        target = used_tokens - ours
        if target <= DEAD_ZONE * capacity:
            target = 0.0
        self.above = target
        rate = RISE_PER_POLL if target > self.unattributed else FALL_PER_POLL
        self.unattributed += rate * (target - self.unattributed)
        if target == 0.0 and self.unattributed < 1.0:
            self.unattributed = 0.0

    def blind(self) -> None:
        """One poll interval without a page to compare: the estimate fades all the same."""
        self.unattributed -= FALL_PER_POLL * self.unattributed

    def another_pool(self) -> None:
        """The engine restarted, or its pool has another size: what was in it is gone."""
        self.unattributed = self.above = 0.0

    def explained(self, tokens: float) -> None:
        """``tokens`` of what no lease explained are in the ledger from now on."""
        self.unattributed = max(self.unattributed - tokens, 0.0)


class SharingCheck:
    """Judges whether an engine that says so really keeps common prefixes once."""

    def __init__(self) -> None:
        self._pages = 0
        self._doubted_until = -inf
        self._hits_total: float | None = None
        self._found = self._expected = 0.0

    def doubted(self, now: float) -> bool:
        """Whether sharing is doubted at present."""
        return now < self._doubted_until

    def expect(self, tokens: int) -> None:
        """A request was let in that begins with ``tokens`` tokens of live ones."""
        self._expected += tokens

    def page(self, hits_total: float | None, reconciler: Reconciler, capacity: int, now: float) -> bool:
        """A page was compared; ``hits_total`` cached prompt tokens, None: unknown. True: doubt begins."""
        if hits_total is not None and self._hits_total is not None:
            self._found += max(hits_total - self._hits_total, 0.0)
        self._hits_total = hits_total
        self._found, self._expected = self._found * HITS_FADE, self._expected * HITS_FADE
        found = hits_total is not None and self._found >= HITS_ENOUGH * self._expected
        saved = reconciler.saved
        missing = saved > WORTH_DOUBT * capacity and reconciler.above >= UNSHARED * saved and not found
        self._pages = self._pages + 1 if missing else 0
        if self._pages < DOUBTFUL_PAGES:
            return False
        self._pages, self._doubted_until = 0, now + DOUBTED_S
        return True

    def another_engine(self) -> None:
        """The engine is another process: it may have other flags."""
        self._pages, self._doubted_until, self._hits_total = 0, -inf, None
        self._found = self._expected = 0.0
