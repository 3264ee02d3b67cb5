"""A real Prometheus reads the page, and Grafana's queries get answers from it.

It scrapes two pages: one behind which everything happened once, and a real kvctl under load.
"""

import math
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from grafana.boards import BOARDS
from grafana.generate import dashboard, expression
from grafana.panels_overview import OVERVIEW
from grafana.rules import Panel, Query
from kvctl.metrics import CONTENT_TYPE
from tests.ops.fed import Fed, fed
from tests.ops.prometheus import (
    MISSING,
    PROGRAM,
    PROMTOOL,
    RATE,
    Prometheus,
    expand,
    fetch,
    scraping,
    serving,
)
from tests.ops.stage import loaded_kvctl

PANELS = [panel for board in BOARDS for row in board.rows for panel in row.panels]
NAMES = [f"{board.uid}: {panel.title}" for board in BOARDS for row in board.rows for panel in row.panels]
CONFIG = Path(__file__).parent.parent.parent / "grafana" / "prometheus" / "prometheus.yml"
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=MISSING)


def promtool_check(page: bytes) -> tuple[int, str]:
    check = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=page, capture_output=True, check=False, timeout=120
    )
    return check.returncode, (check.stdout + check.stderr).decode()


@needs_promtool
@pytest.mark.parametrize("made", [Fed, fed], ids=["at the start", "after everything"])
def test_promtool_finds_nothing_to_say(made: Callable[[], Fed]) -> None:
    """F17: names and units as promtool wants them."""
    assert promtool_check(made().metrics.render()) == (0, "")


@needs_promtool
def test_promtool_would_say_it() -> None:
    status, text = promtool_check(b"# TYPE kvctl_odd counter\nkvctl_odd 1\n")
    assert status
    assert "kvctl_odd" in text


@needs_promtool
def test_the_shipped_scrape_configuration_is_valid() -> None:
    command = [str(PROMTOOL), "check", "config", str(CONFIG)]
    check = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert check.returncode == 0, check.stderr.decode()


@pytest.fixture(scope="module")
def kvctl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the page of a loaded kvctl."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    with loaded_kvctl(tmp_path_factory.mktemp("kvctl")) as url:
        yield url


@pytest.fixture(scope="module")
def prometheus(kvctl: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the loaded kvctl, and a page behind which everything happened."""
    made, lock = fed(), threading.Lock()

    def page() -> bytes:
        with lock:
            made.answers(2, 20)
            return made.metrics.render()

    with ExitStack() as stack:
        everything = stack.enter_context(serving(page, CONTENT_TYPE))
        folder = tmp_path_factory.mktemp("prometheus")
        server = stack.enter_context(scraping({"everything": everything, "kvctl": kvctl}, folder))
        refused = f'rate(kvctl_rejections_total{{job="kvctl",reason="kv_budget"}}[{RATE}]) > 0'
        finished = f'rate(kvctl_leases_ended_total{{job="kvctl"}}[{RATE}]) > 0'
        server.stop_at(lambda: all(server.query(each) for each in (refused, finished, "sum(up) == 2")))
        yield server


def asked(query: Query, job: str) -> str:
    """The query for one job, without what hides series that are at rest."""
    return re.sub(r" (> 0|== 1)$", "", expand(expression(query), job))


def test_pages_are_scraped_without_complaint(prometheus: Prometheus) -> None:
    prometheus.wait(lambda: all((t["health"], t["lastError"]) == ("up", "") for t in prometheus.targets()))


@needs_promtool
def test_promtool_on_the_page_of_a_loaded_kvctl(kvctl: str, prometheus: Prometheus) -> None:
    del prometheus  # it waited for the load
    assert promtool_check(fetch(kvctl)) == (0, "")


@pytest.mark.parametrize("panel", PANELS, ids=NAMES)
def test_every_query_of_every_panel_has_series(prometheus: Prometheus, panel: Panel) -> None:
    for query in panel.queries:
        assert prometheus.query(asked(query, "everything")), query.expr
        prometheus.query(expand(expression(query), "everything"))  # as it is: it parses


@pytest.mark.parametrize("panel", PANELS, ids=NAMES)
def test_every_panel_shows_a_loaded_kvctl(prometheus: Prometheus, panel: Panel) -> None:
    for query in panel.queries:
        assert prometheus.query(asked(query, "kvctl")) or panel.empty, query.expr


def test_the_first_row_shows_numbers_of_a_loaded_kvctl(prometheus: Prometheus) -> None:
    for panel in next(iter(OVERVIEW)).panels:
        for query in panel.queries:
            values = [float(series["value"][1]) for series in prometheus.query(asked(query, "kvctl"))]
            assert any(not math.isnan(value) for value in values), query.expr


def test_every_legend_has_its_labels(prometheus: Prometheus) -> None:
    for panel in PANELS:
        for query in panel.queries:
            labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            found = prometheus.query(asked(query, "everything"))
            named = set().union(
                *(series["metric"] for series in found)
            )  # of a series, empty labels are not kept
            assert labels <= named, panel.title


def test_shares_are_shares(prometheus: Prometheus) -> None:
    """F17: no panel in per cent leaves 0..1 on a real Prometheus."""
    for query in (query for panel in PANELS if panel.unit == "percentunit" for query in panel.queries):
        for series in prometheus.query(expand(expression(query), ".*")):
            value = float(series["value"][1])
            assert math.isnan(value) or 0 <= value <= 1, query.expr


def test_variables_select(prometheus: Prometheus) -> None:
    query = Query(expr="kvctl_build_info{}", legend="")
    assert len(prometheus.query(expand(expression(query), ".*"))) == 2
    assert len(prometheus.query(expand(expression(query), "kvctl"))) == 1


def test_annotations_parse(prometheus: Prometheus) -> None:
    for annotation in dashboard(BOARDS[0])["annotations"]["list"]:
        prometheus.query(expand(annotation["expr"], ".*"))
