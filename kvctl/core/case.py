"""A request while it is being judged, and what stands in its way."""

from collections.abc import Callable
from dataclasses import dataclass

from kvctl.core.claim import Claim
from kvctl.core.events import Arrived
from kvctl.core.outcomes import Priority, RejectReason
from kvctl.core.records import record
from kvctl.core.sharing import Candidate
from kvctl.core.survival import Key


@dataclass(slots=True, eq=False)
class Case:
    """One request with its claim and, once needed, its curve, which ``draw`` makes.

    ``peak`` (of all in flight with it), ``alone`` and ``cached`` are as last judged; KV tokens. ``bounded``:
    ``peak`` is only an upper bound, for which nobody looked at the curve.
    """

    event: Arrived
    asked: Claim
    key: Key
    draw: Callable[[Claim, Key], Candidate]
    static: bool  # worst cases count
    tenant: str = ""  # whose rule applies; "" where tenants are not distinguished
    priority: Priority = Priority.NORMAL
    peak: float = 0.0
    alone: bool = False
    bounded: bool = False
    cached: int = 0
    _own: float = -1.0
    _candidate: Candidate | None = None

    @property
    def candidate(self) -> Candidate:
        """Its curve."""
        if self._candidate is None:
            self._candidate = self.draw(self.asked, self.key)
        return self._candidate

    @property
    def own(self) -> float:
        """KV tokens that it will hold by itself, at its peak."""
        if self._own < 0.0:
            worst = float(self.asked.tokens)
            self._own = worst if self.static else min(self.candidate.peak(), worst)
        return self._own


@record
class Obstacle:
    """Why a request cannot start now, and what has to go first, in one of three measures.

    ``tokens`` of the forecast peak that have to drain, ``sequences`` that have to end, or ``seconds`` to pass
    (None: not known).
    """

    reason: RejectReason
    tokens: float = 0.0
    sequences: float | None = None
    seconds: float | None = None
