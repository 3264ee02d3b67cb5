"""What the gate reports of itself: one frozen snapshot, read by metrics, admin API, logs and systemd."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvctl.core.guards import GuardStatus
from kvctl.core.outcomes import BudgetReason, CapacitySource, EngineState, Limit, Policy, Pressure, Priority
from kvctl.core.telemetry import RankSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank as last read. None: unknown."""

    rank: str
    age_s: float
    capacity_tokens: int | None
    capacity_exact: bool
    kv_usage_ratio: float | None
    usage_gauge: str  # the engine's own name of it; "": none on its page
    running: int | None
    waiting: int | None
    preemptions_total: float | None
    absent: Mapping[str, str]
    budget_tokens: int | None = None  # these three where the rank has a gate of its own
    forecast_peak_tokens: float | None = None
    leases: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """The queue now: bytes of the bodies held, KV tokens that each will hold by itself, summed."""

    waiting: Mapping[Priority, int]
    bytes: int
    tokens: float
    oldest_s: float
    head_starts_in_s: float | None  # by the frozen projection; negative: it is late
    drains_for_large: bool  # others are held back for a large request


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStatus:
    """One tenant now, by the name that metrics use. KV tokens."""

    tenant: str
    in_flight_tokens: float
    used_token_seconds: float  # of late, divided by its weight


@dataclass(frozen=True, slots=True, kw_only=True)
class GateStatus:
    """Budget against forecast, claims and usage, in KV tokens, at one moment."""

    at: float
    state: EngineState
    policy: Policy
    draining: bool
    capacity_tokens: int
    capacity_known: bool  # False: capacity_tokens is the plan's figure or the settings' fallback
    capacity_source: CapacitySource
    budget_tokens: int
    budget_reason: BudgetReason
    margin_ratio: float
    pressure: Mapping[Pressure, float]
    forecast_peak_tokens: float
    held_tokens: int
    claimed_tokens: int
    unattributed_tokens: int
    forecast_exceeded_ratio: float | None = None  # share of looks with more held than the forecast's bound
    forecast_error_ratio: float | None = None  # of what was held, relative to the forecast's mean
    shared_prefix_tokens: int  # what the leases save by sharing
    leases: int
    context_tokens: int | None
    models: tuple[str, ...]
    drain_rate_tokens_per_s: float | None
    binding_limit: Limit  # the one of which the largest share is taken
    guards: GuardStatus
    telemetry_age_s: float | None
    ranks: tuple[RankStatus, ...]
    sentence: str
    enforce_ratio: float = 1.0
    accept_ratio: float | None = None  # of the last seconds; None: nobody asked
    queue: QueueStatus | None = None  # None: nobody ever waits
    tenants: tuple[TenantStatus, ...] = ()

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
        usage_gauge=sample.usage_gauge,
        running=sample.running,
        waiting=sample.waiting,
        preemptions_total=sample.preemptions_total,
        absent={name: str(why) for name, why in sample.absent.items()},
    )
