"""Which decisions are enforced, and what share of callers gets in.

Shadow mode: every decision is made and reported, but enforced only on a share of the requests. Which ones
follows a low-discrepancy sequence (law 7: no randomness), so that any stretch of requests has its share.
"""

from kvctl.core.events import Admit, Queued, Reject

_GOLDEN = 0.6180339887498949  # its multiples modulo 1 spread evenly
STRETCH_S = 10.0


class Enforcement:
    """``ratio`` 1: every decision is enforced; 0: none."""

    def __init__(self, ratio: float, seed: float = 0.0) -> None:
        self.ratio = ratio
        self._phase = seed % 1.0

    def meant(self) -> bool:
        """Whether the decision on the next request is enforced."""
        if self.ratio >= 1.0:
            return True
        self._phase = (self._phase + _GOLDEN) % 1.0
        return self._phase < self.ratio


class AcceptRatio:
    """The share of the requests that were let in, over the last one to two stretches of ten seconds.

    For routers in front, which can weigh replicas by it instead of taking a 429 for a fault.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._asked = self._admitted = 0
        self._before = (0, 0)
        self.ratio: float | None = None  # None: nobody asked

    def count(self, verdict: Admit | Reject | Queued) -> None:
        """A request was answered."""
        kind = type(verdict)
        self._asked += kind is not Queued
        self._admitted += kind is Admit

    def tick(self, now: float) -> None:
        """Time passes."""
        asked = self._asked + self._before[0]
        self.ratio = (self._admitted + self._before[1]) / asked if asked else None
        if now - self._began >= STRETCH_S:
            self._began, self._before = now, (self._asked, self._admitted)
            self._asked = self._admitted = 0
