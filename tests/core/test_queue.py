"""The queue by itself: bounds, classes with their reserved shares, tenants in turn, the share of draining."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.case import Case
from kvctl.core.claim import Claim
from kvctl.core.curves import Curve
from kvctl.core.events import Arrived
from kvctl.core.outcomes import Priority, RejectReason
from kvctl.core.projection import height_at, highest_from, steps_until
from kvctl.core.queue import ORDER, Queue, QueueConfig, Reserve, Waiter
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
    new = waiter("new", tenant="modest").case
    queue.add(waiter("g", tenant="greedy", size=1))
    queue.add(waiter("h", Priority.HIGH, tenant="greedy", size=10))
    queue.add(waiter("m", tenant="modest", size=100))
    assert queue.tokens_before(new, 0.0, large=True) == 110.0
    queue.head = queue.waiters["g"]
    assert queue.tokens_before(new, 0.0, large=True) == 111.0


@given(
    st.lists(
        st.tuples(st.sampled_from(ORDER), st.sampled_from("abc"), st.integers(1, 50), st.booleans()),
        max_size=24,
    ),
    st.sets(st.integers(0, 23)),
    st.integers(0, 23),
    st.tuples(st.sampled_from(ORDER), st.sampled_from("abcd")),
)
def test_its_order_is_the_rule_told_one_by_one(
    came: list[tuple[Priority, str, int, bool]], left: set[int], head: int, new: tuple[Priority, str]
) -> None:
    """What is kept by class and tenant says what a look at everybody would."""
    used = {"a": 3.0, "b": 1.0, "c": 1.0, "d": 2.0}
    queue = Queue(lambda tenant, _: used[tenant])
    for at, (priority, tenant, size, large) in enumerate(came):
        one = waiter(str(at), priority, tenant=tenant, at=float(at), size=size)
        one.large = large
        queue.add(one)
    for at in left:
        queue.remove(str(at))
    queue.head = queue.waiters.get(str(head))
    case = waiter("new", new[0], tenant=new[1]).case

    def place(one: Waiter) -> tuple[int, float, float]:
        return ORDER.index(one.case.priority), used[one.case.tenant], one.since

    rest = sorted((one for one in queue if one is not queue.head), key=place)
    assert list(queue.behind(0.0)) == rest
    assert queue.tokens == sum(one.case.own for one in queue)
    for large in (True, False):
        able = [one for one in queue if large or not one.large]
        before = [
            one
            for one in able
            if one is queue.head
            or ORDER.index(one.case.priority) < ORDER.index(new[0])
            or (one.case.priority is new[0] and used[one.case.tenant] <= used[new[1]])
        ]
        assert queue.tokens_before(case, 0.0, large=large) == sum(one.case.own for one in before)
        assert queue.next(0.0, large=large) is (min(able, key=place) if able else None)
    for now in (0.0, 5.5, 40.0):
        assert queue.overdue(now) == [one for one in queue if one.deadline <= now]


def test_thousands_that_wait_are_not_looked_at_one_by_one() -> None:
    looked: list[str] = []

    def used(tenant: str, _: float) -> float:
        looked.append(tenant)
        return 0.0

    queue = Queue(used)
    for n in range(3_000):
        queue.add(waiter(str(n), tenant=f"t{n % 3}", at=float(n)))
    queue.head = queue.next(0.0, large=True)
    first = [one.id for one, _ in zip(queue.behind(0.0), range(16), strict=False)]
    assert first == [str(n) for n in range(1, 17)]
    queue.tokens_before(waiter("new", tenant="t0").case, 0.0, large=True)
    assert len(looked) < 20


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
