"""The one place where a decision is made: ``Gate.handle(event, now) -> commands``.

Law 2: check and charge in one step. An arrival is judged and its lease opened within one call.
Law 4: a 400 needs proof (``claim.never_fits``). Law 7: no clock, no IO, no randomness: ``now`` comes in.

Where a request is refused, in order: draining, engine not serving (503); proven never to fit (400); admitted
when the forecast peak with it stays within the budget, or when nothing else runs; else 429 with the time in
which the missing tokens will have drained.
"""

from collections.abc import Callable
from math import ceil
from typing import Any

from kvctl.core.claim import Claim, NeverFits, claim, never_fits
from kvctl.core.demand import NATURAL, Demand
from kvctl.core.events import (
    Admit,
    Arrived,
    CapacityPlanned,
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
from kvctl.core.forecast import Curve
from kvctl.core.guards import GuardRefusal, Guards
from kvctl.core.ledger import Lease
from kvctl.core.outcomes import SERVING, UNAVAILABLE_OF, EngineState, Limit, Policy, RejectReason
from kvctl.core.retry import RetryHints
from kvctl.core.sentence import tick_sentence
from kvctl.core.status import GateStatus, rank_status
from kvctl.core.supply import GateConfig, Supply
from kvctl.core.survival import Key

UNAVAILABLE_RETRY_S = 2.0


class Gate:
    """Admission for one engine."""

    def __init__(self, config: GateConfig) -> None:
        self._demand = Demand(Guards(config.ttft_target_s, config.itl_target_s, config.max_num_seqs))
        self.ledger = self._demand.ledger
        self._supply = Supply(config)
        self._policy = config.policy
        self._draining = False
        self._retry = RetryHints(longest_s=config.retry_after_max_s, seed=config.jitter_seed)
        self._handlers: dict[type, Callable[[Any, float], list[Command]]] = {
            Arrived: self._arrived,
            Progressed: self._progressed,
            Ended: self._ended,
            Ticked: self._ticked,
            Scraped: self._scraped,
            ScrapeFailed: self._scrape_failed,
            EngineDescribed: self._described,
            ConnectFailed: self._connect_failed,
            GpusRead: self._gpus_read,
            GpuReadFailed: self._gpu_read_failed,
            CapacityPlanned: self._capacity_planned,
            KnobsChanged: self._knobs_changed,
            DrainChanged: self._drain_changed,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event in, at monotonic ``now`` seconds; returns what the outside is to do or to tell."""
        return self._handlers[type(event)](event, now)

    # --- the decision -------------------------------------------------------------------------------

    def _arrived(self, event: Arrived, now: float) -> list[Command]:
        told = self._supply.settle(now)
        unavailable = self._unavailable()
        if unavailable is not None:
            return [*told, self._reject_unavailable(event, unavailable)]
        limits = self._supply.limits()
        never = never_fits(event.shape, limits)
        if never is not None:
            return [*told, _reject_never(event, never)]
        return [*told, self._weigh(event, claim(event.shape, limits), now)]

    def _weigh(self, event: Arrived, asked: Claim, now: float) -> Admit | Reject:
        """Admit and charge, or refuse for now."""
        key = (event.shape.model, event.shape.route, event.shape.tenant)
        candidate = self._demand.curve(asked, key)
        peak = self._demand.peak_with(asked, candidate, self._policy) + self._supply.unattributed
        fits = self._policy is Policy.NONE or peak <= self._supply.budget.tokens
        alone = not fits and self._may_run_alone(asked, exact=event.shape.exact)
        if not (fits or alone):
            return self._reject_later(event, asked, candidate, peak, now)
        guards = self._demand.guards
        guarded = guards.refuse(asked, self.ledger, now) if self._policy is Policy.FORECAST else None
        if guarded is not None:
            return self._reject_guarded(event, asked, candidate, guarded, now)
        self._charge(event, asked, key, candidate, now)
        return Admit(event.request_id, asked, forecast_tokens=peak, alone=alone)

    def _charge(self, event: Arrived, asked: Claim, key: Key, candidate: Curve, now: float) -> None:
        stream = event.shape.stream
        lease = Lease(id=event.request_id, key=key, claim=asked, streaming=stream, admitted_at=now)
        self._demand.open(lease, candidate, now)
        self._retry.admitted()
        if self._supply.state is EngineState.TRIAL:
            self._supply.view.tried(now)
        self._supply.view.ledger_busy(busy=True, now=now)

    def _may_run_alone(self, asked: Claim, *, exact: bool) -> bool:
        """Larger than the budget, but nothing else runs: judged against capacity, where that is known.

        Sequences that do not fit together run in turn, so the largest is what must fit a rank. What was only
        bounded is forwarded: the engine will say, where a 429 would come back for ever.
        """
        if len(self.ledger) > 0:
            return False
        capacity = self._supply.capacity
        if not (exact and capacity.known and capacity.exact) or capacity.largest_rank is None:
            return True
        if asked.largest_sequence > capacity.largest_rank:
            return False
        return min(asked.tokens, capacity.total) + self._supply.foreign_tokens() <= capacity.total

    def _unavailable(self) -> RejectReason | None:
        if self._draining:
            return RejectReason.DRAINING
        state = self._supply.state
        return None if state in SERVING else UNAVAILABLE_OF[state]

    def _reject_unavailable(self, event: Arrived, reason: RejectReason) -> Reject:
        prompt = sum(event.shape.prompts)
        retry = self._retry.spread(UNAVAILABLE_RETRY_S)
        return Reject(
            event.request_id, reason, needed_tokens=prompt, prompt_tokens=prompt, retry_after_s=retry
        )

    def _reject_later(
        self, event: Arrived, asked: Claim, candidate: Curve, peak: float, now: float
    ) -> Reject:
        """It does not fit the KV budget now."""
        own = asked.tokens if self._policy is Policy.STATIC else min(candidate.peak(), asked.tokens)
        too_large = own > self._supply.budget.tokens
        missing = float(self.ledger.held_tokens()) if too_large else peak - self._supply.budget.tokens
        reason = RejectReason.TOO_LARGE_NOW if too_large else RejectReason.KV_BUDGET
        wait = self._retry.after(missing, self._retry.rate(now), now)
        return self._reject_now(event, reason, own, wait, asked, peak)

    def _reject_guarded(
        self, event: Arrived, asked: Claim, candidate: Curve, refusal: GuardRefusal, now: float
    ) -> Reject:
        """It fits the KV budget, and another limit binds."""
        rate = 1.0 if refusal.seconds is not None else self._retry.ends_per_s(now)
        missing = refusal.seconds if refusal.seconds is not None else refusal.sequences
        own = min(candidate.peak(), asked.tokens)
        return self._reject_now(event, refusal.reason, own, self._retry.after(missing, rate, now))

    def _reject_now(self, event: Arrived, reason: RejectReason, own: float, wait_s: float) -> Reject:
        budget = self._supply.budget.tokens
        return Reject(
            event.request_id,
            reason,
            needed_tokens=ceil(own),
            prompt_tokens=sum(event.shape.prompts),
            headroom_tokens=max(int(budget - self._peak()), 0),
            limit_tokens=budget,
            retry_after_s=wait_s,
        )

    # --- leases -------------------------------------------------------------------------------------

    def _progressed(self, event: Progressed, now: float) -> list[Command]:
        lease = self.ledger.get(event.request_id)
        if lease is None:
            return []
        tokens = self._demand.progressed(lease, event.tokens, now)
        self._supply.view.token_seen(tokens, now)
        return []

    def _ended(self, event: Ended, now: float) -> list[Command]:
        record, fell = self._demand.ended(event, now)
        self._retry.drained(fell, now)
        if event.reason in NATURAL:
            self._supply.view.answered(now)
        self._supply.view.ledger_busy(busy=len(self.ledger) > 0, now=now)
        return [LeaseEnded(record)]

    # --- telemetry, knobs, the tick -----------------------------------------------------------------

    def _scraped(self, event: Scraped, now: float) -> list[Command]:
        moved, told = self._supply.page(event.samples, now)
        if moved.restarted:
            self._demand.guards.slots.forget()
        self._demand.page(event.samples, moved.generated, self._supply.usage_ratio(), now)
        self._supply.held(self.ledger.held_tokens(), now)
        self._supply.reconcile(event.asked_at)
        return told + self._supply.settle(now)

    def _scrape_failed(self, event: ScrapeFailed, now: float) -> list[Command]:
        self._supply.view.scrape_failed(event.fault, now)
        return self._supply.settle(now)

    def _described(self, event: EngineDescribed, now: float) -> list[Command]:
        return self._supply.described(event.info, now) + self._supply.settle(now)

    def _connect_failed(self, event: ConnectFailed, now: float) -> list[Command]:  # noqa: ARG002 - one signature
        self._supply.view.connect_failed()
        return self._supply.settle(now)

    def _gpus_read(self, event: GpusRead, now: float) -> list[Command]:
        self._supply.cards(event.samples, now)
        return self._supply.settle(now)

    def _gpu_read_failed(self, event: GpuReadFailed, now: float) -> list[Command]:  # noqa: ARG002 - one signature
        self._supply.cards_unknown(now)
        return self._supply.settle(now)

    def _capacity_planned(self, event: CapacityPlanned, now: float) -> list[Command]:
        return self._supply.planned(event.tokens) + self._supply.settle(now)

    def _knobs_changed(self, event: KnobsChanged, now: float) -> list[Command]:
        self._supply.margin_ratio, self._policy = event.margin_ratio, event.policy
        return self._supply.settle(now)

    def _drain_changed(self, event: DrainChanged, now: float) -> list[Command]:
        self._draining = event.draining
        return self._supply.settle(now)

    def _ticked(self, event: Ticked, now: float) -> list[Command]:  # noqa: ARG002 - one signature
        self._demand.tick(now)
        self._supply.held(self.ledger.held_tokens(), now)
        owes = self._demand.engine_owes(looks_empty=self._supply.view.looks_empty())
        self._supply.view.ledger_busy(busy=owes, now=now)
        return self._supply.tick(now)

    # --- readings -----------------------------------------------------------------------------------

    def _peak(self) -> float:
        """Forecast peak (policy static: claims) of what is in flight, with what others hold."""
        return self._demand.peak(self._policy) + self._supply.unattributed

    @property
    def state(self) -> EngineState:
        """What is believed of the engine."""
        return self._supply.state

    @property
    def draining(self) -> bool:
        """Whether nothing new is admitted."""
        return self._draining

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that the engine serves."""
        return self._supply.view.info.models

    @property
    def context_tokens(self) -> int | None:
        """The engine's context length, None while it is not known."""
        return self._supply.view.info.context_tokens

    def _binding_limit(self, peak: float, now: float) -> Limit:
        shares = {Limit.KV_BUDGET: peak / max(self._supply.budget.tokens, 1)}
        if self._policy is Policy.FORECAST:
            shares |= self._demand.guards.shares(self.ledger, now)
        return max(shares, key=lambda limit: shares[limit])

    def status(self, now: float) -> GateStatus:
        """Everything worth showing, at ``now``."""
        supply, ledger, peak = self._supply, self.ledger, self._peak()
        return GateStatus(
            at=now,
            state=supply.state,
            policy=self._policy,
            draining=self._draining,
            capacity_tokens=supply.capacity.total,
            capacity_known=supply.capacity.known,
            capacity_source=supply.capacity.source,
            budget_tokens=supply.budget.tokens,
            budget_reason=supply.reason,
            margin_ratio=supply.margin_ratio,
            pressure=supply.budget.pressure,
            forecast_peak_tokens=peak,
            held_tokens=ledger.held_tokens(),
            claimed_tokens=ledger.claimed_tokens,
            unattributed_tokens=int(supply.unattributed),
            leases=len(ledger),
            context_tokens=supply.view.info.context_tokens,
            models=supply.view.info.models,
            drain_rate_tokens_per_s=self._retry.rate(now),
            binding_limit=self._binding_limit(peak, now),
            guards=self._demand.guards.status(now),
            telemetry_age_s=supply.view.age(now),
            ranks=tuple(rank_status(sample, now) for sample in supply.view.samples),
            sentence=tick_sentence(supply.budget, peak, len(ledger), supply.state, draining=self._draining),
        )


def _reject_never(event: Arrived, proof: NeverFits) -> Reject:
    return Reject(
        event.request_id,
        proof.reason,
        needed_tokens=proof.needed_tokens,
        prompt_tokens=proof.prompt_tokens,
        limit_tokens=proof.limit_tokens,
        largest_output=proof.largest_output,
    )
