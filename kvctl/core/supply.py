"""The supply side of the gate: how many KV tokens may be in flight, from telemetry and knobs.

Every change of the budget is reported with its reason (law 9). What is in flight is the demand side: ledger
and forecast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvctl.core.budget import Budget, Capacity, budget_of, capacity_of, reason_of_change
from kvctl.core.claim import Claim, Limits
from kvctl.core.engine_view import EngineView, Moved, ViewConfig
from kvctl.core.events import BudgetChanged, Command, EngineRestarted, Noted, StateChanged
from kvctl.core.outcomes import SERVING, BudgetReason, CapacitySource, EngineState, Note, Policy, Pressure
from kvctl.core.pressure import MemoryTerm, PreemptionTerm, RankTerm, TelemetryTerm
from kvctl.core.queue import QueueConfig
from kvctl.core.reconcile import DEAD_ZONE, Dating, Reconciler, SharingCheck
from kvctl.core.sentence import budget_sentence, state_sentence
from kvctl.core.telemetry import EngineInfo, GpuSample, RankSample, with_pool
from kvctl.core.tenants import TenantRule

WORTH_TELLING = 0.01  # of capacity: smaller changes of the budget are not reported one by one
NOTED_EVERY_S = 60.0  # at most this often the same remark

_QUALITY = {
    CapacitySource.ENGINE: "uncertain",
    CapacitySource.OPERATOR: "uncertain",
    CapacitySource.PLAN: "estimated by the planner's low end: the engine reports none",
    CapacitySource.FALLBACK: "fallback, the engine reports none",
}
_TERMS = (Pressure.PREEMPTION, Pressure.GPU_MEMORY, Pressure.TELEMETRY, Pressure.RANKS)
_MAYBE_ANOTHER_PROCESS = frozenset({EngineState.STARTING, EngineState.UNREACHABLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """What does not change while the daemon runs, beside the knobs' first values. Seconds, tokens, bytes."""

    margin_ratio: float = 0.05
    policy: Policy = Policy.FORECAST
    fallback_budget_tokens: int = 16384
    capacity_tokens: int | None = None  # the operator's, per rank
    capacity_force: bool = False
    max_context: int | None = None
    clamps_output: bool = True
    gpu_guard_bytes: int = 1 << 30
    poll_interval_s: float = 0.2
    retry_after_max_s: float = 60.0
    jitter_seed: float = 0.0
    ttft_target_s: float | None = 2.0  # None: no prefill guard
    itl_target_s: float | None = 0.1  # None: no decode guard
    max_num_seqs: int | None = None  # None: inferred
    prefix_sharing: bool = True  # count what leases share once, where the engine says that it does
    enforce_ratio: float = 1.0  # share of the requests on which decisions are enforced
    queue: QueueConfig = field(default_factory=QueueConfig)
    tenants: tuple[TenantRule, ...] = ()  # none: they are not told apart
    view: ViewConfig = field(default_factory=ViewConfig)


class Supply:
    """Capacity, margin and pressure of one engine, and the budget that follows."""

    def __init__(self, config: GateConfig) -> None:
        self._config = config
        self.margin_ratio = config.margin_ratio
        self.view = EngineView(config.view)
        self.state = EngineState.STARTING
        self._reconciler = Reconciler()
        self._dating = Dating()
        self.sharing = SharingCheck()
        self._preemption = PreemptionTerm()
        self._memory = MemoryTerm(config.gpu_guard_bytes)
        self._telemetry = TelemetryTerm()
        self._ranks = RankTerm()
        self._shrunk_at = float("-inf")
        self._ignored_at = float("-inf")
        self._fullest_before: float | None = None
        self._planned: int | None = None
        self._last_told: Capacity | None = None
        self.capacity = self._read_capacity()
        self._limits: Limits | None = None  # made anew when something changed
        self._made_of: tuple[float, ...] = ()
        self.budget = self._read_budget()
        self._told = self.budget
        self.reason = BudgetReason.STEADY

    @property
    def unattributed(self) -> float:
        """KV tokens in the pool that no lease explains."""
        return self._reconciler.unattributed

    def reconfigured(self, config: GateConfig) -> list[Command]:
        """Put another configuration in force."""
        self._config, self._limits = config, None
        self.margin_ratio = config.margin_ratio
        self.view.reconfigured(config.view)
        self._memory.guard(config.gpu_guard_bytes)
        return self._capacity_news()

    # --- telemetry ----------------------------------------------------------------------------------

    def page(
        self, samples: tuple[RankSample, ...], now: float, *, busy: bool = True
    ) -> tuple[Moved, list[Command]]:
        """A metrics page: what moved since the last one, and news; ``busy``: there are leases."""
        first = not self.view.samples
        moved = self.view.scraped(samples, now)
        self._dating.page(moved.generated, idle=not busy and self.view.looks_empty())
        self._ranks.observe(samples)
        told: list[Command] = [EngineRestarted(rank) for rank in moved.restarted]
        if moved.restarted:
            self._last_told = None
            self._reconciler.another_pool()
            self.sharing.another_engine()
        if moved.restarted or first:
            self._memory.engine_started()
        told += self._preemption_news(moved.preempted or 0.0, now)
        return moved, told + self._capacity_news()

    def _preemption_news(self, preempted: float, now: float) -> list[Command]:
        """Judge preemptions by the fullest rank of this page and the one before."""
        known = [s.kv_usage_ratio for s in self.view.samples if s.kv_usage_ratio is not None]
        present, before = max(known, default=None), self._fullest_before
        self._fullest_before = present
        fullest = max((u for u in (before, present) if u is not None), default=None)
        ours = self._preemption.observe(preempted, fullest, now)
        if preempted <= 0 or ours or now - self._ignored_at < NOTED_EVERY_S:
            return []
        self._ignored_at = now
        return [Noted(Note.PREEMPTION_IGNORED, "preemptions at low pool usage: not over-admission, ignored")]

    def reconcile(self, asked_at: float) -> None:
        """Compare the last page's usage, asked for at ``asked_at``, with what the ledger held."""
        usage = self.usage_ratio()
        comparable = all(sample.usage_comparable for sample in self.view.samples)
        if usage is not None and comparable and self.capacity.known:
            date = self._dating.date(asked_at)
            self._reconciler.compare(usage * self.capacity.total, self.capacity.total, date)
        else:
            self._reconciler.blind()

    def held(self, tokens: int, saved: int, now: float) -> None:
        """What the ledger holds now, and what sharing saves of it, in KV tokens."""
        self._reconciler.remember(tokens, now, saved)
        self._dating.remember(now)

    def token_seen(self, tokens: float, now: float) -> None:
        """Tokens came through the data plane."""
        self.view.token_seen(tokens, now)
        self._dating.seen_tokens += tokens

    def doubt_sharing(self, now: float) -> list[Command]:
        """After a page was compared: the news, once, if the gauge shows that prefixes are not shared."""
        hits = self.view.samples[0].prefix_hits_total if len(self.view.samples) == 1 else None
        saved = self._reconciler.saved
        if not self.sharing.page(hits, self._reconciler, self.capacity.total, now):
            return []
        self._reconciler.explained(saved)
        text = (
            f"pool usage is {self._reconciler.above:,.0f} KV tokens above what leases explain, and sharing"
            f" was to save {saved:,.0f}: common prefixes are counted for each request from now on"
        )
        return [Noted(Note.SHARING_DOUBTED, text)]

    def shares_prefixes(self, now: float) -> bool:
        """Whether common prefixes count once: caching is on, there is one pool, and the gauge agrees."""
        if not self._config.prefix_sharing or len(self.view.samples) != 1 or self.sharing.doubted(now):
            return False
        return self.view.samples[0].prefix_caching is True

    def described(self, info: EngineInfo, now: float) -> list[Command]:
        """The engine told what it serves."""
        before, self._limits = self.view.info, None
        self.view.described(info, now)
        if before == info:
            return []
        if before.engine and info.engine != before.engine:  # another kind of engine has another pool
            self._last_told = None
            self._reconciler.another_pool()
        names = ", ".join(info.models) or "no model"
        text = f"engine serves {names}, context {info.context_tokens or 'unknown'} tokens"
        return [Noted(Note.ENGINE_DESCRIBED, text), *self._capacity_news()]

    def cards(self, samples: Sequence[GpuSample], now: float, *, named: bool | None = None) -> None:
        """The engine's cards were read; ``named``: they are known to be its own; None: as configured."""
        self.view.cards_read(samples, named=named)
        self._memory.observe(samples, now)

    def planned(self, tokens: int | None) -> list[Command]:
        """The planner's figure for one rank, which counts while neither engine nor operator gives one."""
        self._planned = tokens or None  # a plan of 0 went wrong
        return self._capacity_news()

    def cards_unknown(self, now: float) -> None:
        """The engine's cards cannot be read."""
        self._memory.unknown(now)

    def foreign_tokens(self) -> float:
        """KV tokens of others in the pool by the last page, which hinder a request that would run alone.

        ``unattributed`` falls slowly on purpose, so the page itself bounds it; less than the noise of the
        comparison counts as nothing.
        """
        usage, total = self.usage_ratio(), self.capacity.total
        foreign = self.unattributed if usage is None else min(self.unattributed, usage * total)
        return foreign if foreign > DEAD_ZONE * total else 0.0

    def takes_alone(self, asked: Claim, *, exact: bool) -> bool:
        """Whether a request larger than the budget may run alone, by the capacity, where that is known.

        Sequences that do not fit together run in turn, so only the largest must fit a rank. A request that
        was only bounded is forwarded: the engine decides, where a 429 would repeat for ever.
        """
        capacity = self.capacity
        if not (exact and capacity.known and capacity.exact) or capacity.largest_rank is None:
            return True
        if asked.largest_sequence > capacity.largest_rank:
            return False
        return min(asked.tokens, capacity.total) + self.foreign_tokens() <= capacity.total

    def usage_ratio(self) -> float | None:
        """Pool usage over all ranks, 0..1; None when any rank's is unknown or means something else."""
        used = total = 0.0
        for sample in self.view.samples:
            if sample.kv_usage_ratio is None or sample.unsupported:
                return None
            weight = sample.capacity_tokens or 1
            used += sample.kv_usage_ratio * weight
            total += weight
        return used / total if total else None

    # --- the beat -----------------------------------------------------------------------------------

    def tick(self, now: float, taken_tokens: float = 0.0) -> list[Command]:
        """Time passes: terms recover or shrink, ages turn into states.

        ``taken_tokens`` is the forecast peak of what is in flight.
        """
        self._preemption.recover(now)
        told = self.settle(now)
        self._climb_telemetry_ladder(taken_tokens, now)
        return told + self.settle(now)

    def look(self, now: float) -> list[Command]:
        """Let the state follow the time; the budget changes only with events."""
        return [] if self.view.state(now) is self.state else self.settle(now)

    def settle(self, now: float) -> list[Command]:
        """Let state and budget follow what is known now; returns what changed."""
        told = self._state_news(now)
        before, self.budget = self.budget, self._read_budget()
        if self.budget is before:
            return told
        reason = reason_of_change(before, self.budget)
        if reason is not BudgetReason.STEADY:
            self.reason = reason
        return told + self._budget_news()

    def _state_news(self, now: float) -> list[Command]:
        before, after = self.state, self.view.state(now)
        if after is before:
            return []
        self.state = after
        if after in SERVING and before not in SERVING:
            if before is EngineState.ASLEEP or (before in _MAYBE_ANOTHER_PROCESS and not self._dated()):
                self._memory.engine_started()  # a restart that shows on pages is handled there
            if before is not EngineState.STARTING:
                self._telemetry.outage_over()
        return [StateChanged(before, after, state_sentence(before, after))]

    def _dated(self) -> bool:
        return any(s.started_at is not None for s in self.view.samples)

    def _budget_news(self) -> list[Command]:
        told, present = self._told, self.budget
        step = abs(present.tokens - told.tokens)
        on_purpose = present.margin_ratio != told.margin_ratio or present.capacity != told.capacity
        if not step or not (on_purpose or step > WORTH_TELLING * present.capacity):
            return []
        self._told = present
        why = reason_of_change(told, present)
        return [BudgetChanged(told.tokens, present.tokens, why, budget_sentence(told, present, why))]

    def _capacity_news(self) -> list[Command]:
        before, self.capacity = self.capacity, self._read_capacity()
        self._limits = None
        if before == self.capacity:
            return []
        after = self.capacity
        if after.total != before.total:
            self._reconciler.another_pool()
        quality = "exact" if after.exact else _QUALITY[after.source]
        text = f"capacity is {after.total:,} KV tokens ({quality}), was {before.total:,}"
        unsupported = {s.unsupported for s in self.view.samples if s.unsupported}
        return [
            Noted(Note.CAPACITY, text),
            *(
                Noted(Note.UNSUPPORTED, f"unsupported: {what}; its gauges are not trusted")
                for what in unsupported
            ),
        ]

    def _climb_telemetry_ladder(self, taken_tokens: float, now: float) -> None:
        whole = max(self.capacity.total * (1.0 - self.margin_ratio), 1.0)
        if self.state is EngineState.UP:
            self._telemetry.reopen(taken_tokens / whole)
            return
        blind = self.state in {EngineState.STALE, EngineState.NO_TELEMETRY}
        if blind and now - self._shrunk_at >= self._config.poll_interval_s:
            self._shrunk_at = now
            self._reconciler.blind()
            if self._silent_but_planned():
                self._telemetry.reopen()
                return
            self._telemetry.shrink(self._config.fallback_budget_tokens / whole)

    def _silent_but_planned(self) -> bool:
        """Whether an engine without metrics has a pool known from its description or the plan."""
        sized = self.view.info.rank_capacity_tokens is not None
        planned = self.capacity.source is CapacitySource.PLAN
        return self.state is EngineState.NO_TELEMETRY and (sized or planned)

    # --- readings -----------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """What bounds a single request: the same object while nothing changes."""
        if self._limits is None:
            self._limits = self._read_limits()
        return self._limits

    def _read_limits(self) -> Limits:
        capacity, clamps = self.capacity, self.view.info.clamps_output
        return Limits(
            context=self.view.info.context_tokens,
            max_context=self._config.max_context,
            rank_capacity=capacity.largest_rank,
            capacity_exact=capacity.exact and capacity.known,
            block=capacity.block,
            clamps_output=self._config.clamps_output if clamps is None else clamps,
            unknown_output=self._config.fallback_budget_tokens,
        )

    def _read_capacity(self) -> Capacity:
        """A pool does not change while its process lives: once known, it holds through pages that lack it."""
        fresh = self._told_or_guessed()
        if fresh.source is CapacitySource.ENGINE:
            self._last_told = fresh
        elif fresh.source is not CapacitySource.OPERATOR and self._last_told is not None:
            return replace(self._last_told, exact=False)
        return fresh

    def _told_or_guessed(self) -> Capacity:
        config = self._config
        return capacity_of(
            with_pool(self.view.samples, self.view.info),
            operator=config.capacity_tokens,
            force=config.capacity_force,
            fallback=config.fallback_budget_tokens,
            planned=self._planned,
        )

    def _read_budget(self) -> Budget:
        """The same object as before while nothing changes, since each arrival asks for it."""
        made_of = (
            self.capacity.total,
            self.margin_ratio,
            self._preemption.value,
            self._memory.value,
            self._telemetry.value,
            self._ranks.value,
        )
        if made_of == self._made_of:
            return self.budget
        self._made_of = made_of
        pressure = dict(zip(_TERMS, made_of[2:], strict=True))
        return budget_of(self.capacity.total, self.margin_ratio, pressure)
