"""The engine's gauge against the ledger: tokens in the pool that no lease explains.

Usage is compared with the most that the ledger held over the time that the page may speak of, whole prompts
of those still prefilling included: pages lag, and prompts are allocated chunk by chunk. Compared with the
present ledger alone, a lag of seconds would read every lull as foreign traffic.
"""

from collections import deque

LAG_S = 1.5  # how far behind its answer a page may speak
DEAD_ZONE = 0.01  # of capacity
RISE_PER_POLL = 0.20
FALL_PER_POLL = 0.02


class Reconciler:
    """Estimates the KV tokens held by traffic that did not come through the gate."""

    def __init__(self) -> None:
        self.unattributed = 0.0
        self._held: deque[tuple[float, float]] = deque()  # (when, KV tokens)

    def remember(self, held_tokens: float, now: float) -> None:
        """What the ledger held at ``now``, whole prompts of those still prefilling included."""
        self._held.append((now, held_tokens))
        while len(self._held) > 1 and self._held[1][0] < now - 4 * LAG_S - 2.0:
            self._held.popleft()

    def compare(self, used_tokens: float, capacity: int, asked_at: float) -> None:
        """A page answered a question asked at ``asked_at``: ``used_tokens`` of ``capacity`` are taken."""
        latest = self._held[-1][1] if self._held else 0.0
        ours = max((held for at, held in self._held if at >= asked_at - LAG_S), default=latest)
        target = used_tokens - ours
        if target <= DEAD_ZONE * capacity:
            target = 0.0
        rate = RISE_PER_POLL if target > self.unattributed else FALL_PER_POLL
        self.unattributed += rate * (target - self.unattributed)
        if target == 0.0 and self.unattributed < 1.0:
            self.unattributed = 0.0

    def blind(self) -> None:
        """One poll interval without a page to compare with: what was seen once fades all the same."""
        self.unattributed -= FALL_PER_POLL * self.unattributed

    def another_pool(self) -> None:
        """The engine restarted, or its pool has another size: what was in it is gone."""
        self.unattributed = 0.0
