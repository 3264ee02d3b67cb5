"""Envoy's load report: a response header from which its client-side weighted round robin takes its weights.

    endpoint-load-metrics: TEXT application_utilization=0.83,rps_fractional=12.5,eps=0,named_metrics....

One NaN or one unknown key and the reader throws the whole report away, so every figure is checked here; the
rate must be above 0 for the report to count.
"""

from collections import deque
from math import isfinite

from kvctl.fleet.standing import LEAST_RATE, Standing

HEADER = "endpoint-load-metrics"
FAIL_HEADER = ("x-envoy-immediate-health-check-fail", "true")
"""On every answer of a draining box: Envoy takes it out at once instead of at the next health check."""

WINDOW_S = 10.0


class RequestRate:
    """Admitted requests a second over the last seconds, for the report."""

    def __init__(self) -> None:
        self._admitted: deque[float] = deque()

    def admitted(self, now: float) -> None:
        """A request was let in."""
        self._admitted.append(now)
        self._forget(now)

    def per_second(self, now: float) -> float:
        """Over the window."""
        self._forget(now)
        return len(self._admitted) / WINDOW_S

    def _forget(self, now: float) -> None:
        while self._admitted and self._admitted[0] < now - WINDOW_S:
            self._admitted.popleft()


def load_report(standing: Standing, requests_per_s: float) -> str:
    """The header's value."""
    figures: dict[str, float | None] = {
        "application_utilization": max(standing.forecast_ratio, 0.0),
        "rps_fractional": max(requests_per_s, LEAST_RATE),
        "eps": 0.0,
        "named_metrics.kv_cache_usage_perc": standing.usage_ratio,
        "named_metrics.kv_headroom_tokens": float(standing.headroom_tokens),
    }
    told = {name: value for name, value in figures.items() if value is not None and isfinite(value)}
    return "TEXT " + ",".join(f"{name}={value:.6g}" for name, value in told.items())
