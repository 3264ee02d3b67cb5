"""On-call's one knob moves the budget, and with it the threshold of the 429s."""

import socket
import time
from collections.abc import Iterator

import pytest

from tests.live.conftest import StartDaemon
from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine, forced_length
from tests.live.model import NAME
from tests.live.wire import Answer, open_request, post

TWO_POLLS = 0.4
SLACK = 0.6
CAPACITY = 999 * 32


@pytest.fixture(scope="module")
def static(engine: Engine, start_daemon: StartDaemon) -> Daemon:
    """Worst-case claims against the budget: what fits is plain arithmetic."""
    daemon = start_daemon(engine, POLICY="static", MARGIN="10%")
    daemon.wait_ready()
    return daemon


@pytest.fixture
def holder(static: Daemon) -> Iterator[socket.socket]:
    """A lease of about 6,000 KV tokens, so that nothing else would run alone."""
    body = {"model": NAME, "prompt": "hi", "max_tokens": 6000, "stream": True} | forced_length(6000)
    with open_request(static.base_url, "/v1/completions", body) as connection:
        eventually(lambda: static.metric("leases") == 1, 5, "it holds a lease")
        yield connection


def big(daemon: Daemon) -> Answer:
    """Claims about 14,000 KV tokens and is done in a moment."""
    body = {"model": NAME, "prompt": ["one", "two"], "max_tokens": 7000}
    return post(daemon.base_url + "/v1/completions", body | forced_length(2))


def budget_after(daemon: Daemon, margin: str) -> float:
    """Seconds from the command's end until the budget is what the margin says."""
    daemon.command("set", "margin", margin, "--for", "30m", "--reason", "live test")
    began = time.monotonic()
    expected = CAPACITY * (1 - float(margin.rstrip("%")) / 100)
    eventually(lambda: abs(daemon.metric("budget_tokens") - expected) <= 1, 5, f"budget {expected:.0f}")
    return time.monotonic() - began


@pytest.mark.usefixtures("holder")
def test_margin_moves_the_threshold(static: Daemon) -> None:
    assert big(static).status == 200
    assert budget_after(static, "50%") < TWO_POLLS + SLACK
    refused = big(static)
    assert refused.status == 429
    assert refused.headers["x-kvctl-reason"] == "kv_budget"
    assert int(refused.headers["retry-after"]) >= 1
    assert 0 < int(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"])
    assert budget_after(static, "12%") < TWO_POLLS + SLACK
    assert big(static).status == 200
    assert static.metric("margin_ratio") == pytest.approx(0.12)
    assert static.metric("override_active", knob="margin") == 1


def test_status_tells(static: Daemon) -> None:
    assert "budget" in static.command("status").lower()
    (shown,) = static.status()["engines"].values()
    assert shown["budget_tokens"] == static.metric("budget_tokens")
    assert shown["margin_ratio"] == static.metric("margin_ratio")


def test_a_margin_out_of_bounds_changes_nothing(static: Daemon) -> None:
    before = static.metric("budget_tokens")
    static.command("set", "margin", "90%", "--for", "30m", "--reason", "live test", exit_status=4)
    assert static.metric("budget_tokens") == before
