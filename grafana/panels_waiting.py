"""Rows of kvctl-admission: who waits and for whom, whether the forecast and the counts are right, shadow."""

from grafana.queries import gauge, nonzero, quantiles, rate
from grafana.rules import Panel, Query, Row

_TENANT = "instance, engine, tenant"

WAITING = Row(
    title="Who waits, and whose it is",
    panels=(
        Panel(
            title="Queue by priority",
            about="Requests that wait in kvctl.",
            unit="short",
            width=6,
            stacked=True,
            queries=(gauge("kvctl_queue_requests", "{{priority}}", by="instance, engine, priority"),),
        ),
        Panel(
            title="Time in the queue",
            about="How long requests waited, whatever became of them; KvctlQueueWaitHigh fires on p95.",
            unit="s",
            width=6,
            empty="nobody waited",
            queries=quantiles("kvctl_queue_wait_seconds"),
        ),
        Panel(
            title="What makes them wait",
            about="Requests that began to wait a second, by what stood in their way.",
            unit="reqps",
            width=6,
            stacked=True,
            empty="nobody waited",
            queries=(nonzero("kvctl_queued_total", "reason"),),
        ),
        Panel(
            title="Bodies held",
            about="Memory of the bodies of requests that wait; queue_max_bytes bounds it.",
            unit="bytes",
            width=6,
            queries=(gauge("kvctl_queue_bytes", "{{engine}}"),),
        ),
        Panel(
            title="Tenants: decisions",
            about="Decisions a second by tenant.",
            unit="reqps",
            width=8,
            empty="no tenants",
            queries=(
                Query(
                    expr=rate("kvctl_tenant_decisions_total", "tenant, decision"),
                    legend="{{tenant}}: {{decision}}",
                ),
            ),
        ),
        Panel(
            title="Tenants: in flight",
            about="KV tokens that each tenant's requests are charged now.",
            unit="short",
            width=8,
            stacked=True,
            empty="no tenants",
            queries=(gauge("kvctl_tenant_in_flight_tokens", "{{tenant}}", by=_TENANT),),
        ),
        Panel(
            title="Tenants: used of late",
            about="KV tokens x seconds by each tenant's weight: who is below its share goes first.",
            unit="short",
            width=8,
            empty="no tenants",
            queries=(gauge("kvctl_tenant_used_token_seconds", "{{tenant}}", by=_TENANT),),
        ),
    ),
)

TRUST = Row(
    title="Whether forecast and counts are right",
    panels=(
        Panel(
            title="Forecast exceeded",
            about="Share of looks at which more was held than the forecast's bound; "
            "KvctlForecastUnderestimates fires above a tenth.",
            unit="percentunit",
            width=8,
            empty="not known yet",
            queries=(gauge("kvctl_forecast_exceeded_ratio", "{{engine}}", function="max"),),
        ),
        Panel(
            title="Forecast against what came",
            about="What was held against the forecast's mean: above 0 answers grow longer than foreseen.",
            unit="none",
            width=8,
            empty="not known yet",
            queries=(gauge("kvctl_forecast_error_ratio", "{{engine}}", function="max"),),
        ),
        Panel(
            title="Counts against the engine's",
            about="Tokens that the local tokenizer miscounted over true ones; KvctlCountingDrifts.",
            unit="percentunit",
            width=8,
            empty="nothing compared",
            queries=(gauge("kvctl_token_count_error_ratio", "{{instance}}", by="instance", function="max"),),
        ),
        Panel(
            title="Comparisons of counts",
            about="Local counts compared with what the engine told, by who told and whether both agree.",
            unit="cps",
            width=8,
            empty="nothing compared",
            queries=(
                Query(
                    expr=rate("kvctl_token_count_samples_total", "witness, verdict") + " > 0",
                    legend="{{witness}}: {{verdict}}",
                ),
            ),
        ),
        Panel(
            title="Tokenizer set aside",
            about="1 while the local tokenizer counts other than the engine, and is not used.",
            unit="short",
            width=8,
            queries=(gauge("kvctl_tokenizer_doubted", "{{instance}}", by="instance", function="max"),),
        ),
        Panel(
            title="Prompts tokenised, and spared",
            about="Characters a second that were tokenised, and those whose tokens were known already.",
            unit="short",
            width=8,
            queries=(
                Query(expr=rate("kvctl_token_count_characters_total", "outcome"), legend="{{outcome}}"),
            ),
        ),
    ),
)

SHADOW = Row(
    title="Shadow, and the choice between engines",
    panels=(
        Panel(
            title="Would have been refused",
            about="Requests let in a second that would have been refused were decisions enforced on them.",
            unit="reqps",
            width=8,
            stacked=True,
            empty="none",
            queries=(nonzero("kvctl_shadow_rejections_total", "reason"),),
        ),
        Panel(
            title="Let in, and enforced",
            about="Share of the last seconds' requests that was let in; share on which kvctl decides.",
            unit="percentunit",
            width=8,
            empty="nobody asks",
            queries=(
                gauge("kvctl_accept_ratio", "let in", function="min"),
                gauge("kvctl_enforce_ratio", "enforced", function="min"),
            ),
        ),
        Panel(
            title="Which engine, and why",
            about="Requests a second sent to each engine of several, by why to this one.",
            unit="reqps",
            width=8,
            stacked=True,
            empty="one engine",
            queries=(
                Query(
                    expr=rate("kvctl_choices_total", "engine, reason") + " > 0",
                    legend="{{engine}}: {{reason}}",
                ),
            ),
        ),
    ),
)
