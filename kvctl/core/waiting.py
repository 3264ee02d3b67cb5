"""The waiting room: which requests may wait, until when, and which may overtake.

A request waits only where the forecast says that it starts before its deadline: within ``max_wait_s`` and
within the caller's TTFT target. The head's projected start is frozen when it becomes head; others start
before it only where the forecast says that this start does not move (backfill, as batch schedulers do it).

A large request fits only a nearly drained engine. Under ``reserve`` it may wait longer, and while it is head
nobody overtakes it who would still be there at its start: the gate drains for it, at most a share of the
time.
"""

from collections.abc import Callable
from math import inf

from kvctl.core.case import Case, Obstacle
from kvctl.core.curves import total
from kvctl.core.demand import Demand
from kvctl.core.events import Queued
from kvctl.core.outcomes import TENANT_LIMITS, LargeRequests, RejectReason
from kvctl.core.projection import height_at, highest_from, steps_until
from kvctl.core.queue import Queue, QueueConfig, Reserve, Waiter
from kvctl.core.retry import RetryHints
from kvctl.core.status import QueueStatus
from kvctl.core.supply import Supply

LARGE_SHARE = 0.5  # of the budget: a request that holds more by itself is large
LATE_S = 0.1
"""An end is seen at once, but running requests advance only at the next tick."""
Z_START = 0.0
"""Spreads above the mean at which a start is projected. Zero: when few are left, the gate counts what all of
them can hold, not their spread, and most started in half the time that one spread predicted."""
TRIED = 16  # waiting requests behind the head that are tried whenever something has ended
NEARLY_ALONE = 0.25  # of an average lease: if less is expected to be held, probably nobody is left


class WaitingRoom:
    """The queue of one engine, with the forecast by which it is ruled."""

    def __init__(
        self, demand: Demand, supply: Supply, retry: RetryHints, used: Callable[[str, float], float]
    ) -> None:
        self.queue = Queue(used)
        self._demand = demand
        self._supply = supply
        self._retry = retry
        self._reserve = Reserve()
        self._ttft = inf
        self._reserves = False
        self.open = False

    def aim(self, config: QueueConfig, ttft_target_s: float | None) -> None:
        """Use other settings from now on."""
        self.queue.config = config
        self._reserve.share = config.large_share
        self._ttft = inf if ttft_target_s is None else ttft_target_s
        self._reserves = config.large is LargeRequests.RESERVE
        self.open = config.max_wait_s > 0.0 or self._reserves

    def __len__(self) -> int:
        return len(self.queue)

    @property
    def tokens(self) -> float:
        """KV tokens of all that wait, by themselves."""
        return self.queue.tokens

    # --- in -----------------------------------------------------------------------------------------

    def enter(self, case: Case, obstacle: Obstacle, now: float) -> Queued | None:
        """Let it wait; None: it must be refused at once."""
        starts_in = self.foreseen(case, obstacle, now)
        if starts_in is None:
            return None
        large = self._is_large(case)
        self.queue.add(
            Waiter(
                case=case,
                large=large,
                since=now,
                deadline=now + self._longest(large=large),
                reason=obstacle.reason,
            )
        )
        return Queued(case.event.request_id, obstacle.reason, case.priority, starts_in)

    def foreseen(self, case: Case, obstacle: Obstacle, now: float) -> float | None:
        """Seconds until it starts, were it to wait; None: it may not. Nothing is promised by it."""
        if not self.open or obstacle.reason in TENANT_LIMITS:
            return None
        if not self.queue.has_room(case.event.body_bytes):
            return None
        large = self._is_large(case)
        if not large and case.own > self._supply.budget.tokens:
            return None
        starts_in = self._starts_in(case, obstacle, now, large=large)
        return None if starts_in is None or starts_in > self._longest(large=large) else starts_in

    def _is_large(self, case: Case) -> bool:
        return self._reserves and case.own > LARGE_SHARE * self._supply.budget.tokens

    def _longest(self, *, large: bool) -> float:
        """The longest wait, in seconds; a large request has lost its TTFT target anyway."""
        config = self.queue.config
        if large:
            return config.large_max_wait_s
        return min(config.max_wait_s, self._ttft - self._demand.first_token_s)

    def _starts_in(self, case: Case, obstacle: Obstacle, now: float, *, large: bool) -> float | None:
        """Seconds until it starts, behind all that wait; None: not known."""
        ahead = self.queue.tokens_before(case, now, large=large)
        own = self._projected(case, obstacle, ahead, now)
        if own is None:
            return None
        if large:
            own += max(self._reserve.next_at - now, 0.0)
        head = self.queue.head
        if head is not None and head.starts_at is not None and obstacle.reason is RejectReason.QUEUE_AHEAD:
            own = max(own, head.starts_at - now)
        return own

    def _projected(self, case: Case, obstacle: Obstacle, ahead: float, now: float) -> float | None:
        if obstacle.seconds is not None:
            return obstacle.seconds
        if obstacle.sequences is not None:
            rate = self._retry.ends_per_s(now)
            return None if rate is None else (obstacle.sequences + len(self.queue)) / rate
        if case.static:
            rate = self._retry.rate(now)
            return None if rate is None else (obstacle.tokens + ahead) / rate
        steps = steps_until(highest_from(self._demand.in_flight(), Z_START), self._room_beside(case) - ahead)
        return None if steps is None else steps * self._demand.seconds_per_step + LATE_S

    def _room_beside(self, case: Case) -> float:
        """What others may hold when it starts, KV tokens."""
        room = self._supply.budget.tokens - self._supply.unattributed - case.own
        if room > 0.0:
            return room
        leases = self._demand.ledger
        return NEARLY_ALONE * leases.held_tokens() / max(len(leases), 1)

    # --- out ----------------------------------------------------------------------------------------

    def leave(self, request_id: str, now: float) -> Waiter | None:
        """Take a request out, for whatever reason; None: it did not wait."""
        waiter = self.queue.remove(request_id)
        if waiter is not None and self.queue.head is None:
            self._reserve.end(now)
        return waiter

    def start(self, waiter: Waiter, now: float) -> None:
        """It starts now."""
        self.leave(waiter.id, now)
        self.queue.started(waiter)

    def clear(self, now: float) -> list[Waiter]:
        """Take everybody out."""
        everybody = list(self.queue)
        for waiter in everybody:
            self.leave(waiter.id, now)
        return everybody

    def next_to_start(self, judge: Callable[[Case, float], Obstacle | None], now: float) -> Waiter | None:
        """The one that starts now: the head, or one behind it that does not delay the head's start."""
        head = self._seat_head(judge, now)
        if head is None:
            return None
        obstacle = judge(head.case, now)
        if obstacle is None:
            return head
        head.reason = obstacle.reason
        for waiter, _ in zip(self.queue.behind(now), range(TRIED), strict=False):
            if (
                not waiter.large
                and judge(waiter.case, now) is None
                and self.in_the_way(waiter.case, now) is None
            ):
                return waiter
        return None

    def _seat_head(self, judge: Callable[[Case, float], Obstacle | None], now: float) -> Waiter | None:
        """The head, chosen anew where there is none; its projected start is frozen then."""
        if self.queue.head is not None:
            return self.queue.head
        idle = len(self._demand.ledger) == 0
        head = self.queue.next(now, large=idle or now >= self._reserve.next_at)
        if head is None:
            return None
        obstacle = judge(head.case, now)
        projected = 0.0 if obstacle is None else self._projected(head.case, obstacle, 0.0, now)
        head.starts_at = head.deadline if projected is None else now + projected
        self.queue.head = head
        if head.large:
            self._reserve.begin(now)
        return head

    def in_the_way(self, case: Case, now: float) -> Obstacle | None:
        """What keeps a request that fits from overtaking: it would still be there at the head's start."""
        head = self.queue.head
        if head is None or head.starts_at is None or case is head.case:
            return None
        if head.reason in _ITS_OWN:
            return None
        room = self._room_beside(head.case)
        if case.static or head.reason not in _FOR_ROOM:
            return Obstacle(RejectReason.QUEUE_AHEAD, tokens=head.case.own)
        steps = max(head.starts_at - now, 0.0) / self._demand.seconds_per_step
        running, rho = self._demand.in_flight(), self._demand.rho
        before = height_at(highest_from(running, rho=rho), steps)
        after = height_at(highest_from(total([running, case.candidate.adds]), rho=rho), steps)
        if after <= max(room, before):
            return None
        return Obstacle(RejectReason.QUEUE_AHEAD, tokens=head.case.own)

    # --- readings -----------------------------------------------------------------------------------

    def status(self, now: float) -> QueueStatus | None:
        """The status of the queue; None: it is off."""
        if not self.open and not self.queue:
            return None
        queue, head = self.queue, self.queue.head
        return QueueStatus(
            waiting=queue.waiting(),
            bytes=queue.bytes,
            tokens=self.tokens,
            oldest_s=now - next(iter(queue)).since if queue else 0.0,
            head_starts_in_s=None if head is None or head.starts_at is None else head.starts_at - now,
            drains_for_large=self._reserve.draining,
        )


_ITS_OWN = TENANT_LIMITS | {RejectReason.TENANT_SHARE}
"""Reasons by which only its own tenant holds the head back: nobody else need wait for it."""
_FOR_ROOM = frozenset({RejectReason.KV_BUDGET, RejectReason.TOO_LARGE_NOW, RejectReason.QUEUE_AHEAD})
"""Reasons whose end the curve foretells."""
