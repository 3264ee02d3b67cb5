"""What the page shows of the moment: gate, ranks, cards, sources, overrides, as rows of a metric.

Law 3: unknown is not zero. What has no value has no row, and what disappeared has none either: every scrape
starts from the snapshots, nothing is remembered here.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvctl.core.outcomes import CapacitySource, EngineState, Limit, Policy, Pressure, Priority
from kvctl.core.overrides import Knob, Override
from kvctl.core.status import GateStatus, RankStatus
from kvctl.core.telemetry import GpuSample
from kvctl.metrics.catalog import CATALOG, MODES
from kvctl.tokens.base import CountMethod
from kvctl.tokens.calibration import Witness
from kvctl.tokens.source import Why

T = TypeVar("T")
Row = tuple[str, tuple[str, ...], float]  # metric, label values, value


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """A source of telemetry. ``read_at`` is monotonic seconds of the last good reading."""

    up: bool
    read_at: float | None = None
    duration_s: float | None = None


class CountingView(Protocol):
    """What the page needs of the token counter."""

    @property
    def waiting(self) -> int:
        """Counts that are queued or under way."""
        ...

    @property
    def doubted(self) -> bool:
        """Whether the local tokenizer counts other than the engine."""
        ...

    @property
    def error_ratio(self) -> float | None:
        """Tokens miscounted over true ones, of late; None: nothing was compared."""
        ...

    @property
    def samples(self) -> Mapping[tuple[Witness, bool], int]:
        """Comparisons with the engine, by who told the true count and whether both agree."""
        ...

    @property
    def characters(self) -> tuple[int, int]:
        """Characters that were tokenised, and that were spared."""
        ...

    @property
    def fallbacks(self) -> Mapping[tuple[CountMethod, Why], int]:
        """How often which method could not, and why."""
        ...


_OF_GATE: Mapping[str, Callable[[GateStatus], float | None]] = {
    "kvctl_budget_tokens": lambda s: s.budget_tokens,
    "kvctl_capacity_tokens": lambda s: s.capacity_tokens,
    "kvctl_capacity_known": lambda s: s.capacity_known,
    "kvctl_headroom_tokens": lambda s: s.headroom_tokens,
    "kvctl_forecast_peak_tokens": lambda s: s.forecast_peak_tokens,
    "kvctl_held_tokens": lambda s: s.held_tokens,
    "kvctl_claimed_tokens": lambda s: s.claimed_tokens,
    "kvctl_forecast_exceeded_ratio": lambda s: s.forecast_exceeded_ratio,
    "kvctl_forecast_error_ratio": lambda s: s.forecast_error_ratio,
    "kvctl_unattributed_tokens": lambda s: s.unattributed_tokens,
    "kvctl_shared_prefix_tokens": lambda s: s.shared_prefix_tokens,
    "kvctl_leases": lambda s: s.leases,
    "kvctl_margin_ratio": lambda s: s.margin_ratio,
    "kvctl_prefill_backlog_tokens": lambda s: s.guards.prefill_backlog_tokens,
    "kvctl_prefill_rate_tokens_per_second": lambda s: s.guards.prefill_rate_tokens_per_s,
    "kvctl_decode_limit_sequences": lambda s: s.guards.decode_limit,
    "kvctl_slot_limit_sequences": lambda s: s.guards.slots,
    "kvctl_drain_rate_tokens_per_second": lambda s: s.drain_rate_tokens_per_s,
    "kvctl_context_tokens": lambda s: s.context_tokens,
    "kvctl_enforce_ratio": lambda s: s.enforce_ratio,
    "kvctl_accept_ratio": lambda s: s.accept_ratio,
    "kvctl_queue_bytes": lambda s: 0 if s.queue is None else s.queue.bytes,
}

_OF_RANK: Mapping[str, Callable[[RankStatus], float | None]] = {
    "kvctl_engine_capacity_tokens": lambda r: r.capacity_tokens,
    "kvctl_engine_kv_usage_ratio": lambda r: r.kv_usage_ratio,
    "kvctl_engine_running": lambda r: r.running,
    "kvctl_engine_waiting": lambda r: r.waiting,
    "kvctl_engine_preemptions_total": lambda r: r.preemptions_total,
}

_OF_CARD: Mapping[str, Callable[[GpuSample], float | None]] = {
    "kvctl_gpu_memory_total_bytes": lambda g: g.total_bytes,
    "kvctl_gpu_memory_free_bytes": lambda g: g.free_bytes,
    "kvctl_gpu_memory_used_bytes": lambda g: g.used_bytes,
    "kvctl_gpu_memory_reserved_bytes": lambda g: g.reserved_bytes,
    "kvctl_gpu_temperature_celsius": lambda g: g.temperature_c,
    "kvctl_gpu_ecc_uncorrected_errors_total": lambda g: g.ecc_uncorrected_total,
    "kvctl_gpu_lost": lambda g: g.lost,
}


def of_engine(engine: str, status: GateStatus) -> Iterator[Row]:
    """Rows of one engine's gate and its ranks."""
    yield from _read(_OF_GATE, status, engine)
    for term in Pressure:
        yield "kvctl_pressure_ratio", (engine, term), status.pressure.get(term, 1.0)
    mode = "draining" if status.draining else "bypass" if status.enforce_ratio == 0.0 else "active"
    yield from _one_of("kvctl_engine_state", status.state, EngineState, engine)
    yield from _one_of("kvctl_capacity_source", status.capacity_source, CapacitySource, engine)
    yield from _one_of("kvctl_binding_limit", status.binding_limit, Limit, engine)
    yield from _one_of("kvctl_policy", status.policy, Policy, engine)
    yield from _one_of("kvctl_mode", mode, MODES, engine)
    for priority in Priority:
        waiting = 0 if status.queue is None else status.queue.waiting[priority]
        yield "kvctl_queue_requests", (engine, priority), float(waiting)
    for tenant in status.tenants:
        yield "kvctl_tenant_in_flight_tokens", (engine, tenant.tenant), tenant.in_flight_tokens
        yield "kvctl_tenant_used_token_seconds", (engine, tenant.tenant), tenant.used_token_seconds
    for rank in status.ranks:
        yield from _read(_OF_RANK, rank, engine, rank.rank)


def of_card(sample: GpuSample) -> Iterator[Row]:
    """Rows of one card."""
    gpu = sample.uuid
    yield from _read(_OF_CARD, sample, gpu)
    yield "kvctl_gpu_info", (gpu, "" if sample.index is None else str(sample.index), sample.name), 1.0
    if sample.throttle_reasons is not None:
        for reason in CATALOG["kvctl_gpu_throttled"].labels["reason"]:
            yield "kvctl_gpu_throttled", (gpu, reason), float(reason in sample.throttle_reasons)


def of_source(source: str, view: SourceView, wall_offset: float) -> Iterator[Row]:
    """Rows of one source; ``wall_offset`` turns monotonic into Unix time."""
    yield "kvctl_telemetry_up", (source,), float(view.up)
    if view.read_at is not None:
        yield "kvctl_telemetry_timestamp_seconds", (source,), view.read_at + wall_offset
    if view.duration_s is not None:
        yield "kvctl_telemetry_read_duration_seconds", (source,), view.duration_s


def of_counting(view: CountingView) -> Iterator[Row]:
    """Rows of the token counter."""
    yield "kvctl_token_count_waiting", (), float(view.waiting)
    yield "kvctl_tokenizer_doubted", (), float(view.doubted)
    if (ratio := view.error_ratio) is not None:
        yield "kvctl_token_count_error_ratio", (), ratio
    for witness in Witness:
        for word, agree in (("equal", True), ("differs", False)):
            number = view.samples.get((witness, agree), 0)
            yield "kvctl_token_count_samples_total", (witness, word), float(number)
    for outcome, characters in zip(("tokenised", "spared"), view.characters, strict=True):
        yield "kvctl_token_count_characters_total", (outcome,), float(characters)
    for method in CountMethod:
        for why in Why:
            count = view.fallbacks.get((method, why), 0)
            yield "kvctl_token_count_fallbacks_total", (method, why), float(count)


def of_overrides(overrides: Iterable[Override]) -> Iterator[Row]:
    """Rows of the overrides in force."""
    expiry = {override.knob: override.expires_wall for override in overrides}
    for knob in Knob:
        yield "kvctl_override_active", (knob,), float(knob in expiry)
        if knob in expiry:
            yield "kvctl_override_expiry_timestamp_seconds", (knob,), expiry[knob]


@dataclass(frozen=True, slots=True)
class ConfigView:
    """How the settings stand. ``certificate_ends``: Unix times by file (``CERTIFICATES``) and engine."""

    revision: int = 1
    reloaded_well: bool = True
    certificate_ends: Mapping[tuple[str, str], float] = field(default_factory=dict)


def of_config(view: ConfigView) -> Iterator[Row]:
    """Rows of the settings' state."""
    yield "kvctl_config_reload_success", (), float(view.reloaded_well)
    yield "kvctl_config_revision", (), float(view.revision)
    for whose, end in view.certificate_ends.items():
        yield "kvctl_tls_certificate_expiry_timestamp_seconds", whose, end


def _read(table: Mapping[str, Callable[[T], float | None]], thing: T, *labels: str) -> Iterator[Row]:
    for name, read in table.items():
        value = read(thing)
        if value is not None and math.isfinite(value):
            yield name, labels, float(value)


def _one_of(name: str, current: str, words: Iterable[str], engine: str) -> Iterator[Row]:
    for word in words:
        yield name, (engine, word), float(word == current)
