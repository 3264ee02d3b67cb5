"""The one place where a decision is made: ``Gate.handle(event, now) -> commands``.

Law 2: check and charge in one step. An arrival is judged and its lease opened within one call.
Law 4: a 400 needs proof (``claim.never_fits``). Law 7: no clock, no IO, no randomness: ``now`` comes in.

Where a request is refused, in order: draining, engine not serving (503); proven never to fit (400); admitted
when the forecast peak with it stays within the budget, or when nothing else runs; else 429 with the time in
which the missing tokens will have drained.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvctl.core import refusals
from kvctl.core.acceptance import AcceptRatio, Enforcement
from kvctl.core.case import Case, Obstacle
from kvctl.core.choice import Offer
from kvctl.core.claim import Limits, Shape, claim, never_fits
from kvctl.core.decisions import Scales
from kvctl.core.demand import NATURAL, Demand
from kvctl.core.events import (
    Abandoned,
    Admit,
    Arrived,
    Command,
    DrainChanged,
    Ended,
    EngineDescribed,
    Event,
    KnobsChanged,
    LeaseEnded,
    LeftQueue,
    Progressed,
    Queued,
    Reconfigured,
    Reject,
    Scraped,
    Ticked,
)
from kvctl.core.guards import Guards
from kvctl.core.ledger import Lease
from kvctl.core.outcomes import SERVING, UNAVAILABLE_OF, Decision, EngineState, Limit, Policy, RejectReason
from kvctl.core.retry import UNKNOWN_S, RetryHints
from kvctl.core.snapshot import Moment, limit_shares, scales_of, status_of, work_of
from kvctl.core.status import GateStatus
from kvctl.core.supply import GateConfig, Supply
from kvctl.core.supply_events import supply_handlers
from kvctl.core.tenants import Tenants
from kvctl.core.unseen import EngineWork
from kvctl.core.waiting import WaitingRoom
from kvctl.core.weighing import bounded, weigh

_STATIC, _FORECAST, _ON_TRIAL = Policy.STATIC, Policy.FORECAST, EngineState.TRIAL  # looked up once


class Gate:
    """Admission for one engine."""

    def __init__(self, config: GateConfig, demand: Callable[[Guards], Demand] = Demand) -> None:
        self._demand = demand(Guards(config.ttft_target_s, config.itl_target_s, config.max_num_seqs))
        self.ledger, self._leases = self._demand.ledger, self._demand.ledger.leases
        self._supply = Supply(config)
        self._policy, self._draining, self._drained_by = config.policy, False, RejectReason.DRAINING
        self._retry = RetryHints(longest_s=config.retry_after_max_s, seed=config.jitter_seed)
        self._tenants = Tenants(config.tenants)
        self._room = WaitingRoom(self._demand, self._supply, self._retry, self._tenants.shares.used)
        self._room.aim(config.queue, config.ttft_target_s)
        self._waiting = self._room.queue.waiters
        self._enforcement = Enforcement(config.enforce_ratio, config.jitter_seed)
        self._accepted = AcceptRatio()
        self._handlers: dict[type, Callable[[Any, float], list[Command]]] = {
            Arrived: self._arrived,
            Abandoned: self._abandoned,
            Progressed: self._progressed,
            Ended: self._ended,
            Ticked: self._ticked,
            Scraped: self._scraped,
            EngineDescribed: self._described,
            KnobsChanged: self._knobs_changed,
            Reconfigured: self._reconfigured,
            DrainChanged: self._drain_changed,
            **supply_handlers(self._supply),
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event at ``now``, monotonic seconds; returns what the outside must do or report."""
        told = self._handlers[type(event)](event, now)
        if self._waiting and type(event) is not Progressed:
            told += self._attend(now)
        return told

    # --- the decision -------------------------------------------------------------------------------

    def _arrived(self, event: Arrived, now: float) -> list[Command]:
        told = self._supply.look(now)
        meant = self._enforcement.ratio >= 1.0 or self._enforcement.meant()
        verdict = self._decide(event, now, may_wait=meant)
        if not meant and isinstance(verdict, Reject) and not self._draining:
            verdict = self._let_by(event, verdict, now)
        self._accepted.count(verdict)
        told.append(verdict)
        return told

    def _decide(self, event: Arrived, now: float, *, may_wait: bool) -> Admit | Reject | Queued:
        if (unavailable := self.unavailable()) is not None:
            return refusals.unavailable(event, unavailable, self._retry)
        limits = self._supply.limits
        if (never := never_fits(event.shape, limits)) is not None:
            return refusals.never(event, never)
        if event.no_place is not None:
            return event.no_place
        case = self._case(event, limits)
        obstacle = self._obstacle(case, now)
        if obstacle is None and self._waiting:
            obstacle = self._room.in_the_way(case, now)
        if obstacle is None:
            return self._admit(case, now)
        self._demand.guards.turned_away(obstacle.reason)
        queued = self._room.enter(case, obstacle, now) if may_wait else None
        if queued is not None and self._tenants.on:
            self._tenants.expected(case, queued.starts_in_s, now)
        return queued or self._refuse(case, obstacle, now)

    def _case(self, event: Arrived, limits: Limits) -> Case:
        shape = event.shape
        asked, key = claim(shape, limits), (shape.model, shape.route, shape.tenant)
        case = Case(event, asked, key, self._demand.curve, self._policy is _STATIC)
        if self._tenants.on:
            case.tenant, case.priority = self._tenants.known(shape.tenant), self._tenants.priority(shape)
        return case

    def _weigh(self, case: Case) -> None:
        """The forecast peak with it, by the curve."""
        weigh(case, self._demand, self._supply, self._policy, may_wait=self._room.open)

    def _obstacle(self, case: Case, now: float, *, exact: bool = False) -> Obstacle | None:
        """What stands in its way: quota, KV budget, a guard, or others' shares; ``exact``: by the curve."""
        over = self._tenants.over_quota(case, now) if self._tenants.on else None
        if over is not None:
            return over
        asked, budget = case.asked, self._supply.budget.tokens
        by_curve = exact or case.static or self._tenants.on or bool(self._waiting)
        if by_curve or not bounded(case, self._demand, self._supply):
            self._weigh(case)
        fits = case.peak <= budget or self._policy is Policy.NONE
        idle = not self._leases
        case.alone = not fits and idle and self._supply.takes_alone(asked, exact=case.event.shape.exact)
        if not (fits or case.alone):
            if case.own > budget:
                return Obstacle(RejectReason.TOO_LARGE_NOW, tokens=float(self.ledger.held_tokens()))
            return Obstacle(RejectReason.KV_BUDGET, tokens=case.peak - budget)
        guards, guarded = self._demand.guards, None
        if self._policy is _FORECAST:
            guarded = guards.refuse(asked, self.ledger, now, case.cached)
        if guarded is not None:
            if case.bounded:  # a refusal tells the peak itself
                self._weigh(case)
            sequences = guarded.sequences if guarded.seconds is None else None
            return Obstacle(guarded.reason, sequences=sequences, seconds=guarded.seconds)
        if not self._tenants.on or idle:
            return None
        peak = self._peak()
        shares = self._shares(peak, now)
        shares.pop(Limit.PREFILL_BACKLOG, None)  # of the moment: a prompt that is taken in is no share of it
        room = peak / max(shares.values()) if peak > 0.0 else budget  # what the limit that binds leaves
        return self._tenants.owed_to_others(case, peak, min(room, budget), now)

    def _admit(self, case: Case, now: float, since: float | None = None) -> Admit:
        """Charge and let in; ``since``: it waited from then on."""
        event, asked, waited = case.event, case.asked, None if since is None else now - since
        lease = Lease(event.request_id, case.key, asked, event.shape.stream, now, case.cached)
        self._demand.open(lease, None if case.bounded else case.candidate, now)
        if lease.cached_tokens:
            self._supply.sharing.expect(lease.cached_tokens)
        if self._tenants.on:
            self._tenants.opened(event.request_id, case.tenant, case.own, now)
        self._retry.admitted()
        if self._supply.state is _ON_TRIAL:
            self._supply.view.tried(now)
        self._supply.view.ledger_busy(busy=True, now=now)
        label = case.tenant and self._tenants.label(case.tenant)
        peak, alone, priority, bound = case.peak, case.alone, case.priority, case.bounded
        return Admit(event.request_id, asked, peak, alone, None, label, waited, priority, bound)

    def _let_by(self, event: Arrived, verdict: Reject, now: float) -> Admit:
        """Shadow mode: let it in all the same, and note what would have been said."""
        case = self._case(event, self._supply.limits)
        case.peak = self._demand.peak_with(case.asked, case.candidate, self._policy)
        return replace(self._admit(case, now), shadow=verdict.reason)

    def _refuse(self, case: Case, obstacle: Obstacle, now: float, since: float | None = None) -> Reject:
        """Refuse it for now; ``since``: it waited from then on."""
        wait_s = refusals.seconds_until_gone(obstacle, self._room.tokens, self._retry, now)
        if self._tenants.on:
            self._tenants.expected(case, wait_s, now)
        refused = refusals.later(case, obstacle, wait_s, self._peak(), self._supply.budget.tokens)
        if not case.tenant and since is None:
            return refused
        label, waited = self._tenants.label(case.tenant), None if since is None else now - since
        return replace(refused, tenant=label, waited_s=waited, priority=case.priority)

    def outlook(self, shape: Shape, now: float) -> Admit | Reject | Queued:
        """As ``offer``, in full. ``retry_after_s`` None: too little has ended of late to say."""
        event, limits = Arrived("", shape), self._supply.limits
        unavailable, never = self.unavailable(), never_fits(shape, limits)
        if unavailable is not None:
            return Reject("", unavailable, needed_tokens=sum(shape.prompts), prompt_tokens=sum(shape.prompts))
        if never is not None:
            return refusals.never(event, never)
        case = self._case(event, limits)
        obstacle = self._obstacle(case, now, exact=True) or (
            self._room.in_the_way(case, now) if self._room else None
        )
        if obstacle is None:
            return Admit("", case.asked, forecast_tokens=case.peak, alone=case.alone)
        if (starts_in_s := self._room.foreseen(case, obstacle, now)) is not None:
            return Queued("", obstacle.reason, case.priority, starts_in_s)
        wait_s = refusals.seconds_at_best(obstacle, self._room.tokens, self._retry, now)
        return refusals.later(case, obstacle, wait_s, self._peak(), self._supply.budget.tokens)

    def offer(self, shape: Shape, now: float) -> Offer:
        """What an arrival of ``shape`` would be told now. Nothing is charged, promised or reported."""
        if self.unavailable() is not None:
            return Offer(decision=Decision.UNAVAILABLE)
        limits = self._supply.limits
        if (never := never_fits(shape, limits)) is not None:
            return Offer(decision=Decision.REJECT_NEVER, headroom=never.limit_tokens)
        case = self._case(Arrived("", shape), limits)
        obstacle = self._obstacle(case, now, exact=True)
        wait_s = refusals.seconds_at_best(obstacle, self._room.tokens, self._retry, now)
        return Offer(
            decision=Decision.ADMIT if obstacle is None else Decision.REJECT_LATER,
            headroom=1.0 - max(self._shares(case.peak, now).values()),
            wait_s=UNKNOWN_S if wait_s is None else wait_s,
            on_trial=self._supply.state is EngineState.TRIAL,
        )

    def unavailable(self) -> RejectReason | None:
        """Why nobody is let in, whatever room there is; None: requests are judged."""
        if self._draining:
            return self._drained_by
        state = self._supply.state
        return None if state in SERVING else UNAVAILABLE_OF[state]

    # --- those that wait ----------------------------------------------------------------------------

    def _attend(self, now: float) -> list[Command]:
        """Start those that may start, refuse those whose time is over, and all if nobody is served."""
        room = self._room
        told: list[Admit | Reject] = []
        unavailable = self.unavailable()
        if unavailable is not None:
            for waiter in room.clear(now):
                refused = refusals.unavailable(waiter.case.event, unavailable, self._retry)
                told.append(replace(refused, waited_s=now - waiter.since, priority=waiter.case.priority))
        while self._waiting and (starts := room.next_to_start(self._obstacle, now)) is not None:
            room.start(starts, now)
            told.append(self._admit(starts.case, now, starts.since))
        for late in room.queue.overdue(now):
            obstacle = self._obstacle(late.case, now) or Obstacle(late.reason, tokens=late.case.own)
            room.leave(late.id, now)
            told.append(
                self._refuse(
                    late.case, replace(obstacle, reason=RejectReason.QUEUE_DEADLINE), now, late.since
                )
            )
        for verdict in told:
            self._accepted.count(verdict)
        return list(told)

    def _abandoned(self, event: Abandoned, now: float) -> list[Command]:
        gone = self._room.leave(event.request_id, now)
        return [] if gone is None else [LeftQueue(event.request_id, gone.case.priority, now - gone.since)]

    # --- leases -------------------------------------------------------------------------------------

    def _progressed(self, event: Progressed, now: float) -> list[Command]:
        lease = self.ledger.get(event.request_id)
        if lease is None:
            return []
        tokens = self._demand.progressed(lease, event.tokens, now)
        self._supply.token_seen(tokens, now)
        return []

    def _ended(self, event: Ended, now: float) -> list[Command]:
        record, fell = self._demand.ended(event, now)
        if self._tenants.quotas.charged:
            self._tenants.ended(event.request_id, record.held_tokens, now)
        self._retry.drained(fell, now)
        if event.reason in NATURAL:
            self._supply.view.answered(now)
        self._supply.view.ledger_busy(busy=bool(self._leases), now=now)
        return [LeaseEnded(record)]

    # --- telemetry, knobs, the tick -----------------------------------------------------------------

    def _scraped(self, event: Scraped, now: float) -> list[Command]:
        moved, told = self._supply.page(event.samples, now, busy=bool(self._leases))
        if moved.restarted:
            self._demand.guards.slots.forget()
        self._demand.page(event.samples, moved.generated, self._supply.usage_ratio(), now)
        self._supply.held(self.ledger.held_tokens(), self.ledger.shared_tokens, now)
        self._supply.reconcile(event.asked_at)
        told += self._supply.doubt_sharing(now)
        self._demand.share(sharing=self._supply.shares_prefixes(now))
        return told + self._supply.settle(now)

    def _described(self, event: EngineDescribed, now: float) -> list[Command]:
        self._demand.guards.slots.told(event.info.max_num_seqs)
        return self._supply.described(event.info, now) + self._supply.settle(now)

    def _knobs_changed(self, event: KnobsChanged, now: float) -> list[Command]:
        self._supply.margin_ratio, self._policy = event.margin_ratio, event.policy
        return self._supply.settle(now)

    def _reconfigured(self, event: Reconfigured, now: float) -> list[Command]:
        config = event.config
        self._policy = config.policy
        self._demand.guards.aim(config.ttft_target_s, config.itl_target_s, config.max_num_seqs)
        self._retry.aim(config.retry_after_max_s)
        self._room.aim(config.queue, config.ttft_target_s)
        self._tenants.obey(config.tenants)
        self._enforcement.ratio = config.enforce_ratio
        return self._supply.reconfigured(config) + self._supply.settle(now)

    def _drain_changed(self, event: DrainChanged, now: float) -> list[Command]:
        self._draining, self._drained_by = event.draining, event.reason
        return self._supply.settle(now)

    def _ticked(self, event: Ticked, now: float) -> list[Command]:  # noqa: ARG002 - one signature
        self._demand.tick(now)
        self._accepted.tick(now)
        self._supply.held(self.ledger.held_tokens(), self.ledger.shared_tokens, now)
        owes = self._demand.engine_owes(looks_empty=self._supply.view.looks_empty())
        self._supply.view.ledger_busy(busy=owes, now=now)
        return self._supply.tick(now, self._peak())

    # --- readings -----------------------------------------------------------------------------------

    def _peak(self) -> float:
        """Forecast peak (policy static: claims) of what is in flight, with what others hold."""
        return self._demand.peak(self._policy) + self._supply.unattributed

    def scales(self) -> Scales:
        """What an arrival is weighed against now."""
        return scales_of(self.moment())

    def moment(self) -> Moment:
        """The same in a raw form, for whoever reads it later."""
        supply = self._supply
        return supply.budget, supply.state, self._policy, self._draining, len(self._leases)

    @property
    def state(self) -> EngineState:
        """The engine's state."""
        return self._supply.state

    @property
    def sharing(self) -> bool:
        """Whether shared prefixes are counted once: only then are prefixes wanted."""
        return self.ledger.sharing

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

    def work(self) -> EngineWork:
        """What is known of the engine's work now."""
        return work_of(self._supply, self._demand)

    def _shares(self, peak: float, now: float) -> dict[Limit, float]:
        return limit_shares(self._supply, self._demand, self._policy, peak, now)

    def status(self, now: float) -> GateStatus:
        """Everything worth showing, at ``now``."""
        return status_of(
            self._supply,
            self._demand,
            now,
            retry=self._retry,
            room=self._room,
            tenants=self._tenants,
            enforcement=self._enforcement,
            accepted=self._accepted,
            policy=self._policy,
            draining=self._draining,
        )
