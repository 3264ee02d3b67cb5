"""The panels of the overview, row by row."""

from grafana.rules import Panel, Query, Row


def _rate(name: str, by: str, *, function: str = "rate") -> str:
    return f"sum by ({by}) ({function}({name}{{}}[$__rate_interval]))"


def _quantile(q: float, name: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket{{}}[$__rate_interval])))"


def _quantiles(name: str) -> tuple[Query, ...]:
    return tuple(Query(expr=_quantile(q, name), legend=f"p{q * 100:g}") for q in (0.5, 0.95, 0.99))


_USED = "sum by (instance, engine) (kvctl_engine_kv_usage_ratio{} * kvctl_engine_capacity_tokens{})"

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
                    Query(expr="sum by (instance, engine) (kvctl_capacity_tokens{})", legend="capacity"),
                    Query(expr="sum by (instance, engine) (kvctl_budget_tokens{})", legend="budget"),
                    Query(
                        expr="sum by (instance, engine) (kvctl_forecast_peak_tokens{})",
                        legend="forecast peak",
                    ),
                    Query(expr=_USED, legend="measured usage"),
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
                queries=(
                    Query(expr=_rate("kvctl_rejections_total", "reason") + " > 0", legend="{{reason}}"),
                ),
            ),
            Panel(
                title="Retry-After",
                about="The wait that refused callers are told.",
                unit="s",
                width=3,
                height=10,
                queries=_quantiles("kvctl_retry_after_seconds")[:2],
            ),
            Panel(
                title="Margin",
                about="The share of capacity that on-call keeps free; an override shows in the row Daemon.",
                unit="percentunit",
                kind="stat",
                width=3,
                height=5,
                decimals=1,
                queries=(
                    Query(expr="max by (instance, engine) (kvctl_margin_ratio{})", legend="{{engine}}"),
                ),
            ),
            Panel(
                title="Headroom",
                about="Budget less forecast peak; below zero only an empty engine is given a request.",
                unit="short",
                kind="stat",
                width=3,
                height=5,
                thresholds=((None, "red"), (0.0, "green")),
                queries=(
                    Query(expr="sum by (instance, engine) (kvctl_headroom_tokens{})", legend="{{engine}}"),
                ),
            ),
        ),
    ),
    Row(
        title="Why the budget is what it is",
        panels=(
            Panel(
                title="Pressure",
                about="The factor that each term puts on the budget; the least counts, 1 is none.",
                unit="percentunit",
                width=8,
                queries=(
                    Query(expr="min by (instance, engine, term) (kvctl_pressure_ratio{})", legend="{{term}}"),
                ),
            ),
            Panel(
                title="Budget changes",
                about="How often the budget moved, and why.",
                unit="short",
                width=8,
                empty="no change",
                queries=(
                    Query(
                        expr=_rate("kvctl_budget_changes_total", "direction, reason", function="increase")
                        + " > 0",
                        legend="{{direction}}: {{reason}}",
                    ),
                ),
            ),
            Panel(
                title="Tokens held, claimed, unattributed",
                about="What the leases hold by the ledger, their worst case, and what no lease explains.",
                unit="short",
                width=8,
                queries=(
                    Query(expr="sum by (instance, engine) (kvctl_held_tokens{})", legend="held"),
                    Query(expr="sum by (instance, engine) (kvctl_claimed_tokens{})", legend="claimed"),
                    Query(
                        expr="sum by (instance, engine) (kvctl_unattributed_tokens{})", legend="unattributed"
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
                queries=(
                    Query(expr=_rate("kvctl_requests_total", "outcome") + " > 0", legend="{{outcome}}"),
                ),
            ),
            Panel(
                title="Share refused",
                about="Refused of all that reached the gate.",
                unit="percentunit",
                width=8,
                queries=(
                    Query(
                        expr=f"{_rate('kvctl_rejections_total', 'instance, engine')} / clamp_min("
                        f"{_rate('kvctl_rejections_total', 'instance, engine')} + "
                        f"{_rate('kvctl_admissions_total', 'instance, engine')}, 1e-9)",
                        legend="{{engine}}",
                    ),
                ),
            ),
            Panel(
                title="Leases",
                about="Requests admitted and not ended.",
                unit="short",
                width=8,
                queries=(Query(expr="sum by (instance, engine) (kvctl_leases{})", legend="{{engine}}"),),
            ),
            Panel(
                title="Time to first token",
                about="From a request's arrival to the first byte of the engine's answer.",
                unit="s",
                width=8,
                queries=_quantiles("kvctl_upstream_ttft_seconds"),
            ),
            Panel(
                title="Between tokens",
                about="Mean time between the tokens of a streamed answer.",
                unit="s",
                width=8,
                queries=_quantiles("kvctl_upstream_inter_token_seconds"),
            ),
            Panel(
                title="Claims against what was held",
                about="KV tokens held at the end over those claimed: what a worst-case gate would have used.",
                unit="percentunit",
                width=8,
                queries=_quantiles("kvctl_claim_error_ratio")[:2],
            ),
            Panel(
                title="Engine failures",
                about="Failures of the engine on the data plane, a second.",
                unit="reqps",
                width=12,
                queries=(Query(expr=_rate("kvctl_upstream_errors_total", "kind"), legend="{{kind}}"),),
            ),
            Panel(
                title="Clients that left",
                about="Clients that left before their answer was whole, a second.",
                unit="reqps",
                width=12,
                queries=(Query(expr=_rate("kvctl_client_disconnects_total", "phase"), legend="{{phase}}"),),
            ),
        ),
    ),
    Row(
        title="Engine",
        panels=(
            Panel(
                title="State",
                about="The state that the gate believes the engine is in.",
                unit="short",
                kind="state-timeline",
                width=12,
                queries=(
                    Query(
                        expr="max by (instance, engine, state) (kvctl_engine_state{}) == 1",
                        legend="{{state}}",
                    ),
                ),
            ),
            Panel(
                title="KV usage",
                about="Share of each rank's pool in use, as the engine measures it.",
                unit="percentunit",
                width=12,
                queries=(
                    Query(
                        expr="max by (instance, engine, rank) (kvctl_engine_kv_usage_ratio{})",
                        legend="rank {{rank}}",
                    ),
                ),
            ),
            Panel(
                title="Running and waiting",
                about="Requests in the engine. Anything that waits there was admitted too early.",
                unit="short",
                width=12,
                queries=(
                    Query(expr="sum by (instance, engine) (kvctl_engine_running{})", legend="running"),
                    Query(expr="sum by (instance, engine) (kvctl_engine_waiting{})", legend="waiting"),
                ),
            ),
            Panel(
                title="Preemptions",
                about="Requests that the engine threw out and recomputed.",
                unit="short",
                width=12,
                queries=(
                    Query(
                        expr=_rate("kvctl_engine_preemptions_total", "instance, engine", function="increase"),
                        legend="{{engine}}",
                    ),
                ),
            ),
        ),
    ),
    Row(
        title="Cards",
        panels=(
            Panel(
                title="Free memory",
                about="Memory of each card that nobody holds.",
                unit="bytes",
                width=8,
                empty="no card",
                queries=(Query(expr="min by (gpu) (kvctl_gpu_memory_free_bytes{})", legend="{{gpu}}"),),
            ),
            Panel(
                title="Temperature",
                about="Temperature of each chip.",
                unit="celsius",
                width=8,
                empty="no card tells",
                queries=(Query(expr="max by (gpu) (kvctl_gpu_temperature_celsius{})", legend="{{gpu}}"),),
            ),
            Panel(
                title="Throttled",
                about="Why clocks are held down: it explains a falling token rate.",
                unit="short",
                width=8,
                empty="not throttled",
                queries=(
                    Query(
                        expr="max by (gpu, reason) (kvctl_gpu_throttled{}) > 0", legend="{{gpu}} {{reason}}"
                    ),
                ),
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
                queries=(
                    Query(expr="min by (instance, source) (kvctl_telemetry_up{})", legend="{{source}}"),
                ),
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
                    Query(expr=_quantile(0.99, "kvctl_token_count_seconds"), legend="count"),
                    Query(expr=_quantile(0.99, "kvctl_decision_seconds"), legend="decide"),
                    Query(expr=_quantile(0.99, "kvctl_tick_seconds"), legend="tick"),
                ),
            ),
            Panel(
                title="Event loop lag",
                about="How late the event loop woke the control tick, and ticks that overran their interval.",
                unit="s",
                width=6,
                queries=(Query(expr=_quantile(0.99, "kvctl_event_loop_lag_seconds"), legend="p99"),),
            ),
        ),
    ),
)
