"""kvctl-admission: why requests are refused, and whether that is right."""

from grafana.panels_waiting import SHADOW, TRUST, WAITING
from grafana.queries import gauge, nonzero, quantile, quantiles, rate
from grafana.rules import Panel, Query, Row

ADMISSION: tuple[Row, ...] = (
    Row(
        title="What refuses",
        panels=(
            Panel(
                title="Refused, and let in",
                about="Decisions of the gate, a second.",
                unit="reqps",
                width=8,
                queries=(
                    Query(expr=rate("kvctl_rejections_total", "instance, engine"), legend="refused"),
                    Query(expr=rate("kvctl_admissions_total", "instance, engine"), legend="let in"),
                ),
            ),
            Panel(
                title="Share refused, by reason",
                about="Each reason's refusals of all that reached the gate.",
                unit="percentunit",
                width=8,
                stacked=True,
                empty="none refused",
                queries=(
                    Query(
                        expr=f"{rate('kvctl_rejections_total', 'reason')} / on () group_left () clamp_min("
                        "sum(rate(kvctl_rejections_total{}[$__rate_interval])) + "
                        "sum(rate(kvctl_admissions_total{}[$__rate_interval])), 1e-9) > 0",
                        legend="{{reason}}",
                    ),
                ),
            ),
            Panel(
                title="Limits beside the budget",
                about="Prompt tokens before their first token, and how many a second the engine takes.",
                unit="short",
                width=8,
                empty="no limit known",
                queries=(
                    gauge("kvctl_prefill_backlog_tokens", "prefill backlog"),
                    gauge("kvctl_prefill_rate_tokens_per_second", "prefill rate"),
                ),
            ),
            Panel(
                title="Sequences",
                about="Leases against the sequences that may decode at once, and the engine's slots.",
                unit="short",
                width=12,
                empty="no limit known",
                queries=(
                    gauge("kvctl_leases", "leases"),
                    gauge("kvctl_decode_limit_sequences", "decode limit"),
                    gauge("kvctl_slot_limit_sequences", "slots"),
                ),
            ),
            Panel(
                title="Retry-After",
                about="The wait that refused callers are told.",
                unit="s",
                width=12,
                queries=quantiles("kvctl_retry_after_seconds"),
            ),
        ),
    ),
    WAITING,
    Row(
        title="Why the budget is what it is",
        panels=(
            Panel(
                title="Pressure",
                about="The factor that each term puts on the budget; the least counts, 1 is none.",
                unit="percentunit",
                width=8,
                queries=(
                    gauge("kvctl_pressure_ratio", "{{term}}", by="instance, engine, term", function="min"),
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
                        expr=rate("kvctl_budget_changes_total", "direction, reason", function="increase")
                        + " > 0",
                        legend="{{direction}}: {{reason}}",
                    ),
                ),
            ),
            Panel(
                title="Tokens held, claimed, shared, unattributed",
                about="What the leases hold by the ledger, their worst case, and what no lease explains.",
                unit="short",
                width=8,
                queries=(
                    gauge("kvctl_held_tokens", "held"),
                    gauge("kvctl_claimed_tokens", "claimed"),
                    gauge("kvctl_unattributed_tokens", "unattributed"),
                    gauge("kvctl_shared_prefix_tokens", "shared beginnings"),
                ),
            ),
        ),
    ),
    Row(
        title="What the forecast learns from",
        panels=(
            Panel(
                title="Output tokens",
                about="How long answers are that came to their end.",
                unit="short",
                width=8,
                queries=quantiles("kvctl_output_tokens"),
            ),
            Panel(
                title="Lease time",
                about="From admission to the end of the lease.",
                unit="s",
                width=8,
                queries=quantiles("kvctl_lease_seconds"),
            ),
            Panel(
                title="Drain rate",
                about="KV tokens that ending leases free a second: Retry-After is made of it.",
                unit="short",
                width=8,
                empty="not known yet",
                queries=(gauge("kvctl_drain_rate_tokens_per_second", "{{engine}}"),),
            ),
            Panel(
                title="How leases end",
                about="Leases a second by how they ended; only finished ones teach the forecast.",
                unit="reqps",
                width=12,
                stacked=True,
                empty="none ended",
                queries=(nonzero("kvctl_leases_ended_total", "reason"),),
            ),
            Panel(
                title="Token counting by method",
                about="95th percentile of the time to count a prompt.",
                unit="s",
                width=6,
                queries=(
                    Query(expr=quantile(0.95, "kvctl_token_count_seconds", "method"), legend="{{method}}"),
                ),
            ),
            Panel(
                title="Counts left to the next method",
                about="Counts that a method could not make exactly, a second.",
                unit="cps",
                width=6,
                empty="none",
                queries=(
                    Query(
                        expr=rate("kvctl_token_count_fallbacks_total", "method, reason") + " > 0",
                        legend="{{method}}: {{reason}}",
                    ),
                ),
            ),
        ),
    ),
    TRUST,
    SHADOW,
)
