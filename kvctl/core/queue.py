"""Who waits, and who is next.

The head of the queue keeps its place until it starts, leaves, or its deadline passes: its projected start was
made when it became head, and what comes later must not move it. The next head is chosen by class, then by
tenant (least used by weight), then by age. A lower class is next although a higher one waits whenever it has
had less than its reserved share of what was started, so that it still moves.

Bounded in number and in bytes of the bodies held.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf

from kvctl.core.case import Case
from kvctl.core.outcomes import LargeRequests, Priority, RejectReason

RESERVED = {Priority.NORMAL: 0.2, Priority.LOW: 0.1}
"""Shares of the KV tokens started that a class keeps while higher ones wait."""
SHARE_MEMORY = 0.95  # of what was started before counts after one more start
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
    """One that waits. ``starts_at`` is the projection, None until it is head."""

    case: Case
    large: bool
    since: float
    deadline: float
    reason: RejectReason  # what stood in its way last
    starts_at: float | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.case.event.request_id


class Queue:
    """All that wait for one engine. ``used`` tells what a tenant has used by its weight."""

    def __init__(self, used: Callable[[str, float], float]) -> None:
        self.config = QueueConfig()
        self._used = used
        self.waiters: dict[str, Waiter] = {}  # in order of arrival
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
        self.waiters[waiter.id] = waiter
        self.bytes += waiter.case.event.body_bytes

    def remove(self, request_id: str) -> Waiter | None:
        """It waits no more; None: it did not."""
        waiter = self.waiters.pop(request_id, None)
        if waiter is not None:
            self.bytes -= waiter.case.event.body_bytes
            if self.head is waiter:
                self.head = None
        return waiter

    def started(self, waiter: Waiter) -> None:
        """It was let in: its class had its turn."""
        for priority in ORDER:
            self._started[priority] *= SHARE_MEMORY
        self._started[waiter.case.priority] += waiter.case.own

    def waiting(self) -> dict[Priority, int]:
        """How many wait, by class."""
        counts = dict.fromkeys(ORDER, 0)
        for waiter in self:
            counts[waiter.case.priority] += 1
        return counts

    def next(self, now: float, *, large: bool) -> Waiter | None:
        """Who is to be head; ``large`` False: none of the large ones."""
        able = [waiter for waiter in self if large or not waiter.large]
        if not able:
            return None
        turn = self._class_in_turn({waiter.case.priority for waiter in able})
        return min(
            (w for w in able if w.case.priority is turn),
            key=lambda w: (self._used(w.case.tenant, now), w.since),
        )

    def before(self, case: Case, now: float) -> Iterator[Waiter]:
        """Those that would be next before a newcomer."""
        own, used = ORDER.index(case.priority), self._used(case.tenant, now)
        for waiter in self:
            place = ORDER.index(waiter.case.priority)
            same = waiter.case.tenant == case.tenant or self._used(waiter.case.tenant, now) <= used
            if waiter is self.head or place < own or (place == own and same):
                yield waiter

    def behind(self, now: float) -> Iterable[Waiter]:
        """The rest, most urgent first."""
        rest = [waiter for waiter in self if waiter is not self.head]
        used = {waiter.case.tenant: self._used(waiter.case.tenant, now) for waiter in rest}
        return sorted(rest, key=lambda w: (ORDER.index(w.case.priority), used[w.case.tenant], w.since))

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
        """It is head no more. The next drain has to wait until this one was its share of the time."""
        if self._since is not None:
            self.next_at = now + (now - self._since) * (1.0 / self.share - 1.0)
            self._since = None
