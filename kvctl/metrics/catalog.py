"""Every metric that kvctl exports, once: name, kind, meaning, labels with their values, buckets.

The page, docs/metrics.md and the dashboards are made from this table, so a name that is not here is
nowhere. Names begin with ``kvctl_``, units are base units, counters end in ``_total``, shares are ratios.
Law 9: label values are the words of kvctl.core.outcomes wherever there is one, and each is present from
the start, at 0. Only ``engine``, ``rank``, ``gpu``, ``route`` and ``tenant`` take values that the site
decides.
"""

from collections.abc import Mapping

from kvctl.core.outcomes import (
    AFTERWARDS,
    BudgetReason,
    CapacitySource,
    ChoiceReason,
    Decision,
    EndReason,
    EngineState,
    Limit,
    Policy,
    Pressure,
    Priority,
    ProxyFault,
    RejectReason,
    SourceFault,
)
from kvctl.core.overrides import Knob
from kvctl.gpu.faults import EventKind
from kvctl.gpu.readings import THROTTLE_OTHER, THROTTLE_WORDS
from kvctl.metrics.spec import (
    GAP_SECONDS,
    LATENCY_SECONDS,
    LEASE_SECONDS,
    OPEN,
    OWN_SECONDS,
    RATIO,
    RETRY_SECONDS,
    TOKENS,
    Kind,
    Spec,
    counter,
    gauge,
    histogram,
)
from kvctl.tokens.base import CountMethod
from kvctl.tokens.calibration import Witness
from kvctl.tokens.source import Why

__all__ = [
    "CARD_FAULTS", "CATALOG", "DIRECTIONS", "DISCONNECT_PHASES", "MODES", "OPEN", "OTHER", "OUTCOMES",
    "SECTIONS", "SOURCES", "UPSTREAM_ERRORS", "Kind", "Spec",
]  # fmt: skip

OTHER = "other"

SOURCES = ("nvml", "engine_metrics")
CARD_FAULTS = (
    SourceFault.LIBRARY_MISSING, SourceFault.DRIVER_MISMATCH, SourceFault.NO_PERMISSION,
    SourceFault.NO_DEVICE, SourceFault.HUNG, SourceFault.CRASHED, SourceFault.RELEASED, SourceFault.FAILED,
)  # fmt: skip
CERTIFICATES = ("listen", "client_ca", "engine_client", "engine_ca")
MODES = ("active", "draining", "bypass")
OUTCOMES = (
    *(reason for reason in EndReason if reason not in AFTERWARDS),
    Decision.REJECT_LATER,
    Decision.REJECT_NEVER,
    Decision.UNAVAILABLE,
    "bad_request",  # refused by kvctl before it was counted: not a request of this API
    "not_found",  # no such route, or not with this method
    "passed",  # relayed without metering
    OTHER,
)
UPSTREAM_ERRORS = ("connect", "broken", "timeout", "status", OTHER)
DISCONNECT_PHASES = ("request", "waiting", "streaming", OTHER)
DIRECTIONS = ("up", "down")

_ENGINE = {"engine": OPEN}
_RANK = {"engine": OPEN, "rank": OPEN}
_GPU = {"gpu": OPEN}


_BUDGET = (
    gauge(
        "kvctl_budget_tokens",
        "KV tokens that may be in flight: capacity x (1 - margin) x pressure.",
        _ENGINE,
    ),
    gauge(
        "kvctl_capacity_tokens",
        "Usable KV tokens of all ranks; a guess while kvctl_capacity_known is 0.",
        _ENGINE,
    ),
    gauge(
        "kvctl_capacity_known",
        "1 if the engine or the operator gave the capacity, 0 if it is the plan's or the fallback.",
        _ENGINE,
    ),
    gauge(
        "kvctl_capacity_source",
        "1 for the source of the capacity in force, 0 for the others.",
        {**_ENGINE, "source": tuple(CapacitySource)},
    ),
    gauge(
        "kvctl_headroom_tokens",
        "Budget less forecast peak; negative after the budget has fallen below what runs.",
        _ENGINE,
    ),
    gauge("kvctl_forecast_peak_tokens", "Highest KV occupancy expected of what is in flight.", _ENGINE),
    gauge("kvctl_held_tokens", "KV tokens that the leases hold now, by the ledger.", _ENGINE),
    gauge("kvctl_claimed_tokens", "Worst-case KV tokens of the leases.", _ENGINE),
    gauge(
        "kvctl_forecast_exceeded_ratio",
        "Share of comparisons in which leases held more than the bound forecast 64 decode steps before.",
        _ENGINE,
    ),
    gauge(
        "kvctl_forecast_error_ratio",
        "How far leases held more (negative: less) than the mean forecast 64 decode steps before.",
        _ENGINE,
    ),
    gauge(
        "kvctl_unattributed_tokens",
        "KV tokens in use on the engine that no lease explains: traffic past the gate.",
        _ENGINE,
    ),
    gauge(
        "kvctl_shared_prefix_tokens",
        "KV tokens that the leases save by sharing prefixes, which are counted once.",
        _ENGINE,
    ),
    gauge("kvctl_leases", "Requests admitted and not ended.", _ENGINE),
    gauge("kvctl_margin_ratio", "Share of capacity that on-call keeps free.", _ENGINE),
    gauge(
        "kvctl_pressure_ratio",
        "Factor that each term puts on the budget; only the least applies.",
        {**_ENGINE, "term": tuple(Pressure)},
    ),
    gauge(
        "kvctl_binding_limit",
        "1 for the limit of which the largest share is taken, 0 for the others.",
        {**_ENGINE, "limit": tuple(Limit)},
    ),
    gauge("kvctl_prefill_backlog_tokens", "Prompt tokens of requests without a first token.", _ENGINE),
    gauge(
        "kvctl_prefill_rate_tokens_per_second",
        "Prompt tokens that a busy engine computes per second; absent until known.",
        _ENGINE,
    ),
    gauge(
        "kvctl_decode_limit_sequences",
        "Sequences that may decode at once for the inter-token target; absent while there is no limit.",
        _ENGINE,
    ),
    gauge(
        "kvctl_slot_limit_sequences",
        "Sequences that the engine runs at once, set or inferred; absent until known.",
        _ENGINE,
    ),
    gauge(
        "kvctl_drain_rate_tokens_per_second",
        "KV tokens that ending leases free per second; absent until known.",
        _ENGINE,
    ),
    gauge("kvctl_context_tokens", "The engine's context length; absent until known.", _ENGINE),
    counter(
        "kvctl_budget_changes_total",
        "Changes of the budget by more than a hundredth of capacity, or because capacity or margin changed.",
        {**_ENGINE, "direction": DIRECTIONS, "reason": tuple(BudgetReason)},
    ),
)

_ADMISSION = (
    counter("kvctl_requests_total", "Requests answered, by outcome.", {"route": OPEN, "outcome": OUTCOMES}),
    counter("kvctl_admissions_total", "Requests that the gate let in.", _ENGINE),
    counter(
        "kvctl_choices_total",
        "Requests sent to this engine where there are several, by why to this one.",
        {**_ENGINE, "reason": tuple(ChoiceReason)},
    ),
    counter(
        "kvctl_rejections_total",
        "Requests that the gate refused, by reason.",
        {**_ENGINE, "reason": tuple(RejectReason)},
    ),
    counter(
        "kvctl_shadow_rejections_total",
        "Requests let in that would have been refused if the decision had been enforced, by reason.",
        {**_ENGINE, "reason": tuple(RejectReason)},
    ),
    gauge("kvctl_enforce_ratio", "Share of the requests on which decisions are enforced.", _ENGINE),
    gauge(
        "kvctl_accept_ratio",
        "Share of the last seconds' requests that were let in; absent while nobody asked.",
        _ENGINE,
    ),
    counter(
        "kvctl_queued_total",
        "Requests that began to wait, by what stood in their way.",
        {**_ENGINE, "reason": tuple(RejectReason)},
    ),
    gauge("kvctl_queue_requests", "Requests that wait.", {**_ENGINE, "priority": tuple(Priority)}),
    gauge("kvctl_queue_bytes", "Bytes of bodies held for requests that wait.", _ENGINE),
    histogram(
        "kvctl_queue_wait_seconds",
        "Time in the queue, whatever became of the request.",
        LATENCY_SECONDS,
        {**_ENGINE, "priority": tuple(Priority)},
    ),
    counter(
        "kvctl_tenant_decisions_total",
        "Decisions by tenant: the first twenty of the settings by name, the rest as other.",
        {**_ENGINE, "tenant": OPEN, "decision": (Decision.ADMIT, Decision.REJECT_LATER)},
    ),
    gauge(
        "kvctl_tenant_in_flight_tokens",
        "KV tokens charged for the tenant's requests in flight.",
        {**_ENGINE, "tenant": OPEN},
    ),
    gauge(
        "kvctl_tenant_used_token_seconds",
        "KV tokens x seconds that the tenant used of late, divided by its weight.",
        {**_ENGINE, "tenant": OPEN},
    ),
    counter(
        "kvctl_leases_ended_total", "Leases that ended, by how.", {**_ENGINE, "reason": tuple(EndReason)}
    ),
    histogram("kvctl_retry_after_seconds", "Retry-After told with refusals.", RETRY_SECONDS, _ENGINE),
    histogram("kvctl_lease_seconds", "From admission to the end of the lease.", LEASE_SECONDS, _ENGINE),
    histogram(
        "kvctl_output_tokens",
        "Output tokens of answers that came to their end (finished or capped).",
        TOKENS,
        _ENGINE,
    ),
    histogram(
        "kvctl_claim_error_ratio",
        "KV tokens held at the end over those claimed, of answers that came to their end.",
        RATIO,
        _ENGINE,
    ),
    histogram("kvctl_decision_seconds", "From a counted request to the gate's decision on it.", OWN_SECONDS),
    histogram(
        "kvctl_token_count_seconds",
        "Time to count a request's prompt tokens.",
        OWN_SECONDS,
        {"method": tuple(CountMethod)},
    ),
    counter(
        "kvctl_token_count_fallbacks_total",
        "Counts that a method could not make exactly and left to the next one.",
        {"method": tuple(CountMethod), "reason": tuple(Why)},
    ),
    gauge("kvctl_token_count_waiting", "Counts that are queued or under way."),
    gauge(
        "kvctl_token_count_error_ratio",
        "Tokens that the local tokenizer miscounted, over true ones, in the last 20 comparisons.",
    ),
    counter(
        "kvctl_token_count_samples_total",
        "Comparisons of local counts with the engine's, by where its count came from and whether they agree.",
        {"witness": tuple(Witness), "verdict": ("equal", "differs")},
    ),
    counter(
        "kvctl_token_count_characters_total",
        "Characters of prompts for the local tokenizer: tokenised, or spared because their count was known.",
        {"outcome": ("tokenised", "spared")},
    ),
    gauge(
        "kvctl_tokenizer_doubted",
        "1 while the local tokenizer counts differently from the engine and is not used.",
    ),
)

_DATA_PLANE = (
    gauge("kvctl_background_responses", "Responses that are generated in the background; each has a lease."),
    counter(
        "kvctl_proxy_faults_total",
        "Faults on the data plane, of callers, engine or kvctl.",
        {"fault": tuple(ProxyFault)},
    ),
    histogram(
        "kvctl_upstream_ttft_seconds",
        "From a request's arrival to the first byte of its answer, of answers that came to their end.",
        LATENCY_SECONDS,
    ),
    histogram(
        "kvctl_upstream_inter_token_seconds",
        "Mean time between the tokens of a streamed answer, one observation per answer.",
        GAP_SECONDS,
    ),
    counter(
        "kvctl_upstream_errors_total", "Failures of the engine on the data plane.", {"kind": UPSTREAM_ERRORS}
    ),
    counter(
        "kvctl_client_disconnects_total",
        "Clients that left before their answer was whole.",
        {"phase": DISCONNECT_PHASES},
    ),
)

_TELEMETRY = (
    gauge("kvctl_telemetry_up", "1 if the last reading of the source succeeded.", {"source": SOURCES}),
    gauge(
        "kvctl_telemetry_timestamp_seconds",
        "Unix time of the last good reading; absent before the first.",
        {"source": SOURCES},
    ),
    gauge("kvctl_telemetry_read_duration_seconds", "How long the last reading took.", {"source": SOURCES}),
    gauge(
        "kvctl_engine_state",
        "1 for the state that the gate believes the engine is in.",
        {**_ENGINE, "state": tuple(EngineState)},
    ),
    counter(
        "kvctl_engine_state_changes_total",
        "Changes of the engine's state, by the state entered.",
        {**_ENGINE, "state": tuple(EngineState)},
    ),
    counter("kvctl_engine_restarts_total", "Restarts of the engine seen in its telemetry.", _ENGINE),
    gauge("kvctl_engine_capacity_tokens", "Usable KV tokens of the rank.", _RANK),
    gauge(
        "kvctl_engine_kv_usage_ratio", "Share of the rank's KV pool in use, as the engine measures it.", _RANK
    ),
    gauge("kvctl_engine_running", "Requests that the engine runs.", _RANK),
    gauge("kvctl_engine_waiting", "Requests that wait inside the engine.", _RANK),
    counter("kvctl_engine_preemptions_total", "Preemptions, as the engine counts them.", _RANK),
)

_CARDS = (
    gauge("kvctl_gpu_memory_total_bytes", "Memory of the card or instance.", _GPU),
    gauge("kvctl_gpu_memory_free_bytes", "Memory that nobody holds.", _GPU),
    gauge(
        "kvctl_gpu_memory_used_bytes",
        "Memory in use, including the driver's own reserve where that is not reported separately.",
        _GPU,
    ),
    gauge("kvctl_gpu_memory_reserved_bytes", "The driver's own reserve.", _GPU),
    gauge("kvctl_gpu_temperature_celsius", "Temperature of the chip.", _GPU),
    gauge(
        "kvctl_gpu_throttled",
        "1 if the card is throttled for that reason.",
        {**_GPU, "reason": (*THROTTLE_WORDS.values(), THROTTLE_OTHER)},
    ),
    counter(
        "kvctl_gpu_ecc_uncorrected_errors_total",
        "Uncorrected memory errors since the driver was loaded.",
        _GPU,
    ),
    counter(
        "kvctl_gpu_events_total",
        "Events that the driver reported for the card (Xid and memory errors), by what they mean.",
        {**_GPU, "kind": tuple(EventKind)},
    ),
    counter(
        "kvctl_gpu_read_faults_total",
        "Times that reading the cards began to fail, by fault.",
        {"fault": (*CARD_FAULTS, OTHER)},
    ),
    gauge("kvctl_gpu_lost", "1 if the card fell off the bus.", _GPU),
    gauge("kvctl_gpu_info", "1; which card it is.", {**_GPU, "index": OPEN, "name": OPEN}),
)

_DAEMON = (
    histogram("kvctl_tick_seconds", "Time of one control tick.", OWN_SECONDS),
    counter("kvctl_ticks_overrun_total", "Ticks that took longer than their interval."),
    histogram("kvctl_event_loop_lag_seconds", "How late the event loop woke the control tick.", OWN_SECONDS),
    gauge("kvctl_override_active", "1 if on-call has overridden the knob.", {"knob": tuple(Knob)}),
    gauge(
        "kvctl_override_expiry_timestamp_seconds",
        "Unix time when the override ends; absent without one.",
        {"knob": tuple(Knob)},
    ),
    gauge("kvctl_config_reload_success", "1 if the last reload of the settings succeeded."),
    gauge("kvctl_config_revision", "Number of reloads that changed something, counted from 1 at the start."),
    gauge(
        "kvctl_tls_certificate_expiry_timestamp_seconds",
        "Unix time when a chain, or the last of several authorities, expires; engine: whose file it is.",
        {"certificate": CERTIFICATES, "engine": OPEN},
    ),
    counter(
        "kvctl_decision_log_dropped_total", "Records that could not be written to the decision log's file."
    ),
    gauge("kvctl_mode", "1 for the mode that the gate is in.", {**_ENGINE, "mode": MODES}),
    gauge("kvctl_policy", "1 for the policy in force.", {**_ENGINE, "policy": tuple(Policy)}),
    gauge("kvctl_build_info", "1; which kvctl it is.", {"version": OPEN, "python": OPEN}),
)

SECTIONS: Mapping[str, tuple[Spec, ...]] = {
    "Budget": _BUDGET,
    "Admission": _ADMISSION,
    "Data plane": _DATA_PLANE,
    "Engine telemetry": _TELEMETRY,
    "Cards": _CARDS,
    "Daemon": _DAEMON,
}
CATALOG: Mapping[str, Spec] = {spec.name: spec for section in SECTIONS.values() for spec in section}
