"""What the page remembers: the last refusals, decisions of the last minute, and five minutes of the curve.

Law 6: each decision costs a step or two, whoever looks or does not.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvctl.core.events import Admit, Command, Reject
from kvctl.core.outcomes import RejectReason
from kvctl.core.status import GateStatus

SHOWN = 12  # refusals
WINDOW_S = 60
HISTORY = 300  # samples, one a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One refused request. ``at`` is monotonic seconds; KV tokens."""

    at: float
    engine: str
    reason: RejectReason
    needed_tokens: int
    headroom_tokens: int | None
    retry_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One point of the curve, KV tokens. ``used`` is the engine's own measure; None: unknown."""

    at: float
    capacity: int
    budget: int
    forecast: float
    used: float | None


def used_tokens(status: GateStatus) -> float | None:
    """KV tokens in use as the engine measures them; None where any rank does not say."""
    parts = [
        None if rank.kv_usage_ratio is None or rank.capacity_tokens is None
        else rank.kv_usage_ratio * rank.capacity_tokens
        for rank in status.ranks
    ]  # fmt: skip
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


class Recent:
    """Fed with every command of the gates, and with their state once a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` gives monotonic seconds."""
        self._clock = clock
        self._refusals: deque[Refusal] = deque(maxlen=SHOWN)
        self._seconds: deque[tuple[int, Counter[str]]] = deque(maxlen=WINDOW_S)
        self._second, self._counts = -1, Counter[str]()  # the last of them
        self._curves: dict[str, deque[Sample]] = {}

    def observe(self, engine: str, command: Command) -> None:
        """Take a command of an engine's gate."""
        if isinstance(command, Admit):
            self._count("")
        elif isinstance(command, Reject):
            self._count(command.reason)
            self._refusals.append(
                Refusal(
                    at=self._clock(),
                    engine=engine,
                    reason=command.reason,
                    needed_tokens=command.needed_tokens,
                    headroom_tokens=command.headroom_tokens,
                    retry_after_s=command.retry_after_s,
                )
            )

    def sample(self, statuses: Mapping[str, GateStatus]) -> None:
        """Put the state of now on the curves."""
        for engine, status in statuses.items():
            curve = self._curves.setdefault(engine, deque(maxlen=HISTORY))
            curve.append(
                Sample(
                    at=status.at,
                    capacity=status.capacity_tokens,
                    budget=status.budget_tokens,
                    forecast=status.forecast_peak_tokens,
                    used=used_tokens(status),
                )
            )

    def now(self) -> float:
        """By the clock of all that is remembered."""
        return self._clock()

    def refusals(self) -> list[Refusal]:
        """The last ones, the latest first."""
        return list(reversed(self._refusals))

    def curve(self, engine: str) -> list[Sample]:
        """Up to five minutes, the latest last."""
        return list(self._curves.get(engine, ()))

    def last_minute(self) -> tuple[int, dict[str, int]]:
        """Requests let in, and requests refused by reason."""
        oldest = math.floor(self._clock()) - WINDOW_S
        summed: Counter[str] = Counter()
        for second, counts in self._seconds:
            if second > oldest:
                summed.update(counts)
        admitted = summed.pop("", 0)
        return admitted, dict(summed.most_common())

    def _count(self, word: str) -> None:
        second = int(self._clock())
        if second != self._second:
            self._second, self._counts = second, Counter()
            self._seconds.append((second, self._counts))
        self._counts[word] += 1
