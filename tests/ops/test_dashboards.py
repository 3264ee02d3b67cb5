import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grafana import generate
from grafana.boards import BOARDS
from grafana.generate import dashboard, expression
from grafana.panels_overview import OVERVIEW
from grafana.rules import Panel, PanelError, Query, check, metrics_of
from kvctl.metrics import CATALOG
from tests.ops.grafana_schema import DASHBOARD, complaints

FOLDER = Path(generate.__file__).parent
MADE = {board.uid: dashboard(board) for board in BOARDS}
SHOWN = [panel for made in MADE.values() for panel in made["panels"] if panel["type"] != "row"]
each_board = pytest.mark.parametrize("board", MADE.values(), ids=list(MADE))
GOOD = Panel(
    title="t", about="About.", unit="short", queries=(Query(expr="sum(kvctl_leases{})", legend="{{engine}}"),)
)


def everything(node: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value in the JSON."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield key, value
            yield from everything(value)
    elif isinstance(node, list):
        for value in node:
            yield from everything(value)


@pytest.mark.parametrize("name", generate.files())
def test_the_file_is_what_the_generator_writes(name: str) -> None:
    assert (FOLDER / name).read_text() == generate.files()[name], "run: python -m grafana.generate"


@each_board
def test_it_is_of_grafanas_classic_model(board: dict[str, Any]) -> None:
    assert list(complaints(board, DASHBOARD)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"panels": [{"type": "gauge3d"}]}, "panels[0].type"),
        ({"titel": "x"}, "titel"),
        ({"title": 1}, "title"),
        ({"schemaVersion": 38}, "schemaVersion"),
    ],
)
def test_what_is_not_of_the_model_is_found(change: dict[str, Any], said: str) -> None:
    assert said in "\n".join(complaints(MADE["kvctl-overview"] | change, DASHBOARD))


@each_board
def test_identity(board: dict[str, Any]) -> None:
    """F15, F14: stable uid, no numeric id, no __inputs, a schema that Grafana 10 takes."""
    assert board["schemaVersion"] == 39
    assert {"kvctl", "vllm"} <= set(board["tags"])
    assert "id" not in board
    assert "__inputs" not in board


def test_the_uids_are_those_that_links_know() -> None:
    assert list(MADE) == ["kvctl-overview", "kvctl-admission", "kvctl-engine"]


@each_board
def test_no_datasource_but_the_variable(board: dict[str, Any]) -> None:
    """F14, F15: every datasource is the variable, nowhere a literal uid."""
    sources = [value for key, value in everything(board) if key == "datasource"]
    assert len(sources) > len(board["panels"])
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert [uid for key, uid in everything(board) if key == "uid"].count("${datasource}") == len(sources)


@each_board
def test_variables_narrow_one_another(board: dict[str, Any]) -> None:
    """F14: the first variable is of type datasource."""
    variables = board["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "job", "instance", "engine"]
    assert variables[0]["type"] == "datasource"
    assert "$job" in variables[2]["definition"]
    assert "$instance" in variables[3]["definition"]


@pytest.mark.parametrize("panel", SHOWN, ids=lambda panel: str(panel["title"]))
def test_every_panel_is_complete(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    assert defaults["noValue"]
    names = [name for target in panel["targets"] for name in metrics_of(target["expr"])]
    assert panel["description"].endswith(names[-1])
    assert set(names) <= set(re.split(r"[ ,]+", panel["description"]))
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH")[: len(panel["targets"])]


@pytest.mark.parametrize("panel", SHOWN, ids=lambda panel: str(panel["title"]))
def test_rates_have_points_at_scrapes_of_a_minute(panel: dict[str, Any]) -> None:
    """F16: every rate has a minimum step that fits scrapes of 60 s."""
    for target in panel["targets"]:
        if "rate_interval" in target["expr"]:
            # Grafana: $__rate_interval is at least four times the query's least step, where it has one
            window = 4 * {"1m": 60, "15s": 15}[target["interval"]]
            assert window >= 2 * 60 + 60
        else:
            assert "interval" not in target  # gauges are shown as finely as they are scraped


@pytest.mark.parametrize("panel", SHOWN, ids=lambda panel: str(panel["title"]))
def test_every_query_is_bound_to_the_variables(panel: dict[str, Any]) -> None:
    """F16: windows are the rate-interval variable, never fixed."""
    for target in panel["targets"]:
        selectors = re.findall(r"kvctl_\w+\{([^}]*)\}", target["expr"])
        assert selectors
        assert all('job=~"$job", instance=~"$instance"' in selector for selector in selectors)
        assert len(re.findall(r"kvctl_\w+", target["expr"])) == len(selectors)
        assert re.findall(r"\[(.*?)\]", target["expr"]) == ["$__rate_interval"] * target["expr"].count("[")


@each_board
def test_ids_are_unique_and_nothing_overlaps(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_first_row_is_what_the_daemon_exists_for() -> None:
    first = next(iter(OVERVIEW))
    shown = {name for panel in first.panels for query in panel.queries for name in metrics_of(query.expr)}
    assert {
        "kvctl_budget_tokens",
        "kvctl_forecast_peak_tokens",
        "kvctl_capacity_tokens",
        "kvctl_engine_kv_usage_ratio",
        "kvctl_rejections_total",
        "kvctl_retry_after_seconds",
        "kvctl_margin_ratio",
    } <= shown


@each_board
def test_annotations_ask_for_known_metrics(board: dict[str, Any]) -> None:
    for annotation in board["annotations"]["list"]:
        assert metrics_of(annotation["expr"])


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        ("sum(kvctl_budget_tokenz{})", "exports no metric kvctl_budget_tokenz"),
        ("sum(kvctl_budget_tokens_bucket{})", "exports no metric kvctl_budget_tokens_bucket"),
        ("sum(up{})", "asks for nothing of kvctl"),
        ("sum by (engine) (rate(kvctl_leases{}[$__rate_interval]))", "kvctl_leases is a gauge, rated"),
        ("sum by (engine) (kvctl_admissions_total{})", "kvctl_admissions_total is a counter, not rated"),
        ("sum(rate(kvctl_admissions_total{}[1m]))", "not rated"),
        ("sum by (engine) (kvctl_engine_kv_usage_ratio{})", "must not be summed"),
        ("sum by (engine) (kvctl_held_tokens{}) / sum by (engine) (kvctl_leases{})", "not guarded"),
        ("sum by (engin) (kvctl_leases{})", "engin is no label"),
    ],
)
def test_a_panel_that_would_be_empty_or_wrong_fails(expr: str, message: str) -> None:
    """F17: rated gauges, unrated counters and summed ratios do not get into a dashboard."""
    check(GOOD)
    with pytest.raises(PanelError, match=message):
        check(replace(GOOD, queries=(Query(expr=expr, legend=""),)))


def test_a_legend_with_a_label_that_is_not_there_fails() -> None:
    with pytest.raises(PanelError, match="reason is no label"):
        check(replace(GOOD, queries=(replace(GOOD.queries[0], legend="{{reason}}"),)))


@pytest.mark.parametrize("field", ["unit", "about", "queries"])
def test_a_panel_without_a_field_fails(field: str) -> None:
    with pytest.raises(PanelError, match="needed"):
        check(replace(GOOD, **{field: type(getattr(GOOD, field))()}))


def test_the_engine_is_selected_only_where_it_is_a_label() -> None:
    of_engine = Query(expr="sum(kvctl_leases{})", legend="")
    assert 'engine=~"$engine"' in expression(of_engine)
    of_daemon = Query(expr="max(kvctl_telemetry_up{})", legend="")
    assert "engine" not in expression(of_daemon).replace("$engine", "")
    assert "engine" not in CATALOG["kvctl_telemetry_up"].labels


def test_provisioning_fixes_no_datasource_uid() -> None:
    """F14: provisioned from disk with any datasource uid."""
    for path in FOLDER.glob("provisioning/**/*.yml"):
        assert not re.search(r"^\s*uid:", path.read_text(), re.MULTILINE)


def test_nothing_of_another_time_lies_about() -> None:
    made = {name.removeprefix("dashboards/") for name in generate.files() if name.startswith("dashboards/")}
    assert {path.name for path in (FOLDER / "dashboards").iterdir()} == made
