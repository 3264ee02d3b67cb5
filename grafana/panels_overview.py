"""kvctl-overview: what on-call looks at first."""

from grafana.queries import USED, gauge, nonzero, quantile, quantiles, rate
from grafana.rules import Panel, Query, Row

OVERVIEW: tuple[Row, ...] = (
    Row(
        title="Budget and refusals",
        panels=(
            Panel(
                title="Budget against forecast, usage and capacity",
                about="What the gate may fill, what it expects at the peak, what the engine measures "
                "as filled, and all there is. Refusals begin where forecast meets budget.",
                unit="short",
                width=12,
                height=10,
                queries=(
                    gauge("kvctl_capacity_tokens", "capacity"),
                    gauge("kvctl_budget_tokens", "budget"),
                    gauge("kvctl_forecast_peak_tokens", "forecast peak"),
                    Query(expr=USED, legend="measured usage"),
                ),
            ),
            Panel(
                title="Refusals by reason",
                about="Requests that the gate refused, a second.",
                unit="reqps",
                width=6,
                height=10,
                stacked=True,
                empty="none refused",
                queries=(nonzero("kvctl_rejections_total", "reason"),),
            ),
            Panel(
                title="Retry-After",
                about="The wait that refused callers are told.",
                unit="s",
                width=3,
                height=10,
                queries=quantiles("kvctl_retry_after_seconds")[:2],
            ),
            Panel(
                title="Margin",
                about="The share of capacity that on-call keeps free; an override shows in the row Daemon.",
                unit="percentunit",
                kind="stat",
                width=3,
                height=5,
                decimals=1,
                queries=(gauge("kvctl_margin_ratio", "{{engine}}", function="max"),),
            ),
            Panel(
                title="Headroom",
                about="Budget less forecast peak; below zero only an empty engine is given a request.",
                unit="short",
                kind="stat",
                width=3,
                height=5,
                thresholds=((None, "red"), (0.0, "green")),
                queries=(gauge("kvctl_headroom_tokens", "{{engine}}"),),
            ),
            Panel(
                title="Binding limit",
                about="Which limit is nearest to its end: the one that refuses first.",
                unit="short",
                kind="state-timeline",
                width=24,
                height=5,
                queries=(
                    Query(
                        expr="max by (instance, engine, limit) (kvctl_binding_limit{}) == 1",
                        legend="{{limit}}",
                    ),
                ),
            ),
        ),
    ),
    Row(
        title="Traffic",
        panels=(
            Panel(
                title="Requests by outcome",
                about="Requests answered a second, by how they ended.",
                unit="reqps",
                width=8,
                stacked=True,
                empty="no request",
                queries=(nonzero("kvctl_requests_total", "outcome"),),
            ),
            Panel(
                title="Share refused",
                about="Refused of all that reached the gate.",
                unit="percentunit",
                width=8,
                queries=(
                    Query(
                        expr=f"{rate('kvctl_rejections_total', 'instance, engine')} / clamp_min("
                        f"{rate('kvctl_rejections_total', 'instance, engine')} + "
                        f"{rate('kvctl_admissions_total', 'instance, engine')}, 1e-9)",
                        legend="{{engine}}",
                    ),
                ),
            ),
            Panel(
                title="Leases",
                about="Requests admitted and not ended.",
                unit="short",
                width=8,
                queries=(gauge("kvctl_leases", "{{engine}}"),),
            ),
            Panel(
                title="In the queue",
                about="Requests that wait in kvctl, by priority; KvctlQueueWaitHigh looks at their waits.",
                unit="short",
                width=8,
                stacked=True,
                queries=(gauge("kvctl_queue_requests", "{{priority}}", by="instance, engine, priority"),),
            ),
            Panel(
                title="Let in, and enforced",
                about="Share of the last seconds' requests that was let in, and the share on which "
                "decisions are enforced: below 1 on-call or the settings let requests past the gate.",
                unit="percentunit",
                width=8,
                empty="nobody asks",
                queries=(
                    gauge("kvctl_accept_ratio", "let in", function="min"),
                    gauge("kvctl_enforce_ratio", "enforced", function="min"),
                ),
            ),
            Panel(
                title="Faults on the data plane",
                about="Faults of callers, engine or kvctl, a second.",
                unit="cps",
                width=8,
                empty="none",
                queries=(nonzero("kvctl_proxy_faults_total", "fault"),),
            ),
            Panel(
                title="Time to first token",
                about="From a request's arrival to the first byte of the engine's answer.",
                unit="s",
                width=8,
                queries=quantiles("kvctl_upstream_ttft_seconds"),
            ),
            Panel(
                title="Between tokens",
                about="Mean time between the tokens of a streamed answer.",
                unit="s",
                width=8,
                queries=quantiles("kvctl_upstream_inter_token_seconds"),
            ),
            Panel(
                title="Claims against what was held",
                about="KV tokens held at the end over those claimed: what a worst-case gate would have used.",
                unit="percentunit",
                width=8,
                queries=quantiles("kvctl_claim_error_ratio")[:2],
            ),
            Panel(
                title="Engine failures",
                about="Failures of the engine on the data plane, a second.",
                unit="reqps",
                width=12,
                queries=(Query(expr=rate("kvctl_upstream_errors_total", "kind"), legend="{{kind}}"),),
            ),
            Panel(
                title="Clients that left",
                about="Clients that left before their answer was whole, a second.",
                unit="reqps",
                width=12,
                queries=(Query(expr=rate("kvctl_client_disconnects_total", "phase"), legend="{{phase}}"),),
            ),
        ),
    ),
    Row(
        title="Daemon",
        panels=(
            Panel(
                title="Sources",
                about="1 while the last reading of a source succeeded.",
                unit="short",
                width=6,
                queries=(gauge("kvctl_telemetry_up", "{{source}}", by="instance, source", function="min"),),
            ),
            Panel(
                title="Overrides",
                about="Time left of what on-call has overridden.",
                unit="s",
                width=6,
                empty="no override",
                queries=(
                    Query(
                        expr="max by (instance, knob) (kvctl_override_expiry_timestamp_seconds{}) - time()",
                        legend="{{knob}}",
                    ),
                ),
            ),
            Panel(
                title="Own time",
                about="99th percentile of counting, deciding and one control tick.",
                unit="s",
                width=6,
                queries=(
                    Query(expr=quantile(0.99, "kvctl_token_count_seconds"), legend="count"),
                    Query(expr=quantile(0.99, "kvctl_decision_seconds"), legend="decide"),
                    Query(expr=quantile(0.99, "kvctl_tick_seconds"), legend="tick"),
                ),
            ),
            Panel(
                title="Event loop lag",
                about="How late the event loop woke the control tick.",
                unit="s",
                width=6,
                queries=(Query(expr=quantile(0.99, "kvctl_event_loop_lag_seconds"), legend="p99"),),
            ),
            Panel(
                title="Mode",
                about="Whether on-call lets traffic in: active, draining or bypass.",
                unit="short",
                kind="stat",
                width=4,
                queries=(
                    Query(expr="max by (instance, engine, mode) (kvctl_mode{}) == 1", legend="{{mode}}"),
                ),
            ),
            Panel(
                title="Last reload",
                about="1 if the last reload of the settings went well; 0: the old ones are in force.",
                unit="short",
                kind="stat",
                width=4,
                thresholds=((None, "red"), (1.0, "green")),
                queries=(
                    gauge("kvctl_config_reload_success", "{{instance}}", by="instance", function="min"),
                ),
            ),
            Panel(
                title="Settings revision",
                about="Reloads that changed something, counted from 1 at the start: a step is a change.",
                unit="short",
                width=4,
                queries=(gauge("kvctl_config_revision", "{{instance}}", by="instance", function="max"),),
            ),
            Panel(
                title="Ticks that overran",
                about="Control ticks that took longer than their interval.",
                unit="short",
                width=4,
                queries=(
                    Query(
                        expr=rate("kvctl_ticks_overrun_total", "instance", function="increase"),
                        legend="{{instance}}",
                    ),
                ),
            ),
            Panel(
                title="Decision records lost",
                about="Records that did not get into the decision log's file: the disk is full or slow.",
                unit="short",
                width=4,
                queries=(
                    Query(
                        expr=rate("kvctl_decision_log_dropped_total", "instance", function="increase"),
                        legend="{{instance}}",
                    ),
                ),
            ),
            Panel(
                title="Version",
                about="Which kvctl it is.",
                unit="short",
                kind="stat",
                width=4,
                queries=(
                    gauge(
                        "kvctl_build_info", "{{instance}} {{version}}", by="instance, version", function="max"
                    ),
                ),
            ),
            Panel(
                title="Certificates",
                about="Time until each certificate that kvctl uses ends; under 30 days it is "
                "KvctlCertificateExpires.",
                unit="s",
                width=24,
                empty="no TLS",
                thresholds=((None, "red"), (3 * 86400.0, "orange"), (30 * 86400.0, "green")),
                queries=(
                    Query(
                        expr="min by (instance, certificate, engine) "
                        "(kvctl_tls_certificate_expiry_timestamp_seconds{}) - time()",
                        legend="{{certificate}} {{engine}}",
                    ),
                ),
            ),
        ),
    ),
)
