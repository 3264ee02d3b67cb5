"""What the data plane did, on the metrics page."""

import pytest

from kvctl.core.outcomes import EndReason, RejectReason
from kvctl.metrics import Metrics
from kvctl.proxy.seams import Served
from kvctl.proxy_metrics import ProxyReports


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="t", routes=("chat",))


def served(
    status: int,
    end: EndReason | None = None,
    reject: RejectReason | None = None,
    first_byte_s: float | None = None,
) -> Served:
    return Served(
        request_id="r",
        method="POST",
        route="chat",
        status=status,
        seconds=1.0,
        end=end,
        reject=reject,
        first_byte_s=first_byte_s,
    )


def outcome(metrics: Metrics, word: str) -> bytes:
    start = b'kvctl_requests_total{outcome="%b",route="chat"} ' % word.encode()
    return metrics.render().partition(start)[2].partition(b"\n")[0]


def test_own_refusals_are_told_from_the_engines(metrics: Metrics) -> None:
    """E20: 429 by the gate and 429 by the engine are two outcomes; only the engine's is an upstream error."""
    reports = ProxyReports(metrics)
    reports.served(served(429, reject=RejectReason.KV_BUDGET))
    for _ in range(2):
        reports.served(served(429, EndReason.ENGINE_REFUSED, first_byte_s=0.1))
    assert (outcome(metrics, "reject_later"), outcome(metrics, "engine_refused")) == (b"1.0", b"2.0")
    assert b'kvctl_upstream_errors_total{kind="status"} 2.0' in metrics.render()


def test_clients_that_leave_are_counted_by_when(metrics: Metrics) -> None:
    """B01: eight calls that were dropped are eight disconnects."""
    reports = ProxyReports(metrics)
    for _ in range(5):
        reports.served(served(0, EndReason.CLIENT_GONE))
    for _ in range(3):
        reports.served(served(200, EndReason.CLIENT_GONE, first_byte_s=0.1))
    page = metrics.render()
    assert b'kvctl_client_disconnects_total{phase="waiting"} 5.0' in page
    assert b'kvctl_client_disconnects_total{phase="streaming"} 3.0' in page
    assert outcome(metrics, "client_gone") == b"8.0"


def test_an_error_inside_a_good_answer_is_no_finished_one(metrics: Metrics) -> None:
    """B08: status 200, but the first event was an error: counted as the engine's refusal."""
    ProxyReports(metrics).served(served(200, EndReason.ENGINE_REFUSED, first_byte_s=0.1))
    assert (outcome(metrics, "finished"), outcome(metrics, "engine_refused")) == (b"0.0", b"1.0")


@pytest.mark.parametrize(
    ("status", "first_byte_s", "word"),
    [
        (200, 0.1, "passed"),
        (400, None, "bad_request"),
        (404, None, "not_found"),
        (413, None, "bad_request"),
        (500, None, "other"),
        (500, 0.1, "engine_error"),
        (502, None, "engine_error"),
        (503, None, "unavailable"),
        (503, 0.1, "engine_error"),
        (504, None, "timeout"),
    ],
)
def test_what_the_engine_failed_at_is_not_the_callers_fault(
    metrics: Metrics, status: int, first_byte_s: float | None, word: str
) -> None:
    """/v1/models before a dead engine is no bad request."""
    ProxyReports(metrics).served(served(status, first_byte_s=first_byte_s))
    assert outcome(metrics, word) == b"1.0"
