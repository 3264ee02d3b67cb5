"""The gate with queue, tenants and shadow beside a naive one: who waits, who is let in, nobody is lost."""

from dataclasses import dataclass, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvctl.core.events import (
    Abandoned,
    Admit,
    Arrived,
    Command,
    DrainChanged,
    Ended,
    EngineDescribed,
    Event,
    LeaseEnded,
    LeftQueue,
    Progressed,
    Queued,
    Reconfigured,
    Reject,
    Scraped,
    ScrapeFailed,
    Ticked,
)
from kvctl.core.gate import Gate
from kvctl.core.outcomes import (
    SERVING,
    TENANT_LIMITS,
    EndReason,
    LargeRequests,
    Policy,
    RejectReason,
    SourceFault,
)
from kvctl.core.queue import QueueConfig
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo
from kvctl.core.tenants import TenantRule
from tests.core.conversation import PAGE, shape
from tests.effort import examples

WAIT_S, LARGE_WAIT_S = 5.0, 20.0
RULES = (
    TenantRule(name="a", weight=2.0, may_prioritise=True),
    TenantRule(name="q", requests_per_minute=4, tokens_in_flight=20_000),
)
QUEUE = QueueConfig(
    max_wait_s=WAIT_S,
    max_requests=6,
    max_bytes=1000,
    large=LargeRequests.RESERVE,
    large_max_wait_s=LARGE_WAIT_S,
)
CONFIG = GateConfig(ttft_target_s=None, queue=QUEUE, tenants=RULES)


@dataclass
class Seen:
    """What the model knows of a request. ``since``: it waits from then on."""

    tenant: str
    body: int
    since: float


class QueueMachine(RuleBasedStateMachine):
    """Every request has one answer, and the gate knows exactly those that the model knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(CONFIG)
        self.config = CONFIG
        self.now = 50.0
        self.open: dict[str, str] = {}
        self.waiting: dict[str, Seen] = {}
        self.let_in: list[tuple[float, str]] = []
        self.asked = 0

    def say(self, event: Event, coming: Seen | None = None) -> list[Command]:
        commands = self.gate.handle(event, self.now)
        if isinstance(event, Ended):
            del self.open[event.request_id]
        status = self.gate.status(self.now)
        for command in commands:
            if isinstance(command, Admit | Reject):
                mine = isinstance(event, Arrived) and command.request_id == event.request_id
                known = coming if mine else self.waiting.pop(command.request_id)
                assert known is not None
                assert (command.waited_s is None) == mine
                if isinstance(command, Admit):
                    self.admitted(command, known)
                else:
                    assert (
                        self.config.enforce_ratio > 0.0 or command.reason is RejectReason.DRAINING or not mine
                    )
                    assert command.retry_after_s is None or 0.25 <= command.retry_after_s <= 60.0
            elif isinstance(command, Queued):
                assert coming is not None
                assert command.reason not in TENANT_LIMITS
                assert 0.0 <= command.starts_in_s <= LARGE_WAIT_S
                self.waiting[command.request_id] = coming
            elif isinstance(command, LeftQueue):
                del self.waiting[command.request_id]
            elif isinstance(command, LeaseEnded):
                assert isinstance(event, Ended)
        if status.draining or status.state not in SERVING:
            assert not self.waiting
        return commands

    def admitted(self, command: Admit, known: Seen) -> None:
        assert command.request_id not in self.open
        self.open[command.request_id] = known.tenant
        if command.shadow is not None:
            return
        self.let_in.append((self.now, known.tenant))
        if self.config.policy is not Policy.NONE and not command.alone:
            assert command.forecast_tokens <= self.gate._supply.budget.tokens + 1e-6
        minute = [at for at, tenant in self.let_in if tenant == "q" and at > self.now - 60.0]
        assert len(minute) <= 4

    @initialize()
    def begin(self) -> None:
        self.say(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=131_072)))
        self.page(0.0)

    @rule(
        prompt=st.sampled_from([1, 300, 3000, 9_000, 20_000, 40_000, 46_500, 60_000]),
        output=st.sampled_from([1, 100, 4096]),
        tenant=st.sampled_from(["", "a", "q", "stranger"]),
        priority=st.sampled_from([-1, 0, 0, 1]),
        body=st.sampled_from([0, 10, 400]),
        stream=st.booleans(),
    )
    def arrive(
        self, prompt: int, output: int, tenant: str, priority: int, body: int, *, stream: bool
    ) -> None:
        self.asked += 1
        name = f"r{self.asked}"
        request = replace(shape(prompt, output, tenant=tenant, stream=stream), priority=priority)
        seen = Seen(tenant if tenant in {"a", "q"} else "default", body, self.now)
        commands = self.say(Arrived(name, request, body_bytes=body), seen)
        own = [c for c in commands if isinstance(c, Admit | Reject | Queued) and c.request_id == name]
        assert len(own) == 1

    @rule(data=st.data(), known=st.booleans())
    def abandon(self, data: st.DataObject, *, known: bool) -> None:
        if known and self.waiting:
            name = data.draw(st.sampled_from(sorted(self.waiting)))
            assert any(isinstance(c, LeftQueue) for c in self.say(Abandoned(name)))
            assert name not in self.waiting
        else:
            assert not any(isinstance(c, LeftQueue) for c in self.say(Abandoned("nobody")))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), reason=st.sampled_from(EndReason), output=st.none() | st.sampled_from([0, 5, 5000]))
    def end(self, data: st.DataObject, reason: EndReason, output: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.say(Ended(name, reason, output_tokens=output))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.sampled_from([1, 300]))
    def progress(self, data: st.DataObject, tokens: int) -> None:
        self.say(Progressed(data.draw(st.sampled_from(sorted(self.open))), tokens))

    @rule(usage=st.sampled_from([0.0, 0.0, 0.9]))
    def page(self, usage: float) -> None:
        self.say(Scraped((replace(PAGE, at=self.now, kv_usage_ratio=usage),), self.now))

    @rule(times=st.sampled_from([1, 3]))
    def outage(self, times: int) -> None:
        for _ in range(times):
            self.say(ScrapeFailed(SourceFault.REFUSED))
        self.page(0.0)

    @rule(lasts=st.sampled_from([False, False, True]))
    def drain(self, *, lasts: bool) -> None:
        self.say(DrainChanged(draining=True))
        if lasts:
            self.arrive(9_000, 100, "a", 0, 0, stream=True)
        self.say(DrainChanged(draining=False))

    @rule(
        count=st.integers(2, 7),
        tenant=st.sampled_from(["", "a", "q"]),
        prompt=st.sampled_from([9_000, 26_000]),
    )
    def burst(self, count: int, tenant: str, prompt: int) -> None:
        for number in range(count):
            self.arrive(prompt, 100, tenant, number % 3 - 1, 10, stream=True)

    @rule(
        policy=st.sampled_from([*[Policy.FORECAST] * 6, *Policy]),
        enforced=st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]),
        wait=st.sampled_from([0.0, WAIT_S, WAIT_S, WAIT_S]),
        rules=st.sampled_from([RULES, RULES, RULES[:1] + RULES[1:]]),
    )
    def reconfigure(
        self, policy: Policy, enforced: float, wait: float, rules: tuple[TenantRule, ...]
    ) -> None:
        queue = replace(QUEUE, max_wait_s=wait)
        self.config = replace(CONFIG, policy=policy, enforce_ratio=enforced, queue=queue, tenants=rules)
        self.say(Reconfigured(self.config))

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.say(Ticked())
        assert all(self.now - one.since < LARGE_WAIT_S for one in self.waiting.values())
        if not self.open and self.gate._supply.unattributed == 0.0:
            assert not [one for one in self.waiting.values() if one.tenant != "q"]

    @invariant()
    def the_gate_knows_whom_the_model_knows(self) -> None:
        queue = self.gate._room.queue
        assert {lease.id for lease in self.gate.ledger} == set(self.open)
        assert set(queue.waiters) == set(self.waiting)
        assert queue.bytes == sum(one.body for one in self.waiting.values()) <= QUEUE.max_bytes
        assert len(queue) <= QUEUE.max_requests
        assert (queue.head is None) or queue.head.id in self.waiting
        for tenant in ("a", "q", "default"):
            if tenant not in self.open.values():
                assert self.gate._tenants.quotas.in_flight(tenant) == 0.0
        if not self.open:
            assert self.gate.ledger.claimed_tokens == 0


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(
    max_examples=examples(80),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
