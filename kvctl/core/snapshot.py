"""What the gate reports of itself, put together from its parts."""

from kvctl.core.acceptance import AcceptRatio, Enforcement
from kvctl.core.budget import Budget
from kvctl.core.decisions import Scales
from kvctl.core.demand import Demand
from kvctl.core.outcomes import EngineState, Limit, Policy
from kvctl.core.retry import RetryHints
from kvctl.core.sentence import tick_sentence
from kvctl.core.status import GateStatus, rank_status
from kvctl.core.supply import Supply
from kvctl.core.tenants import Tenants
from kvctl.core.unseen import EngineWork
from kvctl.core.waiting import WaitingRoom


def limit_shares(
    supply: Supply, demand: Demand, policy: Policy, peak: float, now: float
) -> dict[Limit, float]:
    """The share of each limit that is taken with a forecast peak of ``peak`` KV tokens; at 1 it binds."""
    shares = {Limit.KV_BUDGET: peak / max(supply.budget.tokens, 1)}
    if policy is Policy.FORECAST:
        shares |= demand.guards.shares(demand.ledger, now)
    return shares


Moment = tuple[Budget, EngineState, Policy, bool, int]
"""What an arrival is weighed against: budget, state, policy, whether nothing new is admitted, and leases."""


def scales_of(moment: Moment) -> Scales:
    """A moment, in the form of the records."""
    budget, state, policy, draining, leases = moment
    return Scales(
        state=state,
        policy=policy,
        draining=draining,
        capacity_tokens=budget.capacity,
        budget_tokens=budget.tokens,
        margin_ratio=budget.margin_ratio,
        pressure_ratio=budget.pressure_ratio,
        pressure_term=budget.binding_term,
        leases=leases,
    )


def work_of(supply: Supply, demand: Demand) -> EngineWork:
    """What is known of the engine's work."""
    view = supply.view
    return EngineWork(
        state=supply.state,
        at=view.sampled_at,
        samples=view.samples,
        seconds_per_step=demand.seconds_per_step,
        stall_timeout_s=view.stall_timeout_s,
    )


def status_of(
    supply: Supply,
    demand: Demand,
    now: float,
    *,
    retry: RetryHints,
    room: WaitingRoom,
    tenants: Tenants,
    enforcement: Enforcement,
    accepted: AcceptRatio,
    policy: Policy,
    draining: bool,
) -> GateStatus:
    """Everything worth showing, at ``now``."""
    ledger, peak = demand.ledger, demand.peak(policy) + supply.unattributed
    shares = limit_shares(supply, demand, policy, peak, now)
    return GateStatus(
        at=now,
        state=supply.state,
        policy=policy,
        draining=draining,
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
        forecast_exceeded_ratio=demand.residuals.exceeded_ratio,
        forecast_error_ratio=demand.residuals.error_ratio,
        shared_prefix_tokens=ledger.shared_tokens,
        leases=len(ledger),
        context_tokens=supply.view.info.context_tokens,
        models=supply.view.info.models,
        drain_rate_tokens_per_s=retry.rate(now),
        binding_limit=max(shares, key=lambda limit: shares[limit]),
        enforce_ratio=enforcement.ratio,
        accept_ratio=accepted.ratio,
        queue=room.status(now),
        tenants=tenants.status(now),
        guards=demand.guards.status(now),
        telemetry_age_s=supply.view.age(now),
        ranks=tuple(rank_status(sample, now) for sample in supply.view.samples),
        sentence=tick_sentence(supply.budget, peak, len(ledger), supply.state, draining=draining),
    )
