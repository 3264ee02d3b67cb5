"""The gate with a queue, large requests, tenants, and in shadow mode, as conversations."""

from dataclasses import replace

import pytest

from kvctl.core.claim import Shape
from kvctl.core.events import (
    Abandoned,
    Admit,
    Arrived,
    Command,
    DrainChanged,
    LeftQueue,
    Queued,
    Reconfigured,
    Reject,
)
from kvctl.core.outcomes import EndReason, LargeRequests, Policy, Priority, RejectReason, SourceFault
from kvctl.core.queue import QueueConfig
from kvctl.core.supply import GateConfig
from kvctl.core.tenants import TenantRule
from tests.core.conversation import Conversation, shape

WAITING = GateConfig(
    ttft_target_s=None, itl_target_s=None, queue=QueueConfig(max_wait_s=60.0, max_requests=8)
)
FILLER = shape(9_000, 100)


class Talk(Conversation):
    """A conversation in which some wait."""

    def arrive(self, name: str, request: Shape | None = None, *, body: int = 0) -> Admit | Reject | Queued:
        commands = self.say(Arrived(name, request or shape(), body_bytes=body))
        (own,) = [c for c in commands if isinstance(c, Admit | Reject | Queued) and c.request_id == name]
        return own

    def full(self) -> "Talk":
        """As many as fit of a request that takes a fifth of the pool."""
        count = 0
        while isinstance(self.arrive(f"f{count}", FILLER), Admit):
            count += 1
        self.say(Abandoned(f"f{count}"))
        assert count == 5
        return self

    def decided(self, commands: list[Command]) -> dict[str, Admit | Reject]:
        return {c.request_id: c for c in commands if isinstance(c, Admit | Reject)}

    def over(self, name: str) -> dict[str, Admit | Reject]:
        """A lease's end, and who starts by it."""
        return self.decided(self.end_all(name))

    def end_all(self, name: str) -> list[Command]:
        from kvctl.core.events import Ended  # noqa: PLC0415 - one use

        return self.say(Ended(name, EndReason.FINISHED, output_tokens=50))


def talk(config: GateConfig = WAITING) -> Talk:
    made = Talk(config, context=131_072)
    made.up()
    return made


def test_nobody_waits_unless_it_is_configured() -> None:
    assert isinstance(talk(GateConfig()).full().arrive("x", FILLER), Reject)
    assert talk(GateConfig()).status.queue is None


def test_who_waits_starts_in_the_call_that_makes_room() -> None:
    """Law 2: its lease is charged when the Admit is told."""
    one = talk().full()
    assert isinstance(one.arrive("x", FILLER), Queued)
    assert "x" not in one.gate.ledger
    one.now += 2.0
    (verdict,) = one.over("f0").values()
    assert isinstance(verdict, Admit)
    assert (verdict.request_id, verdict.waited_s) == ("x", 2.0)
    assert "x" in one.gate.ledger


def test_one_whose_start_is_too_far_off_is_refused_at_once() -> None:
    config = replace(WAITING, queue=QueueConfig(max_wait_s=0.3))
    verdict = talk(config).full().arrive("x", FILLER)
    assert isinstance(verdict, Reject)
    assert verdict.reason is RejectReason.KV_BUDGET
    assert verdict.waited_s is None


def test_the_ttft_target_bounds_the_wait_too() -> None:
    assert isinstance(talk(replace(WAITING, ttft_target_s=0.2)).full().arrive("x", FILLER), Reject)


def test_a_deadline_that_passes_is_a_429_with_a_time() -> None:
    one = talk().full()
    one.arrive("x", FILLER)
    one.live(61.0, moving=True)
    verdict = one.decided(one.told)["x"]
    assert isinstance(verdict, Reject)
    assert verdict.reason is RejectReason.QUEUE_DEADLINE
    assert verdict.retry_after_s is not None
    assert 0.25 <= verdict.retry_after_s <= 60.0
    assert verdict.waited_s == pytest.approx(60.0, abs=1.0)


def test_who_leaves_is_out_at_once_and_nothing_was_charged() -> None:
    """Law 1."""
    one = talk().full()
    one.arrive("x", FILLER, body=100)
    held = one.status.held_tokens
    (left,) = one.say(Abandoned("x"))
    assert isinstance(left, LeftQueue)
    assert one.say(Abandoned("x")) == []
    assert one.over("f0") == {}
    assert one.status.queue is not None
    assert one.status.queue.bytes == 0
    assert one.status.held_tokens < held


def test_it_is_bounded_in_number_and_bytes() -> None:
    config = replace(WAITING, queue=QueueConfig(max_wait_s=3600.0, max_requests=2, max_bytes=100))
    one = talk(config).full()
    small = shape(9_000, 10)
    assert isinstance(one.arrive("a", small, body=60), Queued)
    assert isinstance(one.arrive("b", small, body=60), Reject)
    assert isinstance(one.arrive("c", small, body=40), Queued)
    assert isinstance(one.arrive("d", small), Reject)


@pytest.mark.parametrize("how", ["drain", "lost"])
def test_with_nobody_served_nobody_waits(how: str) -> None:
    one = talk().full()
    one.arrive("x", FILLER)
    if how == "drain":
        told = one.say(DrainChanged(draining=True))
    else:
        told = []
        for _ in range(100):
            told += one.tick() + one.no_page(SourceFault.REFUSED)
    verdict = one.decided(told)["x"]
    assert isinstance(verdict, Reject)
    wanted = RejectReason.DRAINING if how == "drain" else RejectReason.ENGINE_UNREACHABLE
    assert verdict.reason is wanted
    assert verdict.retry_after_s is not None


def test_others_pass_the_head_only_where_its_start_does_not_move() -> None:
    one = talk()
    for n in range(4):
        assert isinstance(one.arrive(f"f{n}", FILLER), Admit)
    assert isinstance(one.arrive("head", shape(20_000, 100)), Queued)
    long, short = one.arrive("long", shape(4_000, 4_000)), one.arrive("short", shape(200, 1))
    assert isinstance(long, Queued)
    assert long.reason is RejectReason.QUEUE_AHEAD
    assert isinstance(short, Admit)
    assert list(one.over("f0")) == []
    assert next(iter(one.over("f1"))) == "head"


def test_the_heads_projection_is_frozen() -> None:
    one = talk().full()
    one.arrive("x", FILLER)
    queue = one.status.queue
    assert queue is not None
    first = queue.head_starts_in_s
    one.tick(0.5)
    queue = one.status.queue
    assert first is not None
    assert queue is not None
    assert queue.head_starts_in_s == pytest.approx(first - 0.5)


def test_the_urgent_go_first_where_their_tenant_may_say_so() -> None:
    config = replace(
        WAITING,
        tenants=(TenantRule(name="vip", may_prioritise=True), TenantRule(name="other")),
    )
    one = talk(config)
    filler = replace(FILLER, tenant="vip")
    for n in range(5):
        assert isinstance(one.arrive(f"f{n}", filler), Admit)
    plain = replace(FILLER, tenant="vip")
    assert isinstance(one.arrive("head", plain), Queued)
    assert isinstance(one.arrive("plain", plain), Queued)
    urgent = one.arrive("urgent", replace(plain, priority=-5))
    assert isinstance(urgent, Queued)
    assert urgent.priority is Priority.HIGH
    vain = one.arrive("vain", replace(FILLER, tenant="other", priority=-5))
    assert not isinstance(vain, Queued) or vain.priority is Priority.NORMAL
    started = [name for n in range(5) for name in one.over(f"f{n}")]
    assert started[0] == "vain"  # its tenant has had nothing yet
    assert [name for name in started if name != "vain"][:2] == ["head", "urgent"]


def test_a_large_request_is_refused_unless_the_gate_reserves() -> None:
    large = shape(40_000, 100)
    assert isinstance(talk().full().arrive("x", shape(45_000, 1500)), Reject)
    config = replace(WAITING, queue=QueueConfig(large=LargeRequests.RESERVE))
    one = talk(config).full()
    assert isinstance(one.arrive("small", FILLER), Reject)
    assert isinstance(one.arrive("x", large), Queued)
    assert one.status.queue is not None
    assert one.status.queue.drains_for_large
    assert isinstance(one.arrive("y", shape(5_000, 1_000)), Reject)
    started = [list(one.over(f"f{n}")) for n in range(5)]
    assert started == [[], [], [], [], ["x"]]
    one.end_all("x")
    assert isinstance(one.arrive("z", FILLER), Admit)


def test_after_a_drain_the_next_waits_for_its_share_of_the_time() -> None:
    config = replace(WAITING, queue=QueueConfig(large=LargeRequests.RESERVE, large_share=0.5))
    one = talk(config).full()
    one.arrive("x", shape(40_000, 100))
    one.now += 4.0
    for n in range(5):
        one.end_all(f"f{n}")
    one.end_all("x")
    for n in range(5):
        assert isinstance(one.arrive(f"g{n}", FILLER), Admit)
    assert isinstance(one.arrive("y", shape(40_000, 100)), Queued)
    assert one.status.queue is not None
    assert not one.status.queue.drains_for_large
    one.now += 4.1
    one.tick()
    later = one.status.queue
    assert later is not None
    assert later.drains_for_large


def test_the_static_policy_queues_by_its_own_measure() -> None:
    one = talk(replace(WAITING, policy=Policy.STATIC)).full()
    assert isinstance(one.arrive("x", FILLER), Reject)  # no rate yet: nobody can say when
    for n in range(4):
        one.now += 0.5
        one.end_all(f"f{n}")
    while isinstance(one.arrive(f"g{one.now}", FILLER), Admit):
        one.now += 0.01
    assert len(one.gate._room) == 1


def test_whoever_asks_is_told_that_it_would_wait_and_until_when() -> None:
    one = talk().full()
    seen = one.gate.outlook(FILLER, one.now)
    assert isinstance(seen, Queued)
    assert len(one.gate._room) == 0
    said = one.arrive("x", FILLER)
    assert isinstance(said, Queued)
    assert (seen.reason, seen.starts_in_s) == (said.reason, said.starts_in_s)


def test_whoever_asks_is_told_of_those_before_it() -> None:
    """The room that a queue of one pool takes first, at the rate at which answers end."""
    one = talk().full()
    for n in range(3):
        one.over(f"f{n}")
        one.arrive(f"g{n}", FILLER)
    alone = one.gate.outlook(replace(FILLER, prompts=(30_000,)), one.now)
    for n in range(4):
        one.arrive(f"w{n}", FILLER)
    behind = one.gate.outlook(replace(FILLER, prompts=(30_000,)), one.now)
    assert isinstance(alone, Queued)
    assert isinstance(behind, Reject)
    assert behind.retry_after_s is not None
    assert behind.retry_after_s > 0.0


def test_whoever_asks_while_nothing_has_ended_is_told_no_time() -> None:
    one = talk(GateConfig(ttft_target_s=None, itl_target_s=None)).full()
    seen = one.gate.outlook(FILLER, one.now)
    assert isinstance(seen, Reject)
    assert seen.retry_after_s is None
    assert one.gate.offer(FILLER, one.now).wait_s == 1.0


# --- tenants ----------------------------------------------------------------------------------------


def test_a_quota_is_always_a_429_with_its_time_and_never_queued() -> None:
    config = replace(WAITING, tenants=(TenantRule(name="a", requests_per_minute=1),))
    one = talk(config)
    request = shape(tenant="a")
    assert isinstance(one.arrive("x", request), Admit)
    one.now += 15.0
    verdict = one.arrive("y", request)
    assert isinstance(verdict, Reject)
    assert verdict.reason is RejectReason.TENANT_REQUESTS_PER_MINUTE
    assert verdict.retry_after_s is not None
    assert 40.0 <= verdict.retry_after_s <= 60.0
    assert verdict.tenant == "a"
    assert isinstance(one.arrive("z", shape(tenant="stranger")), Admit)


def test_the_flooder_is_held_back_once_another_wants_its_share() -> None:
    rules = (TenantRule(name="a"), TenantRule(name="b"))
    one = talk(GateConfig(ttft_target_s=None, itl_target_s=None, tenants=rules))
    flood, other = replace(FILLER, tenant="a"), replace(FILLER, tenant="b")
    for n in range(5):
        assert isinstance(one.arrive(f"f{n}", flood), Admit)
    assert isinstance(one.arrive("b0", other), Reject)
    one.end_all("f0")
    verdict = one.arrive("a5", flood)
    assert isinstance(verdict, Reject)
    assert verdict.reason is RejectReason.TENANT_SHARE
    assert isinstance(one.arrive("b1", other), Admit)


# --- shadow -----------------------------------------------------------------------------------------


def test_in_shadow_every_decision_is_told_and_none_enforced() -> None:
    one = talk(GateConfig(enforce_ratio=0.0))
    got = [one.arrive(f"{n}", FILLER) for n in range(9)]
    assert all(isinstance(verdict, Admit) for verdict in got)
    shadows = [verdict.shadow for verdict in got if isinstance(verdict, Admit)]
    assert shadows[:5] == [None] * 5
    assert set(shadows[5:]) == {RejectReason.KV_BUDGET}
    never = one.arrive("never", shape(60_000, 10))
    assert isinstance(never, Admit)
    assert never.shadow is RejectReason.CAPACITY
    assert len(one.gate.ledger) == 10


def test_draining_is_enforced_all_the_same() -> None:
    one = talk(GateConfig(enforce_ratio=0.0))
    one.say(DrainChanged(draining=True))
    assert isinstance(one.arrive("x"), Reject)


def test_a_share_is_enforced_evenly_and_the_same_way_each_time() -> None:
    def refused(ratio: float) -> list[bool]:
        one = talk(GateConfig(enforce_ratio=ratio, max_context=50))
        return [isinstance(one.arrive(f"{n}"), Reject) for n in range(200)]

    for ratio in (0.1, 0.5, 0.9):
        got = refused(ratio)
        assert got == refused(ratio)
        for start in range(0, 200, 40):
            assert abs(sum(got[start : start + 40]) - 40 * ratio) <= 2


def test_what_is_in_force_can_change_while_requests_wait() -> None:
    one = talk().full()
    one.arrive("x", FILLER)
    one.say(Reconfigured(GateConfig(enforce_ratio=0.25)))
    assert one.status.enforce_ratio == 0.25
    assert one.status.queue is not None  # somebody still waits, and still starts
    assert list(one.over("f0")) == ["x"]
    assert one.status.queue is None


def test_routers_can_weigh_by_the_share_that_is_let_in() -> None:
    """E10: a router that takes a 429 for a broken replica can go by the accept ratio instead."""
    one = talk(GateConfig(max_context=5_000))
    assert one.status.accept_ratio is None
    for n in range(4):
        one.arrive(f"{n}", shape(100, 10) if n else FILLER)
    one.tick()
    assert one.status.accept_ratio == 0.75
    for _ in range(150):
        one.tick()
    assert one.status.accept_ratio is None
