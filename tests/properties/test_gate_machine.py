"""Any legal order of events: laws 1 to 4 hold, and every forecast is the naive one."""

from dataclasses import dataclass, replace
from math import sqrt

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvctl.core.claim import Claim, round_up
from kvctl.core.curves import Z
from kvctl.core.events import (
    Admit,
    Arrived,
    Command,
    ConnectFailed,
    DrainChanged,
    Ended,
    EngineDescribed,
    Event,
    GpuReadFailed,
    GpusRead,
    KnobsChanged,
    LeaseEnded,
    Progressed,
    Reject,
    Scraped,
    ScrapeFailed,
    Ticked,
)
from kvctl.core.gate import Gate
from kvctl.core.outcomes import SERVING, Decision, EndReason, EngineState, Policy, RejectReason, SourceFault
from kvctl.core.status import GateStatus
from kvctl.core.supply import GateConfig
from kvctl.core.survival import STEPS
from kvctl.core.telemetry import EngineInfo, GpuSample, RankSample
from tests.core.conversation import PAGE, shape
from tests.effort import examples

RATIOS = st.none() | st.sampled_from([0.0, 0.1, 0.5, 0.72, 0.9, 1.0])
GROWTH = st.sampled_from([0.0, 0.0, 1.0, 500.0])
FREE = st.none() | st.sampled_from([0, 1 << 28, 600 << 20, 1 << 30, 80 << 30])
CAPACITIES = st.none() | st.sampled_from([0, 4_000, 48_000, 48_000, 48_000])
SECONDS = st.sampled_from([0.0, 0.05, 0.2, 0.2, 1.0, 12.0, 31.0])


@dataclass
class Open:
    """What the model knows of an admitted request. ``shown`` is the output at its last curve."""

    tenant: str
    claim: Claim
    shown: int = 0


class GateMachine(RuleBasedStateMachine):
    """The gate beside a naive model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(GateConfig())
        self.now = 50.0
        self.open: dict[str, Open] = {}
        self.ended: set[str] = set()
        self.asked = 0
        self.policy = Policy.FORECAST
        self.page: tuple[RankSample, ...] = (PAGE,)
        self.context: int | None = None

    def say(self, event: Event) -> list[Command]:
        commands = self.gate.handle(event, self.now)
        answers = [c for c in commands if isinstance(c, Admit | Reject)]
        assert len(answers) == isinstance(event, Arrived)
        ends = [c.record.lease.id for c in commands if isinstance(c, LeaseEnded)]
        assert ends == ([event.request_id] if isinstance(event, Ended) else [])
        return commands

    @property
    def status(self) -> GateStatus:
        return self.gate.status(self.now)

    # --- the outside ----------------------------------------------------------------------------------

    @initialize(seen=st.booleans())
    def begin(self, *, seen: bool) -> None:
        if seen:
            self.described(32_768)
            self.say(Scraped((replace(PAGE, at=self.now),), self.now))

    @rule(
        prompt=st.sampled_from([0, 1, 16, 300, 3000, 20_000, 47_000, 60_000]),
        output=st.none() | st.sampled_from([0, 1, 16, 100, 4096, 40_000]),
        n=st.sampled_from([1, 1, 1, 3]),
        tenant=st.sampled_from(["", "a"]),
        stream=st.booleans(),
        exact=st.booleans(),
    )
    def arrive(
        self, prompt: int, output: int | None, n: int, tenant: str, *, stream: bool, exact: bool
    ) -> None:
        self.asked += 1
        request = shape(prompt, output, n=n, stream=stream, exact=exact, tenant=tenant)
        idle, name = not self.open, f"r{self.asked}"
        *_, verdict = self.say(Arrived(name, request))
        status = self.status  # as it was settled before the decision; only the lease has come on top
        if isinstance(verdict, Admit):
            self.admitted(name, tenant, verdict, status, idle=idle)
        else:
            assert isinstance(verdict, Reject)
            self.refused(verdict, status, idle=idle, exact=exact)

    def admitted(self, name: str, tenant: str, verdict: Admit, status: GateStatus, *, idle: bool) -> None:
        self.open[name] = Open(tenant, verdict.claim)
        assert status.state in SERVING | {EngineState.WEDGED, EngineState.UNREACHABLE}
        assert not status.draining
        own = verdict.forecast_tokens - self.gate._supply.unattributed
        naive = min(self.naive_peak(), self.claimed()) if self.policy is not Policy.STATIC else self.claimed()
        rounding = 1e-6 * naive + 1e-3
        if verdict.bounded:
            assert naive - rounding <= own <= self.claimed() + rounding
        else:
            assert abs(own - naive) <= rounding
        if self.policy is not Policy.NONE and not verdict.alone:
            assert verdict.forecast_tokens <= status.budget_tokens
        if verdict.alone:
            assert idle

    def refused(self, verdict: Reject, status: GateStatus, *, idle: bool, exact: bool) -> None:
        serving = status.state in SERVING and not status.draining
        assert (verdict.decision is Decision.UNAVAILABLE) == (not serving)
        if verdict.decision is Decision.REJECT_NEVER:
            assert exact
            assert verdict.retry_after_s is None
            assert verdict.limit_tokens is not None
            assert verdict.needed_tokens > verdict.limit_tokens
            if verdict.reason is RejectReason.CONTEXT:
                assert verdict.limit_tokens == self.context
            else:
                assert all(s.capacity_tokens and s.capacity_exact for s in self.page)
            return
        assert verdict.retry_after_s is not None
        assert 0.25 <= verdict.retry_after_s <= 60.0
        assert self.policy is not Policy.NONE or not serving
        if verdict.decision is Decision.REJECT_LATER and idle:  # only others' tokens, or a count in doubt
            assert status.capacity_known
            assert status.unattributed_tokens > 0 or not exact

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.sampled_from([0, 1, 8, 300, 9000]))
    def progress(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.say(Progressed(name, tokens))

    @precondition(lambda self: self.ended)
    @rule()
    def late_progress(self) -> None:
        assert self.say(Progressed(min(self.ended), 5)) == []

    @precondition(lambda self: self.open)
    @rule(data=st.data(), reason=st.sampled_from(EndReason), output=st.none() | st.sampled_from([0, 5, 5000]))
    def end(self, data: st.DataObject, reason: EndReason, output: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.say(Ended(name, reason, output_tokens=output))
        del self.open[name]
        self.ended.add(name)

    @rule(usage=RATIOS, generated=GROWTH, preempted=GROWTH, lag=st.sampled_from([0.0, 0.1, 5.0]))
    def scrape(self, usage: float | None, generated: float, preempted: float, lag: float) -> None:
        first = self.page[0]
        self.page = tuple(
            replace(
                sample,
                at=self.now,
                kv_usage_ratio=usage,
                generation_tokens_total=(first.generation_tokens_total or 0.0) + generated,
                preemptions_total=(first.preemptions_total or 0.0) + preempted,
                running=len(self.open),
            )
            for sample in self.page
        )
        self.say(Scraped(self.page, self.now - lag))

    @rule(
        capacity=CAPACITIES,
        exact=st.booleans(),
        ranks=st.sampled_from([1, 1, 2]),
        awake=st.sampled_from([True, True, None, False]),
        counters=st.booleans(),
        block=st.sampled_from([None, 16, 16, 64]),
        foreign=st.sampled_from([None, None, "kv connector"]),
    )
    def another_engine(
        self,
        *,
        capacity: int | None,
        exact: bool,
        ranks: int,
        awake: bool | None,
        counters: bool,
        block: int | None,
        foreign: str | None,
    ) -> None:
        sample = replace(
            PAGE,
            at=self.now,
            capacity_tokens=capacity,
            capacity_exact=exact,
            awake=awake,
            block_size=block,
            unsupported=foreign,
            started_at=self.now if counters else None,
            generation_tokens_total=0.0 if counters else None,
            preemptions_total=0.0 if counters else None,
        )
        self.page = tuple(replace(sample, rank=str(rank)) for rank in range(ranks))
        self.say(Scraped(self.page, self.now))

    @rule(fault=st.sampled_from(SourceFault), times=st.sampled_from([1, 2]))
    def no_page(self, fault: SourceFault, times: int) -> None:
        for _ in range(times):
            self.say(ScrapeFailed(fault))

    @rule()
    def connection_refused(self) -> None:
        self.say(ConnectFailed())

    @rule(context=st.sampled_from([None, 8192, 32_768, 262_144]))
    def described(self, context: int | None) -> None:
        self.context = context
        self.say(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=context)))

    @rule(
        free=st.lists(FREE, max_size=2),
        lost=st.sampled_from([False, False, False, True]),
        errors=st.sampled_from([None, 0, 0, 1]),
    )
    def cards(self, free: list[int | None], errors: int | None, *, lost: bool) -> None:
        read = (
            GpuSample(uuid=f"{i}", at=self.now, free_bytes=b, lost=lost, ecc_uncorrected_total=errors)
            for i, b in enumerate(free)
        )
        self.say(GpusRead(tuple(read)))

    @rule()
    def no_cards(self) -> None:
        self.say(GpuReadFailed(SourceFault.HUNG))

    @rule(margin=st.sampled_from([0.0, 0.05, 0.5]), policy=st.sampled_from([Policy.FORECAST, *Policy]))
    def knobs(self, margin: float, policy: Policy) -> None:
        self.policy = policy
        self.say(KnobsChanged(margin, policy))

    @rule(draining=st.sampled_from([False, False, True]))
    def drain(self, *, draining: bool) -> None:
        self.say(DrainChanged(draining))

    @rule(seconds=SECONDS)
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.say(Ticked())
        for name, known in self.open.items():
            lease = self.gate.ledger.get(name)
            assert lease is not None
            known.shown = lease.output_per_sequence

    # --- the naive model --------------------------------------------------------------------------------

    def claimed(self) -> int:
        return sum(one.claim.tokens for one in self.open.values())

    def naive_peak(self) -> float:
        """Mean and spread of every sequence at every step, as core/forecast.py's head says it."""
        ends, peak, rho = [*STEPS[1:], 1 << 30], 0.0, self.gate._demand.rho
        for t, until, j in zip(STEPS, ends, range(len(STEPS)), strict=True):
            mean = spread = square = most = 0.0
            for one in self.open.values():
                (prompt,), (cap,), n = one.claim.prompts, one.claim.outputs, one.claim.n
                shown = min(one.shown, cap)
                if t >= cap - shown and t:
                    continue
                table = self.gate._demand._survival.table(("tiny", "chat", one.tenant), cap)
                alive = table.ahead(shown).alive[j]
                held = round_up(prompt + min(shown + until, cap), one.claim.block)
                s = sqrt(alive * (1 - alive)) * held
                mean, spread, square = mean + n * alive * held, spread + n * s, square + n * s * s
                most += n * held
            peak = max(peak, min(mean + Z * sqrt((1 - rho) * square + rho * spread * spread), most))
        return peak

    @invariant()
    def the_ledger_is_the_sum_of_what_is_open(self) -> None:
        ledger = self.gate.ledger
        assert {lease.id for lease in ledger} == set(self.open)
        assert ledger.claimed_tokens == self.claimed()
        assert 0 <= ledger.held_tokens() <= max(self.claimed(), 0)
        if not self.open:
            status = self.status
            assert (ledger.claimed_tokens, ledger.held_tokens(), status.leases) == (0, 0, 0)
            assert abs(status.forecast_peak_tokens - self.gate._supply.unattributed) == 0.0

    @invariant()
    def the_budget_is_a_share_of_the_capacity(self) -> None:
        status = self.status
        assert 0 <= status.budget_tokens <= status.capacity_tokens
        assert status.capacity_tokens > 0
        assert all(0.0 < value <= 1.0 for value in status.pressure.values())
        assert 0.0 <= status.unattributed_tokens <= status.capacity_tokens
        assert status.sentence


TestGate = GateMachine.TestCase
TestGate.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
