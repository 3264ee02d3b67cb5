"""The alerts: what wakes somebody (``page``) and what waits for the morning (``ticket``)."""

from grafana.alerting import Alert, Series, Story
from grafana.recordings import ADMISSION_OBJECTIVE, TTFT_OBJECTIVE, TTFT_TARGET_S

JOB = ".*kvctl.*"
_AT = 'job="kvctl", instance="box:9109"'
_ENGINE = f'{_AT}, engine="e"'


def _while(name: str, bad: float, good: float = 0.0, labels: str = _ENGINE, *, minutes: int = 20) -> Story:
    """A gauge that is good for five minutes, bad for ``minutes``, and good again."""
    values = f"{good:g}x4 {bad:g}x{minutes - 1} {good:g}x60"
    return Story(
        series=(Series(name=f"{name}{{{labels}}}", values=values),),
        fires=f"{4 + minutes}m",
        over=f"{minutes + 30}m",
    )


def _state(word: str, *, minutes: int = 20) -> Story:
    return _while("kvctl_engine_state", 1, 0, f'{_ENGINE}, state="{word}"', minutes=minutes)


def _counters(*series: tuple[str, str], fires: str, over: str) -> Story:
    return Story(
        series=tuple(Series(name=name, values=values) for name, values in series), fires=fires, over=over
    )


_ENGINE_BY = "job, instance, engine"


_LEFT = (
    "min by (job, instance, certificate, engine) (kvctl_tls_certificate_expiry_timestamp_seconds) - time()"
)


def _expiry(*, calm_days: int, days: int) -> Story:
    """A certificate with ``calm_days`` left, another with ``days``, and the renewed one. Time begins at 0."""
    values = f"{calm_days * 86400}x4 {days * 86400}x19 {60 * 86400}x60"
    name = f'kvctl_tls_certificate_expiry_timestamp_seconds{{{_AT}, certificate="listen"}}'
    return Story(series=(Series(name=name, values=values),), fires="24m", over="50m")


def _in_state(*words: str) -> str:
    return f'max by ({_ENGINE_BY}) (kvctl_engine_state{{state=~"{"|".join(words)}"}}) == 1'


_AVAILABILITY = (
    Alert(
        name="KvctlDown",
        expr=f'up{{job=~"{JOB}"}} == 0 or absent(up{{job=~"{JOB}"}})',
        hold="1m",
        severity="page",
        summary="kvctl on {{ $labels.instance }} does not answer",
        description="Prometheus cannot scrape it. If the process is gone, callers get connection errors "
        "unless the load balancer has its backup server.",
        story=Story(series=(Series(name=f"up{{{_AT}}}", values="1x4 0x9 1x30"),), fires="8m", over="20m"),
    ),
    Alert(
        name="KvctlEngineUnreachable",
        expr=_in_state("unreachable", "fault"),
        hold="1m",
        severity="page",
        summary="the engine {{ $labels.engine }} cannot be reached",
        description="Every request is refused with 503 until the engine answers again.",
        story=_state("unreachable"),
    ),
    Alert(
        name="KvctlEngineNotStarting",
        expr=_in_state("starting", "asleep"),
        hold="15m",
        severity="ticket",
        summary="the engine {{ $labels.engine }} was not seen serving for 15 minutes",
        description="kvctl waits for the first answer of an engine that loads, or it was put to sleep.",
        story=_state("starting", minutes=25),
    ),
    Alert(
        name="KvctlEngineWedged",
        expr=_in_state("wedged"),
        hold="0s",
        severity="page",
        summary="the engine {{ $labels.engine }} runs requests and makes no token",
        description="Its counters stand still with requests in flight for longer than stall_timeout.",
        story=_state("wedged"),
    ),
    Alert(
        name="KvctlTelemetryStale",
        expr=_in_state("stale", "no_telemetry"),
        hold="2m",
        severity="ticket",
        summary="the engine {{ $labels.engine }} is judged without its metrics",
        description="Its page is late or has nothing to judge by: the budget is the fallback or a guess.",
        story=_state("stale"),
    ),
    Alert(
        name="KvctlGpuFault",
        expr="max by (job, instance, gpu) (kvctl_gpu_lost) == 1 or "
        "sum by (job, instance, gpu) (increase(kvctl_gpu_ecc_uncorrected_errors_total[15m])) > 0 or "
        'sum by (job, instance, gpu) (increase(kvctl_gpu_events_total{kind=~"xid_fatal|ecc_uncorrected"}'
        "[15m])) > 0",
        hold="0s",
        severity="page",
        summary="the card {{ $labels.gpu }} of {{ $labels.instance }} is lost or has failed",
        description="It fell off the bus, counted uncorrected memory errors, or its driver told of a fatal "
        "Xid in the last 15 minutes.",
        story=_while("kvctl_gpu_lost", 1, 0, f'{_AT}, gpu="GPU-0"'),
        other=(
            _counters(
                (f'kvctl_gpu_ecc_uncorrected_errors_total{{{_AT}, gpu="GPU-0"}}', "0x4 2x60"),
                fires="8m",
                over="30m",
            ),
            _counters(
                (f'kvctl_gpu_events_total{{{_AT}, gpu="GPU-0", kind="xid_fatal"}}', "0x4 1x60"),
                (f'kvctl_gpu_events_total{{{_AT}, gpu="GPU-0", kind="xid_application"}}', "0+1x65"),
                fires="8m",
                over="30m",
            ),
            _counters(
                (f'kvctl_gpu_events_total{{{_AT}, gpu="unknown", kind="ecc_uncorrected"}}', "0x4 1x60"),
                (f'kvctl_gpu_events_total{{{_AT}, gpu="GPU-0", kind="ecc_corrected"}}', "0+1x65"),
                fires="8m",
                over="30m",
            ),
        ),
    ),
    Alert(
        name="KvctlGpuProgramFault",
        expr="sum by (job, instance, gpu) "
        '(increase(kvctl_gpu_events_total{kind="xid_application"}[15m])) > 0',
        hold="0s",
        severity="ticket",
        summary="a program on the card {{ $labels.gpu }} of {{ $labels.instance }} failed or was ended",
        description="The driver told of an Xid that is one program's own in the last 15 minutes. If it was "
        "the engine, KvctlEngineUnreachable or KvctlEngineWedged follows.",
        story=_counters(
            (f'kvctl_gpu_events_total{{{_AT}, gpu="GPU-0", kind="xid_application"}}', "0x4 1x60"),
            (f'kvctl_gpu_events_total{{{_AT}, gpu="GPU-0", kind="xid_other"}}', "0+1x65"),
            fires="8m",
            over="30m",
        ),
    ),
    Alert(
        name="KvctlGpuMemoryLow",
        expr='min by (job, instance, engine) (kvctl_pressure_ratio{term="gpu_memory"}) < 1',
        hold="5m",
        severity="ticket",
        summary="a card under {{ $labels.engine }} has less free memory than gpu_guard",
        description="Something beside the engine takes its memory; the budget is at "
        "{{ $value | humanizePercentage }} for it. The next large prompt may kill the engine.",
        story=_while("kvctl_pressure_ratio", 0.4, 1, f'{_ENGINE}, term="gpu_memory"'),
    ),
)

_ADMISSION = (
    Alert(
        name="KvctlPreemptionsWhileAdmitting",
        expr="engine:kvctl_preemptions:increase5m >= 3 and engine:kvctl_admissions:rate5m > 0",
        hold="5m",
        severity="ticket",
        summary="the engine {{ $labels.engine }} preempts what kvctl admits",
        description="{{ $value | humanize }} preemptions in 5 minutes: more is in the pool than forecast.",
        story=_counters(
            (f'kvctl_engine_preemptions_total{{{_ENGINE}, rank="0"}}', "0x4 4+4x20 88x60"),
            (f"kvctl_admissions_total{{{_ENGINE}}}", "0+60x90"),
            fires="18m",
            over="45m",
        ),
    ),
    Alert(
        name="KvctlBudgetAtFloor",
        expr="engine:kvctl_pressure:min <= 0.5",
        hold="10m",
        severity="ticket",
        summary="pressure holds the budget of {{ $labels.engine }} at {{ $value | humanizePercentage }}",
        description="A term of kvctl_pressure_ratio is at its floor: preemptions, GPU memory or telemetry.",
        story=_while("kvctl_pressure_ratio", 0.5, 1, f'{_ENGINE}, term="preemption"'),
    ),
    Alert(
        name="KvctlRejectRatioHigh",
        expr="engine:kvctl_refused:ratio_rate5m > 0.2 and engine:kvctl_rejections:rate5m > 0.1",
        hold="10m",
        severity="ticket",
        summary="{{ $value | humanizePercentage }} of the requests for {{ $labels.engine }} are refused",
        description="For ten minutes now. Which limit refuses them: kvctl_rejections_total by reason.",
        story=_counters(
            (f'kvctl_rejections_total{{{_ENGINE}, reason="kv_budget"}}', "0x4 60+60x20 1260x60"),
            (f"kvctl_admissions_total{{{_ENGINE}}}", "0+60x90"),
            fires="22m",
            over="45m",
        ),
    ),
)

_QUEUE = (
    Alert(
        name="KvctlForecastUnderestimates",
        expr="max by (job, instance, engine) (kvctl_forecast_exceeded_ratio) > 0.1",
        hold="10m",
        severity="ticket",
        summary="more was held for {{ $labels.engine }} than forecast, in {{ $value | humanizePercentage }}",
        description="Answers grow longer than history says; the gate admits more than it should.",
        story=_while("kvctl_forecast_exceeded_ratio", 0.3),
    ),
    Alert(
        name="KvctlQueueWaitHigh",
        expr="engine:kvctl_queue_wait_p95_seconds:rate5m > 5",
        hold="5m",
        severity="ticket",
        summary="requests for {{ $labels.engine }} wait {{ $value | humanizeDuration }} before they start",
        description="The 95th percentile of the time in kvctl's own queue, over five minutes.",
        story=_counters(
            (f'kvctl_queue_wait_seconds_bucket{{{_ENGINE}, le="1.0"}}', "0+60x4 240x20 240+60x60"),
            (f'kvctl_queue_wait_seconds_bucket{{{_ENGINE}, le="10.0"}}', "0+60x90"),
            (f'kvctl_queue_wait_seconds_bucket{{{_ENGINE}, le="+Inf"}}', "0+60x90"),
            fires="18m",
            over="45m",
        ),
    ),
)

_DAEMON = (
    Alert(
        name="KvctlBypassOn",
        expr='max by (job, instance, engine) (kvctl_mode{mode="bypass"}) == 1',
        hold="1m",
        severity="ticket",
        summary="kvctl lets everything through to {{ $labels.engine }}",
        description="On-call has switched the gate off for a while: nothing protects the KV pool.",
        story=_while("kvctl_mode", 1, 0, f'{_ENGINE}, mode="bypass"'),
    ),
    Alert(
        name="KvctlReloadFailed",
        expr="min by (job, instance) (kvctl_config_reload_success) == 0",
        hold="1m",
        severity="ticket",
        summary="kvctl on {{ $labels.instance }} refused its new settings",
        description="The old ones stay in force; the next restart would not come up with the new ones.",
        story=_while("kvctl_config_reload_success", 0, 1, _AT),
    ),
    Alert(
        name="KvctlCountingDrifts",
        expr="max by (job, instance) (kvctl_token_count_error_ratio) > 0.01 or "
        "max by (job, instance) (kvctl_tokenizer_doubted) == 1",
        hold="5m",
        severity="ticket",
        summary="kvctl on {{ $labels.instance }} counts other tokens than its engine",
        description="More than a hundredth of the compared tokens was miscounted, or the local tokenizer is "
        "set aside for it: prompts are counted by asking the engine.",
        story=_while("kvctl_tokenizer_doubted", 1, 0, _AT),
        other=(_while("kvctl_token_count_error_ratio", 0.05, 0.0, _AT),),
    ),
    Alert(
        name="KvctlControlLoopOverrun",
        expr="sum by (job, instance) (increase(kvctl_ticks_overrun_total[5m])) > 10 or "
        "instance:kvctl_event_loop_lag_p95_seconds:rate5m > 0.25",
        hold="5m",
        severity="ticket",
        summary="the control loop of kvctl on {{ $labels.instance }} is late",
        description="Ticks overrun, or the event loop wakes late: decisions and answers wait for the CPU.",
        story=_counters(
            (f"kvctl_ticks_overrun_total{{{_AT}}}", "0x4 10+10x20 210x60"), fires="15m", over="45m"
        ),
    ),
    Alert(
        name="KvctlOverrideLongLived",
        expr="min by (job, instance, knob) (kvctl_override_active) == 1",
        hold="8h",
        severity="ticket",
        summary="{{ $labels.knob }} is overridden on {{ $labels.instance }} for eight hours",
        description="What is right for so long belongs into the configuration, with a review.",
        story=_while("kvctl_override_active", 1, 0, f'{_AT}, knob="margin"', minutes=500),
    ),
    Alert(
        name="KvctlDrainLongLived",
        expr=f'max by ({_ENGINE_BY}) (kvctl_mode{{mode="draining"}}) == 1',
        hold="4h",
        severity="ticket",
        summary="{{ $labels.engine }} on {{ $labels.instance }} has been drained for four hours",
        description="A drain holds over restarts until somebody takes it back: this one may be forgotten.",
        story=_while("kvctl_mode", 1, 0, f'{_ENGINE}, mode="draining"', minutes=250),
    ),
    Alert(
        name="KvctlCertificateExpires",
        expr=f"{_LEFT} < 30 * 86400",
        hold="10m",
        severity="ticket",
        summary="the certificate {{ $labels.certificate }} of {{ $labels.instance }} ends within 30 days",
        description="It is good for {{ $value | humanizeDuration }} more. Renew the file, then kvctl reload.",
        story=_expiry(calm_days=40, days=20),
    ),
    Alert(
        name="KvctlCertificateExpiresSoon",
        expr=f"{_LEFT} < 3 * 86400",
        hold="10m",
        severity="page",
        summary="the certificate {{ $labels.certificate }} of {{ $labels.instance }} ends within 3 days",
        description="It is good for {{ $value | humanizeDuration }} more; after that handshakes fail. Renew "
        "the file, then kvctl reload.",
        story=_expiry(calm_days=20, days=2),
        other=(_expiry(calm_days=40, days=0),),
    ),
)


def _burn(  # one alert for each pair of windows
    name: str, recorded: str, objective: float, what: str, story: Story, *, page: bool
) -> Alert:
    """A multiwindow burn-rate alert: the long window for weight, the short one so that it clears soon."""
    budget = 1 - objective
    pairs = (("1h", "5m", 14.4), ("6h", "30m", 6.0)) if page else (("3d", "6h", 1.0),)
    spent = [
        f"({recorded}{long} > {burn * budget:.4g} and {recorded}{short} > {burn * budget:.4g})"
        for long, short, burn in pairs
    ]
    return Alert(
        name=name,
        expr=" or ".join(spent),
        hold="2m" if page else "1h",
        severity="page" if page else "ticket",
        summary=f"{what} on {{{{ $labels.instance }}}}: the error budget burns "
        + ("fast" if page else "faster than it grows"),
        description=f"{{{{ $value | humanizePercentage }}}} {what}; the objective allows {budget:.2g}.",
        story=story,
    )


_LATE = "instance:kvctl_ttft_late:ratio_rate"
_REFUSED = "engine:kvctl_refused:ratio_rate"
_SLOW = _counters(
    (f"kvctl_upstream_ttft_seconds_count{{{_AT}}}", "0+60x700"),
    (f'kvctl_upstream_ttft_seconds_bucket{{{_AT}, le="2.0"}}', "0+60x60 3600+30x60 5400+60x700"),
    fires="90m",
    over="400m",
)
_TURNED_AWAY = _counters(
    (f"kvctl_admissions_total{{{_ENGINE}}}", "0+60x60 3600+6x90 4140+60x700"),
    (f'kvctl_rejections_total{{{_ENGINE}, reason="kv_budget"}}', "0x60 0+54x90 4860x700"),
    fires="140m",
    over="600m",
)
_SLOWLY = _counters(
    (f"kvctl_upstream_ttft_seconds_count{{{_AT}}}", "0+60x1100"),
    (f'kvctl_upstream_ttft_seconds_bucket{{{_AT}, le="2.0"}}', "0+60x60 3600+57x440 28680+60x600"),
    fires="480m",
    over="1000m",
)
_SLOWLY_AWAY = _counters(
    (f"kvctl_admissions_total{{{_ENGINE}}}", "0+60x60 3600+50x440 25600+60x600"),
    (f'kvctl_rejections_total{{{_ENGINE}, reason="kv_budget"}}', "0x60 0+10x440 4400x600"),
    fires="480m",
    over="1000m",
)

_OBJECTIVES = (
    _burn(
        "KvctlTtftBudgetBurnsFast", _LATE, TTFT_OBJECTIVE,
        f"of answers begin after {TTFT_TARGET_S:g} s", _SLOW, page=True,
    ),
    _burn(
        "KvctlTtftBudgetBurns", _LATE, TTFT_OBJECTIVE,
        f"of answers begin after {TTFT_TARGET_S:g} s", _SLOWLY, page=False,
    ),
    _burn(
        "KvctlRefusalBudgetBurnsFast", _REFUSED, ADMISSION_OBJECTIVE,
        "of requests are refused", _TURNED_AWAY, page=True,
    ),
    _burn(
        "KvctlRefusalBudgetBurns", _REFUSED, ADMISSION_OBJECTIVE,
        "of requests are refused", _SLOWLY_AWAY, page=False,
    ),
)  # fmt: skip

GROUPS = {
    "kvctl-availability": _AVAILABILITY,
    "kvctl-admission": _ADMISSION + _QUEUE,
    "kvctl-daemon": _DAEMON,
    "kvctl-objectives": _OBJECTIVES,
}
ALERTS = tuple(alert for group in GROUPS.values() for alert in group)
