"""What the gate shows of itself: one frozen snapshot, read by metrics, admin API, logs and systemd."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvctl.core.guards import GuardStatus
from kvctl.core.outcomes import BudgetReason, CapacitySource, EngineState, Limit, Policy, Pressure
from kvctl.core.telemetry import RankSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank as last read. None: unknown."""

    rank: str
    age_s: float
    capacity_tokens: int | None
    capacity_exact: bool
    kv_usage_ratio: float | None
    running: int | None
    waiting: int | None
    preemptions_total: float | None
    absent: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateStatus:
    """Budget against forecast, claims and usage, in KV tokens, at one moment."""

    at: float
    state: EngineState
    policy: Policy
    draining: bool
    capacity_tokens: int
    capacity_known: bool  # False: capacity_tokens is the plan's or the fallback of the settings
    capacity_source: CapacitySource
    budget_tokens: int
    budget_reason: BudgetReason
    margin_ratio: float
    pressure: Mapping[Pressure, float]
    forecast_peak_tokens: float
    held_tokens: int
    claimed_tokens: int
    unattributed_tokens: int
    leases: int
    context_tokens: int | None
    models: tuple[str, ...]
    drain_rate_tokens_per_s: float | None
    binding_limit: Limit  # the one that is nearest to its end
    guards: GuardStatus
    telemetry_age_s: float | None
    ranks: tuple[RankStatus, ...]
    sentence: str

    @property
    def headroom_tokens(self) -> int:
        """What the forecast leaves of the budget; negative when the budget fell below it."""
        return int(self.budget_tokens - self.forecast_peak_tokens)


def rank_status(sample: RankSample, now: float) -> RankStatus:
    """The part of a sample that is shown."""
    return RankStatus(
        rank=sample.rank,
        age_s=now - sample.at,
        capacity_tokens=sample.capacity_tokens,
        capacity_exact=sample.capacity_exact,
        kv_usage_ratio=sample.kv_usage_ratio,
        running=sample.running,
        waiting=sample.waiting,
        preemptions_total=sample.preemptions_total,
        absent={name: str(why) for name, why in sample.absent.items()},
    )
