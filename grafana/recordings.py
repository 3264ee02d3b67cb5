"""The recording rules: what alerts and dashboards ask again and again.

Objectives stand here once: ``TTFT_OBJECTIVE`` of answers begin within ``TTFT_TARGET_S``, and
``ADMISSION_OBJECTIVE`` of the requests that reach the gate are let in. A site with others edits both and runs
``python -m grafana.generate``.
"""

from grafana.alerting import Recording

TTFT_TARGET_S = 2.0  # a bucket edge of kvctl_upstream_ttft_seconds
TTFT_OBJECTIVE = 0.99
ADMISSION_OBJECTIVE = 0.95
WINDOWS = ("5m", "30m", "1h", "6h", "3d")
"""Of the burn rates; the first of each pair in ``BURNS`` is the long one."""

_ENGINE = "job, instance, engine"
_INSTANCE = "job, instance"


def _refused(window: str) -> str:
    refused = f"sum by ({_ENGINE}) (rate(kvctl_rejections_total[{window}]))"
    admitted = f"sum by ({_ENGINE}) (rate(kvctl_admissions_total[{window}]))"
    return f"{refused} / (({refused} + {admitted}) > 0)"


def _late(window: str) -> str:
    name = "kvctl_upstream_ttft_seconds"
    every = f"sum by ({_INSTANCE}) (rate({name}_count[{window}]))"
    in_time = f'sum by ({_INSTANCE}) (rate({name}_bucket{{le="{TTFT_TARGET_S}"}}[{window}]))'
    return f"1 - {in_time} / ({every} > 0)"


def _quantile(name: str, by: str) -> str:
    return f"histogram_quantile(0.95, sum by ({by}, le) (rate({name}_bucket[5m])))"


RECORDINGS = (
    Recording(
        record="engine:kvctl_budget_filled:ratio",
        expr="kvctl_forecast_peak_tokens / (kvctl_budget_tokens > 0)",
    ),
    Recording(
        record="engine:kvctl_used_tokens:sum",
        expr=f"sum by ({_ENGINE}) (kvctl_engine_kv_usage_ratio * kvctl_engine_capacity_tokens)",
    ),
    Recording(
        record="engine:kvctl_pressure:min",
        expr=f"min by ({_ENGINE}) (kvctl_pressure_ratio)",
    ),
    Recording(
        record="engine:kvctl_preemptions:increase5m",
        expr=f"sum by ({_ENGINE}) (increase(kvctl_engine_preemptions_total[5m]))",
    ),
    Recording(
        record="engine:kvctl_admissions:rate5m",
        expr=f"sum by ({_ENGINE}) (rate(kvctl_admissions_total[5m]))",
    ),
    Recording(
        record="engine:kvctl_rejections:rate5m",
        expr=f"sum by ({_ENGINE}) (rate(kvctl_rejections_total[5m]))",
    ),
    Recording(
        record="engine:kvctl_queue_wait_p95_seconds:rate5m",
        expr=_quantile("kvctl_queue_wait_seconds", _ENGINE),
    ),
    Recording(
        record="instance:kvctl_ttft_p95_seconds:rate5m",
        expr=_quantile("kvctl_upstream_ttft_seconds", _INSTANCE),
    ),
    Recording(
        record="instance:kvctl_event_loop_lag_p95_seconds:rate5m",
        expr=_quantile("kvctl_event_loop_lag_seconds", _INSTANCE),
    ),
    *(
        Recording(record=f"engine:kvctl_refused:ratio_rate{window}", expr=_refused(window))
        for window in WINDOWS
    ),
    *(
        Recording(record=f"instance:kvctl_ttft_late:ratio_rate{window}", expr=_late(window))
        for window in WINDOWS
    ),
)
