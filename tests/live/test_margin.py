"""On-call's one knob moves the budget, and with it the threshold of the 429s."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.live.conftest import StartDaemon
from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine, forced_length
from tests.live.model import NAME
from tests.live.wire import Answer, open_request, post

CAPACITY = 999 * 32


@pytest.fixture(scope="module")
def static(engine: Engine, start_daemon: StartDaemon) -> Daemon:
    """Worst-case claims against the budget: what fits is plain arithmetic."""
    daemon = start_daemon(engine, POLICY="static", MARGIN="10%")
    daemon.wait_ready()
    return daemon


@contextmanager
def held(daemon: Daemon) -> Iterator[None]:
    """A lease of about 6,000 KV tokens inside, so that nothing else would run alone."""
    body = {"model": NAME, "prompt": "hi", "max_tokens": 6000, "stream": True} | forced_length(6000)
    with open_request(daemon.base_url, "/v1/completions", body):
        eventually(lambda: daemon.metric("leases") == 1, 5, "it holds a lease")
        yield
    eventually(lambda: daemon.metric("leases") == 0, 5, "the lease is gone with its client")


def big(daemon: Daemon) -> Answer:
    """Claims about 14,000 KV tokens and is done in a moment."""
    body = {"model": NAME, "prompt": ["one", "two"], "max_tokens": 7000}
    return post(daemon.base_url + "/v1/completions", body | forced_length(2))


def set_margin(daemon: Daemon, margin: str) -> None:
    """The budget is another one as soon as the command has ended: no poll lies between."""
    daemon.command("set", "margin", margin, "--for", "30m", "--reason", "live test")
    assert abs(daemon.metric("budget_tokens") - CAPACITY * (1 - float(margin.rstrip("%")) / 100)) <= 1


def test_margin_moves_the_threshold(static: Daemon) -> None:
    with held(static):
        assert big(static).status == 200
    set_margin(static, "50%")
    with held(static):
        refused = big(static)
    assert refused.status == 429
    assert refused.headers["x-kvctl-reason"] == "kv_budget"
    assert int(refused.headers["retry-after"]) >= 1
    assert 0 < int(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"])
    set_margin(static, "12%")
    with held(static):
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
