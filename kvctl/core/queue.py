"""Which requests wait, and which is next.

The head of the queue keeps its place until it starts, leaves, or its deadline passes: its projected start was
made when it became head, and what comes later must not move it. The next head is chosen by class, then by
tenant (least used by weight), then by age. So that a lower class still moves, it comes before a higher one
whenever it has had less than its reserved share of what was started.

Bounded in number and in bytes of the bodies held.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from math import inf

from kvctl.core.case import Case
from kvctl.core.outcomes import LargeRequests, Priority, RejectReason

RESERVED = {Priority.NORMAL: 0.2, Priority.LOW: 0.1}
"""Shares of the KV tokens started that a class keeps while higher ones wait."""
SHARE_MEMORY = 0.95  # weight that past starts keep after one more start
ORDER = tuple(Priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """Seconds and bytes. ``max_wait_s`` 0: nobody waits, large ones under ``reserve`` excepted."""

    max_wait_s: float = 0.0
    max_requests: int = 256
    max_bytes: int = 64 * 1024 * 1024
    large: LargeRequests = LargeRequests.REFUSE
    large_share: float = 0.2
    large_max_wait_s: float = 60.0


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """One waiting request. ``starts_at`` is the projection, None until it is head."""

    case: Case
    large: bool
    since: float
    deadline: float
    reason: RejectReason  # what stood in its way when last judged
    starts_at: float | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.case.event.request_id


@dataclass(slots=True)
class _Line:
    """The requests of one class and tenant, in order of arrival; KV tokens of all and of the large ones."""

    waiters: dict[str, Waiter] = field(default_factory=dict)
    tokens: float = 0.0
    large_tokens: float = 0.0

    def first(self, *, large: bool) -> Waiter | None:
        return next((waiter for waiter in self.waiters.values() if large or not waiter.large), None)


class Queue:
    """All requests that wait for one engine. ``used`` returns a tenant's usage by its weight."""

    def __init__(self, used: Callable[[str, float], float]) -> None:
        self.config = QueueConfig()
        self._used = used
        self.waiters: dict[str, Waiter] = {}  # in order of arrival
        self._lines: dict[tuple[Priority, str], _Line] = {}
        self._soonest = inf  # deadline of anybody, or earlier
        self._started = dict.fromkeys(ORDER, 0.0)
        self.bytes = 0
        self.head: Waiter | None = None

    def __len__(self) -> int:
        return len(self.waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self.waiters.values())

    def has_room(self, body_bytes: int) -> bool:
        """Whether one more fits."""
        config = self.config
        return len(self) < config.max_requests and self.bytes + body_bytes <= config.max_bytes

    def add(self, waiter: Waiter) -> None:
        """One more waits."""
        case = waiter.case
        self.waiters[waiter.id] = waiter
        self.bytes += case.event.body_bytes
        self._soonest = min(self._soonest, waiter.deadline)
        line = self._lines.setdefault((case.priority, case.tenant), _Line())
        line.waiters[waiter.id] = waiter
        line.tokens += case.own
        line.large_tokens += case.own * waiter.large

    def remove(self, request_id: str) -> Waiter | None:
        """Take a request out; None: it did not wait."""
        waiter = self.waiters.pop(request_id, None)
        if waiter is None:
            return None
        case = waiter.case
        self.bytes -= case.event.body_bytes
        if self.head is waiter:
            self.head = None
        line = self._lines[case.priority, case.tenant]
        del line.waiters[request_id]
        line.tokens -= case.own
        line.large_tokens -= case.own * waiter.large
        if not line.waiters:
            del self._lines[case.priority, case.tenant]
        return waiter

    @property
    def tokens(self) -> float:
        """KV tokens of all that wait, each by itself."""
        return sum(line.tokens for line in self._lines.values())

    def overdue(self, now: float) -> list[Waiter]:
        """Those whose deadline has passed."""
        if now < self._soonest:
            return []
        self._soonest = min((waiter.deadline for waiter in self), default=inf)
        return [waiter for waiter in self if waiter.deadline <= now]

    def started(self, waiter: Waiter) -> None:
        """A request was let in: count it for its class."""
        for priority in ORDER:
            self._started[priority] *= SHARE_MEMORY
        self._started[waiter.case.priority] += waiter.case.own

    def waiting(self) -> dict[Priority, int]:
        """How many wait, by class."""
        counts = dict.fromkeys(ORDER, 0)
        for (priority, _), line in self._lines.items():
            counts[priority] += len(line.waiters)
        return counts

    def next(self, now: float, *, large: bool) -> Waiter | None:
        """The next head; ``large`` False: none of the large requests."""
        firsts = [one for line in self._lines.values() if (one := line.first(large=large)) is not None]
        if not firsts:
            return None
        turn = self._class_in_turn({waiter.case.priority for waiter in firsts})
        return min(
            (w for w in firsts if w.case.priority is turn),
            key=lambda w: (self._used(w.case.tenant, now), w.since),
        )

    def tokens_before(self, case: Case, now: float, *, large: bool) -> float:
        """KV tokens of those that would be next before a newcomer; ``large`` False: not of the large ones."""
        own, used = ORDER.index(case.priority), self._used(case.tenant, now)
        head, tokens = self.head, 0.0
        for (priority, tenant), line in self._lines.items():
            place = ORDER.index(priority)
            same = place == own and (tenant == case.tenant or self._used(tenant, now) <= used)
            if place < own or same:
                tokens += line.tokens if large else line.tokens - line.large_tokens
            elif head is not None and head.id in line.waiters and (large or not head.large):
                tokens += head.case.own
        return tokens

    def behind(self, now: float) -> Iterator[Waiter]:
        """All but the head, most urgent first."""
        used = {tenant: self._used(tenant, now) for _, tenant in self._lines}
        ordered = merge(
            *(line.waiters.values() for line in self._lines.values()),
            key=lambda w: (ORDER.index(w.case.priority), used[w.case.tenant], w.since),
        )
        return (waiter for waiter in ordered if waiter is not self.head)

    def _class_in_turn(self, waiting: set[Priority]) -> Priority:
        total = sum(self._started.values())
        for priority in reversed(ORDER):
            reserved = RESERVED.get(priority, 0.0)
            if priority in waiting and total > 0.0 and self._started[priority] < reserved * total:
                return priority
        return min(waiting, key=ORDER.index)


class Reserve:
    """How much of the time the gate may drain for large requests: ``share`` of it, in the long run."""

    def __init__(self) -> None:
        self.share = 0.2
        self._since: float | None = None
        self.next_at = -inf

    @property
    def draining(self) -> bool:
        """Whether others are held back for a large one."""
        return self._since is not None

    def begin(self, now: float) -> None:
        """A large request is head."""
        self._since = now

    def end(self, now: float) -> None:
        """It is no longer head. The next drain must wait until this one was within its share of the time."""
        if self._since is not None:
            self.next_at = now + (now - self._since) * (1.0 / self.share - 1.0)
            self._since = None
