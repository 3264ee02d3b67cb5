"""The terms that put pressure on the budget, each a factor in (0, 1].

Law 3: unknown is not zero. A term that cannot be judged leaves the budget alone and says so elsewhere
(``kvctl_telemetry_up``); it never becomes 0.
"""

from collections.abc import Iterable, Sequence

from kvctl.core.telemetry import GpuSample, RankSample

CUT = 0.9  # of the term, once per episode of preemptions
FLOOR = 0.5
RECOVERY_PER_S = 1.01  # by time alone: tied to load, it would stay down all night
EPISODE_GAP_S = 2.0  # preemptions closer together belong to one episode
EPISODE_MAX_S = 5.0  # a storm that goes on is cut again
OURS_ABOVE = (
    0.7  # pool usage below which a preemption is not over-admission (a prefix-cache reset counts too)
)


class PreemptionTerm:
    """Falls by one cut per episode of preemptions, recovers by time."""

    def __init__(self) -> None:
        self.value = 1.0
        self._at: float | None = None
        self._cut_at = float("-inf")
        self._last_seen = float("-inf")

    def observe(self, preempted: float, usage_ratio: float | None, now: float) -> bool:
        """``preempted`` more preemptions since the last page; True when over-admission caused them.

        ``usage_ratio`` is the fullest that any rank's pool was seen around then: a preempted request frees
        its blocks, and an average hides the full rank.
        """
        self.recover(now)
        if preempted <= 0:
            return False
        if usage_ratio is not None and usage_ratio < OURS_ABOVE:
            return False
        new_episode = now - self._last_seen > EPISODE_GAP_S or now - self._cut_at > EPISODE_MAX_S
        self._last_seen = now
        if new_episode:
            self._cut_at = now
            self.value = max(self.value * CUT, FLOOR)
        return True

    def recover(self, now: float) -> None:
        """Let time heal."""
        if self._at is not None and self.value < 1.0:
            self.value = min(1.0, self.value * RECOVERY_PER_S ** (now - self._at))
        self._at = now


MEMORY_FLOOR = 0.25
HOLD_S = 10.0  # how long the last reading stands when the cards cannot be read


class MemoryTerm:
    """Free GPU memory against a guard.

    Engines allocate their pool at start, so free memory says nothing of KV use; it shows what else may kill
    the engine: activations, a neighbour. The guard is ``guard_bytes`` or the most that was free since the
    engine's start, whichever is less, per card: just after its start, unless kvctl came later, when a
    neighbour may have been there already.
    """

    def __init__(self, guard_bytes: int) -> None:
        self._guard = guard_bytes
        self._usual: dict[str, int] = {}
        self._read_at = float("-inf")
        self.value = 1.0

    def guard(self, guard_bytes: int) -> None:
        """Use another guard from the next reading on."""
        self._guard = guard_bytes

    def engine_started(self) -> None:
        """The engine started: the next reading shows what it leaves free; until then nothing is known."""
        self._usual.clear()
        self.value = 1.0

    def observe(self, cards: Iterable[GpuSample], now: float) -> None:
        """New readings. Cards without a memory reading are ignored."""
        terms = [self._term(card) for card in cards if not card.lost and card.free_bytes is not None]
        if not terms:
            self.unknown(now)
            return
        self._read_at = now
        self.value = min(terms)

    def unknown(self, now: float) -> None:
        """No card can be read: the last reading stands for a while, then there is no pressure from here."""
        if now - self._read_at > HOLD_S:
            self.value = 1.0

    def _term(self, card: GpuSample) -> float:
        free = card.free_bytes or 0
        usual = self._usual[card.uuid] = max(free, self._usual.get(card.uuid, 0))
        guard = min(self._guard, usual)
        return 1.0 if guard <= 0 else max(min(1.0, free / guard), MEMORY_FLOOR)


SHRINK_PER_POLL = 0.9
REOPEN_PER_TICK = 0.1


class TelemetryTerm:
    """Fresh or late telemetry: holds. Stale: shrinks by a tenth per poll. Back: re-opens step by step."""

    def __init__(self) -> None:
        self.value = 1.0

    def shrink(self, floor: float) -> None:
        """One more poll interval without a usable page; ``floor`` is the fallback's share of the budget."""
        self.value = max(self.value * SHRINK_PER_POLL, min(floor, 1.0), 0.01)

    def reopen(self, taken_ratio: float = 0.0) -> None:
        """One tick with fresh telemetry; ``taken_ratio`` of the whole budget is in flight.

        The step is room for newcomers: a large request that was let in alone takes none of it, or everybody
        small would be refused beside it on a nearly empty engine.
        """
        self.value = min(1.0, max(self.value, taken_ratio) + REOPEN_PER_TICK)

    def outage_over(self) -> None:
        """The engine serves again after it did not: waiting callers must not come in as one wave."""
        self.value = min(self.value, REOPEN_PER_TICK)


RANKS_FROM = 0.1  # usage of the whole engine below which single requests look like imbalance
RANKS_FOLLOW = 0.05  # share of the way to the present imbalance, per page


class RankTerm:
    """How far the fullest rank is ahead of the average, where the gate sees several ranks as one.

    A request lives in one rank, and an engine that chooses the rank itself may choose a full one. So the
    budget counts as spent when, by the pages, the fullest rank is full: the factor is mean usage over fullest
    usage. Its floor is one rank's share (1 / ranks). With one rank it stays 1.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def observe(self, samples: Sequence[RankSample]) -> None:
        """A metrics page."""
        if len(samples) < 2:
            self.value = 1.0
            return
        usage = [s.kv_usage_ratio for s in samples if s.kv_usage_ratio is not None and not s.unsupported]
        if len(usage) < len(samples) or (mean := sum(usage) / len(usage)) < RANKS_FROM:
            return
        self.value += RANKS_FOLLOW * (max(mean / max(usage), 1 / len(usage)) - self.value)
