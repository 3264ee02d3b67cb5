"""The queue by itself: bounds, classes with their reserved shares, tenants in turn, the share of draining."""

from collections import Counter

import pytest

from kvctl.core.case import Case
from kvctl.core.claim import Claim
from kvctl.core.curves import Curve
from kvctl.core.events import Arrived
from kvctl.core.outcomes import Priority, RejectReason
from kvctl.core.projection import height_at, highest_from, steps_until
from kvctl.core.queue import Queue, QueueConfig, Reserve, Waiter
from kvctl.core.sharing import Candidate
from kvctl.core.survival import STEPS
from tests.core.conversation import shape


def waiter(
    name: str, priority: Priority = Priority.NORMAL, *, tenant: str = "", at: float = 0.0, size: int = 100
) -> Waiter:
    asked = Claim(prompts=(size,), outputs=(0,), n=1, block=16, tokens=size, sequences=1)
    curve = Candidate(Curve([float(size)], [0.0], [0.0], [float(size)]), ("m",))
    case = Case(Arrived(name, shape(size, 1), body_bytes=10), asked, ("m",), lambda *_: curve, False)
    case.tenant, case.priority = tenant, priority
    return Waiter(case=case, large=False, since=at, deadline=at + 1.0, reason=RejectReason.KV_BUDGET)


def starts(queue: Queue, count: int) -> list[Waiter]:
    """Who comes next, ``count`` times over."""
    order = []
    for _ in range(count):
        one = queue.next(0.0, large=True)
        assert one is not None
        queue.remove(one.id)
        queue.started(one)
        order.append(one)
    return order


def test_it_is_bounded_in_number_and_in_bytes() -> None:
    queue = Queue(lambda *_: 0.0)
    queue.config = QueueConfig(max_requests=2, max_bytes=25)
    for name in ("a", "b"):
        assert queue.has_room(10)
        queue.add(waiter(name))
    assert not queue.has_room(1)
    queue.remove("a")
    assert (queue.bytes, queue.has_room(15), queue.has_room(16)) == (10, True, False)
    assert queue.remove("a") is None


def test_who_came_first_is_first() -> None:
    queue = Queue(lambda *_: 0.0)
    for at, name in enumerate("abc"):
        queue.add(waiter(name, at=float(at)))
    assert [one.id for one in starts(queue, 3)] == ["a", "b", "c"]


def test_a_higher_class_goes_first_and_a_lower_one_still_moves() -> None:
    queue = Queue(lambda *_: 0.0)
    for n in range(60):
        for priority in Priority:
            queue.add(waiter(f"{priority}{n}", priority, at=float(n)))
    order = starts(queue, 60)
    assert order[0].case.priority is Priority.HIGH
    share = Counter(one.case.priority for one in order)
    assert 36 <= share[Priority.HIGH] <= 48
    assert share[Priority.NORMAL] >= 9
    assert share[Priority.LOW] >= 4


def test_of_a_class_the_tenant_that_used_least_is_next() -> None:
    queue = Queue(lambda tenant, _: {"greedy": 10.0, "modest": 1.0}[tenant])
    queue.add(waiter("g", tenant="greedy", at=0.0))
    queue.add(waiter("m", tenant="modest", at=5.0))
    assert [one.id for one in starts(queue, 2)] == ["m", "g"]


def test_a_newcomer_is_behind_those_who_would_be_next_before_it() -> None:
    queue = Queue(lambda tenant, _: {"greedy": 10.0, "modest": 1.0}[tenant])
    queue.add(waiter("g", tenant="greedy"))
    queue.add(waiter("h", Priority.HIGH, tenant="greedy"))
    queue.add(waiter("m", tenant="modest"))
    ahead = [one.id for one in queue.before(waiter("new", tenant="modest").case, 0.0)]
    assert ahead == ["h", "m"]


def test_draining_takes_its_share_of_the_time_and_no_more() -> None:
    reserve = Reserve()
    reserve.share = 0.25
    reserve.begin(10.0)
    assert reserve.draining
    reserve.end(14.0)
    assert not reserve.draining
    assert reserve.next_at == pytest.approx(14.0 + 12.0)


def test_the_start_is_where_the_curve_has_fallen_far_enough() -> None:
    falling = [1000.0, 800.0, 600.0, 400.0]
    highest = highest_from(Curve(falling, [0.0] * 4, [0.0] * 4, falling))
    assert steps_until(highest, 1000.0) == 0.0
    assert steps_until(highest, 700.0) == pytest.approx((STEPS[1] + STEPS[2]) / 2)
    assert STEPS[3] <= (steps_until(highest, 100.0) or 0.0) <= STEPS[4]
    assert steps_until(highest, -1.0) is None
    assert steps_until([], 0.0) == 0.0
    assert height_at(highest, 0.0) == 1000.0
    assert height_at(highest, STEPS[2]) == pytest.approx(600.0)
    assert height_at(highest, STEPS[9]) == 0.0


def test_what_rises_later_counts_from_the_start() -> None:
    means = [100.0, 900.0, 50.0]
    assert highest_from(Curve(means, [0.0] * 3, [0.0] * 3, means)) == [900.0, 900.0, 50.0]
