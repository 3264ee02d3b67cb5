import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvctl.core.events import DrainChanged
from kvctl.core.outcomes import (
    DECISION_OF,
    Absence,
    BudgetReason,
    Decision,
    EndReason,
    EngineState,
    RejectReason,
    SourceFault,
)
from kvctl.gpu.base import GpuReading
from kvctl.gpu.faults import CardEvent, EventKind
from kvctl.metrics import CATALOG, CONTENT_TYPE, Kind, Metrics
from kvctl.metrics.catalog import SECTIONS
from kvctl.metrics.document import document
from tests.ops.fed import ENGINE, GIB, WALL, Fed, fed

ROOT = Path(__file__).parent.parent
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(metrics: Metrics) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(of: Metrics, name: str, /, **labels: str) -> float | None:
    return series(of).get((name, frozenset(labels.items())))


def names(metrics: Metrics) -> set[str]:
    return {family.name for family in text_string_to_metric_families(metrics.render().decode())}


@pytest.fixture(scope="module")
def full() -> Fed:
    return fed()


@pytest.fixture(scope="module")
def full_series(full: Fed) -> Series:
    return series(full.metrics)


def fresh() -> Fed:
    return Fed()


# --- the table --------------------------------------------------------------------------------------


def test_each_name_once() -> None:
    assert len(CATALOG) == sum(len(specs) for specs in SECTIONS.values())


@pytest.mark.parametrize("name", CATALOG)
def test_every_metric_of_the_table_has_series_once_everything_happened(
    full_series: Series, name: str
) -> None:
    """F17: counters, and only they, end in _total."""
    kind = CATALOG[name].kind
    found = [key for key in full_series if re.fullmatch(rf"{name}(_bucket|_sum|_count)?", key[0])]
    assert found, name
    assert all(set(dict(labels)) - {"le"} == set(CATALOG[name].labels) for _, labels in found)
    assert (kind is Kind.COUNTER) == name.endswith("_total")


def test_nothing_else_is_on_the_page_but_the_process(full: Fed) -> None:
    counters = {name.removesuffix("_total") for name in CATALOG}
    extra = names(full.metrics) - counters - set(CATALOG)
    assert {name for name in extra if not name.startswith("process_")} == set()
    assert "process_resident_memory_bytes" in extra


def test_no_created_series(full: Fed) -> None:
    assert b"_created" not in full.metrics.render()


def test_closed_label_values_are_present_at_zero() -> None:
    made = fresh()
    found = series(made.metrics)
    for reason in RejectReason:
        assert found["kvctl_rejections_total", frozenset({("engine", ENGINE), ("reason", reason)})] == 0
    for ended in EndReason:
        assert found["kvctl_leases_ended_total", frozenset({("engine", ENGINE), ("reason", ended)})] == 0
    for why in BudgetReason:
        labels = {("engine", ENGINE), ("direction", "down"), ("reason", why)}
        assert found["kvctl_budget_changes_total", frozenset(labels)] == 0
    assert value(made.metrics, "kvctl_requests_total", route="completions", outcome="finished") == 0
    assert value(made.metrics, "kvctl_upstream_ttft_seconds_count") == 0
    assert value(made.metrics, "kvctl_override_active", knob="margin") == 0


# --- what it shows ----------------------------------------------------------------------------------


def test_the_gate_is_shown_as_it_is_now(full: Fed) -> None:
    status = full.gate.status(full.now)
    assert value(full.metrics, "kvctl_budget_tokens", engine=ENGINE) == status.budget_tokens
    assert value(full.metrics, "kvctl_capacity_tokens", engine=ENGINE) == 16_000
    assert value(full.metrics, "kvctl_context_tokens", engine=ENGINE) == 8192
    assert value(full.metrics, "kvctl_margin_ratio", engine=ENGINE) == 0.2
    assert value(full.metrics, "kvctl_engine_kv_usage_ratio", engine=ENGINE, rank="0") == 0.1


def test_what_the_gate_did_is_counted(full: Fed) -> None:
    admitted = value(full.metrics, "kvctl_admissions_total", engine=ENGINE)
    reasons = {
        reason: value(full.metrics, "kvctl_rejections_total", engine=ENGINE, reason=reason)
        for reason in RejectReason
    }
    never = sum(reasons.pop(r) or 0 for r in list(reasons) if DECISION_OF[r] is Decision.REJECT_NEVER)
    refused = sum(count or 0 for count in reasons.values())
    assert admitted
    assert refused
    assert admitted + refused + never == full.arrived
    assert value(full.metrics, "kvctl_rejections_total", engine=ENGINE, reason="context") == 1
    assert value(full.metrics, "kvctl_retry_after_seconds_count", engine=ENGINE) == refused
    assert value(full.metrics, "kvctl_leases_ended_total", engine=ENGINE, reason="finished") == admitted
    assert value(full.metrics, "kvctl_output_tokens_count", engine=ENGINE) == admitted
    assert value(full.metrics, "kvctl_output_tokens_sum", engine=ENGINE) == full.output_tokens
    assert value(full.metrics, "kvctl_lease_seconds_count", engine=ENGINE) == admitted


def test_a_claim_is_compared_with_what_was_held() -> None:
    made = fresh()
    made.scrape()
    made.answers(1, 80)  # 64 + 80 held, 64 + 512 claimed
    assert value(made.metrics, "kvctl_claim_error_ratio_sum", engine=ENGINE) == pytest.approx(144 / 576)


def test_budget_changes_carry_direction_and_reason(full: Fed) -> None:
    changes = {
        key: number for key, number in series(full.metrics).items() if key[0] == "kvctl_budget_changes_total"
    }
    moved = {
        (dict(labels)["direction"], dict(labels)["reason"])
        for (_, labels), number in changes.items()
        if number
    }
    assert ("down", "margin") in moved
    assert ("down", "preemption") in moved or ("down", "gpu_memory") in moved


def test_a_restart_and_a_state_are_counted(full: Fed) -> None:
    assert value(full.metrics, "kvctl_engine_restarts_total", engine=ENGINE) == 1
    assert value(full.metrics, "kvctl_engine_state_changes_total", engine=ENGINE, state="up")


def test_exactly_one_state_policy_and_mode(full: Fed) -> None:
    for name in ("kvctl_engine_state", "kvctl_policy", "kvctl_mode"):
        assert sum(number for (key, _), number in series(full.metrics).items() if key == name) == 1
    assert value(full.metrics, "kvctl_mode", engine=ENGINE, mode="active") == 1


def test_draining_is_a_mode() -> None:
    made = fresh()
    made.step(DrainChanged(draining=True))
    assert value(made.metrics, "kvctl_mode", engine=ENGINE, mode="draining") == 1
    assert value(made.metrics, "kvctl_mode", engine=ENGINE, mode="active") == 0


def test_before_the_first_reading_nothing_is_invented() -> None:
    made = fresh()
    del made.metrics.sources["engine_metrics"]
    found = names(made.metrics)
    for name in ("kvctl_context_tokens", "kvctl_engine_kv_usage_ratio", "kvctl_gpu_memory_free_bytes"):
        assert not any(key == name for key, _ in series(made.metrics))
    assert "kvctl_budget_tokens" in found
    assert value(made.metrics, "kvctl_capacity_known", engine=ENGINE) == 0
    assert value(made.metrics, "kvctl_engine_state", engine=ENGINE, state=EngineState.STARTING) == 1


def test_a_reading_that_vanishes_leaves_no_series() -> None:
    made = fresh()
    made.scrape(kv_usage_ratio=0.3)
    assert value(made.metrics, "kvctl_engine_kv_usage_ratio", engine=ENGINE, rank="0") == 0.3
    made.scrape(kv_usage_ratio=None, waiting=None, absent={"waiting": Absence.MISSING})
    for name in ("kvctl_engine_kv_usage_ratio", "kvctl_engine_waiting"):
        assert value(made.metrics, name, engine=ENGINE, rank="0") is None
    made.scrape(rank="7")
    assert value(made.metrics, "kvctl_engine_running", engine=ENGINE, rank="0") is None
    assert value(made.metrics, "kvctl_engine_running", engine=ENGINE, rank="7") == 3


def test_cards() -> None:
    made = fresh()
    made.card(reserved_bytes=None)
    gpu = {"gpu": "GPU-0"}
    assert value(made.metrics, "kvctl_gpu_memory_free_bytes", **gpu) == 10 * GIB
    assert value(made.metrics, "kvctl_gpu_memory_reserved_bytes", **gpu) is None
    assert value(made.metrics, "kvctl_gpu_throttled", **gpu, reason="sw_power_cap") == 1
    assert value(made.metrics, "kvctl_gpu_throttled", **gpu, reason="hw_thermal") == 0
    assert value(made.metrics, "kvctl_gpu_info", **gpu, index="0", name="NVIDIA H200") == 1
    made.card(lost=True, free_bytes=None, throttle_reasons=None)
    assert value(made.metrics, "kvctl_gpu_lost", **gpu) == 1
    assert value(made.metrics, "kvctl_gpu_memory_free_bytes", **gpu) is None
    assert value(made.metrics, "kvctl_gpu_throttled", **gpu, reason="hw_thermal") is None


def test_no_nvml_is_a_zero_that_can_be_grepped() -> None:
    """D22: without NVML the source is down and no card's memory is invented."""
    made = fresh()
    made.reading = GpuReading(fault=SourceFault.LIBRARY_MISSING)
    assert re.search(rb'^kvctl_telemetry_up\{source="nvml"\} 0(\.0)?$', made.metrics.render(), re.MULTILINE)
    assert not any(name.startswith("kvctl_gpu_memory") for name, _ in series(made.metrics))


def test_a_source_that_is_not_configured_has_no_series() -> None:
    made = fresh()
    del made.metrics.sources["nvml"]
    assert value(made.metrics, "kvctl_telemetry_up", source="nvml") is None
    assert value(made.metrics, "kvctl_telemetry_up", source="engine_metrics") == 1


def test_readings_are_dated_in_unix_time() -> None:
    """C24, D15: the age of every source's reading can be told."""
    made = fresh()
    assert value(made.metrics, "kvctl_telemetry_timestamp_seconds", source="nvml") == WALL - 1


def test_an_override_has_an_end() -> None:
    made = fresh()
    made.overrides.set("margin", 0.1, ttl_s=60, reason="r", actor="a", now_mono=made.now, now_wall=WALL)
    assert value(made.metrics, "kvctl_override_active", knob="margin") == 1
    assert value(made.metrics, "kvctl_override_expiry_timestamp_seconds", knob="margin") == WALL + 60
    made.now += 61
    assert value(made.metrics, "kvctl_override_active", knob="margin") == 0
    assert value(made.metrics, "kvctl_override_expiry_timestamp_seconds", knob="margin") is None


def test_words_from_outside_the_sets_do_not_make_series() -> None:
    """C28: nothing that callers choose (routes, model and adapter names) multiplies the series."""
    made = fresh()
    before = len(series(made.metrics))
    for number in range(50):
        made.metrics.request(f"/v1/secret/{number}", f"odd{number}")
        made.metrics.upstream_error(f"odd{number}")
        made.metrics.client_gone(f"odd{number}")
    assert len(series(made.metrics)) == before
    assert value(made.metrics, "kvctl_requests_total", route="unknown", outcome="other") == 50


@pytest.mark.parametrize(
    ("seconds", "below", "at_most"), [(0.005, 0.0, 0.01), (0.4, 0.2, 0.5), (90.0, 60.0, 120.0)]
)
def test_latency_buckets_tell_slow_from_very_slow(seconds: float, below: float, at_most: float) -> None:
    """F18: 5 ms, 400 ms and 90 s fall into buckets of their own."""
    made = fresh()
    made.metrics.first_token(seconds)
    if below:
        assert value(made.metrics, "kvctl_upstream_ttft_seconds_bucket", le=str(below)) == 0
    assert value(made.metrics, "kvctl_upstream_ttft_seconds_bucket", le=str(at_most)) == 1


def test_lease_buckets_reach_half_an_hour_and_own_time_microseconds() -> None:
    """F18: total durations reach beyond 30 minutes, kvctl's own time begins at microseconds."""
    assert CATALOG["kvctl_lease_seconds"].buckets[-1] >= 1800
    assert CATALOG["kvctl_decision_seconds"].buckets[0] <= 0.0001


def test_a_bucket_edge_belongs_to_its_bucket_and_beyond_the_last_is_inf() -> None:
    made = fresh()
    for seconds in (2.0, 500.0):
        made.metrics.first_token(seconds)
    assert value(made.metrics, "kvctl_upstream_ttft_seconds_bucket", le="1.0") == 0
    assert value(made.metrics, "kvctl_upstream_ttft_seconds_bucket", le="2.0") == 1
    assert value(made.metrics, "kvctl_upstream_ttft_seconds_bucket", le="120.0") == 1
    assert value(made.metrics, "kvctl_upstream_ttft_seconds_bucket", le="+Inf") == 2
    assert value(made.metrics, "kvctl_upstream_ttft_seconds_sum") == 502


def test_label_values_with_quotes_and_newlines_survive() -> None:
    made = fresh()
    made.card(uuid='GPU-"\n\\')
    assert value(made.metrics, "kvctl_gpu_lost", gpu='GPU-"\n\\') == 0


def test_two_pages_do_not_share_anything() -> None:
    first, second = fresh(), fresh()
    first.metrics.decided(1)
    assert value(second.metrics, "kvctl_decision_seconds_count") == 0


def test_the_content_type_is_the_text_format() -> None:
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


# --- the document -----------------------------------------------------------------------------------


def test_the_document_is_current() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text == document(), "run: python -m kvctl.metrics > docs/metrics.md"


def test_the_document_has_every_metric_and_word() -> None:
    text = document()
    for spec in CATALOG.values():
        assert f"`{spec.name}`" in text
        for words in spec.labels.values():
            assert all(f"`{word}`" in text for word in words)


def test_what_the_driver_tells_of_a_card_is_counted_from_its_first_reading_on() -> None:
    made = fresh()
    made.card()
    name = "kvctl_gpu_events_total"
    assert value(made.metrics, name, gpu="GPU-0", kind="xid_fatal") == 0
    made.metrics.card_event(CardEvent(uuids=("GPU-0",), kind=EventKind.XID_FATAL, xid=79))
    assert value(made.metrics, name, gpu="GPU-0", kind="xid_fatal") == 1
    made.metrics.card_event(CardEvent(uuids=(), kind=EventKind.ECC_UNCORRECTED))
    assert value(made.metrics, name, gpu="unknown", kind="ecc_uncorrected") == 1
    made.metrics.cards_failing(SourceFault.HUNG)
    made.metrics.cards_failing(SourceFault.REFUSED)
    assert value(made.metrics, "kvctl_gpu_read_faults_total", fault="hung") == 1
    assert value(made.metrics, "kvctl_gpu_read_faults_total", fault="other") == 1
