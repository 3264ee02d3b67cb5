"""Alerts fire and clear in a real Prometheus that scrapes kvctl's own page: those that take hours to provoke.

What the page tells is played: a certificate near its end, a program that failed on a card, a drain that was
forgotten. The page, the rules (their windows and holds shortened) and Prometheus are the real ones.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from kvctl.core.events import LeftQueue
from kvctl.core.outcomes import EngineState, Priority
from kvctl.gpu.faults import CardEvent, EventKind
from kvctl.metrics import CONTENT_TYPE, ConfigView
from tests.ops.fed import ENGINE, Counting, Fed
from tests.ops.prometheus import MISSING, PROGRAM, Prometheus, scraping, serving
from tests.ops.test_alerts_live import PATIENCE_S, shortened, wait_for

DAY = 86400.0
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]


class Played:
    """A page on which all is well, or what ``trouble`` names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fed = Fed()
        self._fed.scrape()
        self._fed.card()
        self._preemptions = self._generated = 0.0
        self._trouble = ""
        self.trouble("")

    def trouble(self, name: str) -> None:
        """What is wrong from now on; "": nothing."""
        with self._lock:
            self._trouble = name
            days = {"certificate": 20.0, "certificate soon": 2.0}.get(name, 90.0)
            ends = {("listen", ""): time.time() + days * DAY}
            self._fed.metrics.config = lambda: ConfigView(certificate_ends=ends)
            self._fed.metrics.counting = Counting(doubted=name == "counting")
            self._fed.metrics.add_engine(ENGINE, self._status)

    def page(self) -> bytes:
        """A second later."""
        with self._lock:
            self._happens()
            return self._fed.metrics.render()

    def _status(self) -> Any:
        shown: dict[str, Any] = {
            "starting": {"state": EngineState.STARTING},
            "wedged": {"state": EngineState.WEDGED},
            "stale": {"state": EngineState.STALE},
            "drained": {"draining": True},
            "forecast": {"forecast_exceeded_ratio": 0.3},
        }
        return replace(self._fed.gate.status(self._fed.now), **shown.get(self._trouble, {}))

    def _happens(self) -> None:
        made, metrics, trouble = self._fed, self._fed.metrics, self._trouble
        self._preemptions += 2.0 * (trouble == "preemptions")
        self._generated += 40.0
        made.scrape(
            preemptions_total=self._preemptions,
            generation_tokens_total=self._generated,
            kv_usage_ratio=self._generated % 1000 / 1e4,
        )
        made.answers(2, 20)
        if trouble == "program":
            metrics.card_event(CardEvent(uuids=("GPU-0",), kind=EventKind.XID_APPLICATION))
        for _ in range(5):
            metrics.first_token(20.0 if trouble == "late" else 0.1)
            metrics.ticked(0.001, 0.5 if trouble == "overrun" else 0.001, overrun=trouble == "overrun")
            waited = 30.0 if trouble == "queue" else 0.01
            for count, kinds in metrics.gate(ENGINE).interests:
                if LeftQueue in kinds:
                    count(_left(waited))


def _left(waited_s: float) -> LeftQueue:
    return LeftQueue(request_id="l", priority=Priority.HIGH, waited_s=waited_s)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Played, Prometheus]]:
    played, folder = Played(), tmp_path_factory.mktemp("prometheus")
    with ExitStack() as stack:
        url = stack.enter_context(serving(played.page, CONTENT_TYPE))
        rules = [shortened(name, folder) for name in ("kvctl.rules.yml", "kvctl.alerts.yml")]
        yield played, stack.enter_context(scraping({"kvctl": url}, folder, rules))


@pytest.mark.parametrize(
    ("trouble", "alerts"),
    [
        ("program", ["KvctlGpuProgramFault"]),
        ("certificate", ["KvctlCertificateExpires"]),
        ("certificate soon", ["KvctlCertificateExpires", "KvctlCertificateExpiresSoon"]),
        ("drained", ["KvctlDrainLongLived"]),
        ("starting", ["KvctlEngineNotStarting"]),
        ("wedged", ["KvctlEngineWedged"]),
        ("stale", ["KvctlTelemetryStale"]),
        ("preemptions", ["KvctlPreemptionsWhileAdmitting"]),
        ("forecast", ["KvctlForecastUnderestimates"]),
        ("queue", ["KvctlQueueWaitHigh"]),
        ("counting", ["KvctlCountingDrifts"]),
        ("overrun", ["KvctlControlLoopOverrun"]),
        ("late", ["KvctlTtftBudgetBurnsFast", "KvctlTtftBudgetBurns"]),
    ],
)
def test_it_fires_and_clears(world: tuple[Played, Prometheus], trouble: str, alerts: list[str]) -> None:
    played, prometheus = world
    prometheus.wait(lambda: not set(alerts) & prometheus.firing().keys(), PATIENCE_S)
    played.trouble(trouble)
    wait_for(prometheus, *alerts)
    played.trouble("")
    prometheus.wait(lambda: not set(alerts) & prometheus.firing().keys(), PATIENCE_S)
