"""``python -m grafana.generate`` writes dashboards/*.json, and Prometheus's rules, alerts and their tests.

Rules kept here: classic JSON, schemaVersion 39, fixed uid, no datasource but the variable,
``$__rate_interval`` with a least step of a minute (so that rates have points at 60 s scrapes, where the data
source is left at its default of 15 s), a unit, a description that ends with its metrics, and a text for "no
data" on every panel. The rest are in grafana/rules.py.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grafana import rule_files
from grafana.boards import BOARDS, Board
from grafana.rules import Panel, Query, Row, check, metrics_of
from kvctl.metrics import CATALOG

HERE = Path(__file__).parent
SCHEMA_VERSION = 39
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTOR = 'job=~"$job", instance=~"$instance"'
RATE_STEP = (
    "1m"  # least step of rated queries: the window is at least four of them, whatever the data source says
)
NO_VALUE = "no data"
_WIDTH = 24
_ENGINE = "engine"
RATE_WINDOW = "[$__rate_interval]"


def expression(query: Query) -> str:
    """The query with its selectors: the engine's only where every metric of it has one."""
    with_engine = all(_ENGINE in CATALOG[name].labels for name in metrics_of(query.expr))
    selector = f'{SELECTOR}, engine=~"$engine"' if with_engine else SELECTOR
    return query.expr.replace("{}", "{" + selector + "}")


def _target(query: Query, ref: str) -> dict[str, Any]:
    step = {"interval": RATE_STEP} if RATE_WINDOW in query.expr else {}
    return {
        **step,
        "datasource": DATASOURCE,
        "expr": expression(query),
        "legendFormat": query.legend,
        "refId": ref,
        "editorMode": "code",
        "range": True,
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    check(panel)
    names = dict.fromkeys(name for query in panel.queries for name in metrics_of(query.expr))
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "noValue": panel.empty or NO_VALUE,
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"color": color, "value": value} for value, color in panel.thresholds],
        },
        "custom": _custom(panel),
    }
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.about} {', '.join(names)}",
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [_target(query, chr(ord("A") + place)) for place, query in enumerate(panel.queries)],
    }


def _custom(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    return {
        "lineWidth": 1,
        "fillOpacity": 25 if panel.stacked else 0,
        "spanNulls": False,
        "showPoints": "never",
        "stacking": stacking,
    }


_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True}
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "timeseries": {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    "state-timeline": {"legend": _LEGEND, "showValue": "never", "mergeValues": True},
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "textMode": "auto"},
}


def _place(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Panels left to right, a shorter one under another in the same column where two fill its height."""
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
        }  # fmt: skip
        y += 1
        floor = [y] * _WIDTH
        for panel in row.panels:
            number += 1
            tops = [max(floor[at : at + panel.width]) for at in range(_WIDTH - panel.width + 1)]
            top = min(tops)
            x = tops.index(top)
            floor[x : x + panel.width] = [top + panel.height] * panel.width
            yield _panel(panel, number, x, top)
        y = max(floor)


def _variables() -> list[dict[str, Any]]:
    """Datasource, then job, instance and engine, each among what the one before left."""
    source = {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "Data source",
        "hide": 0,
    }
    filters = {
        "job": "label_values(kvctl_build_info, job)",
        "instance": 'label_values(kvctl_build_info{job=~"$job"}, instance)',
        "engine": f"label_values(kvctl_budget_tokens{{{SELECTOR}}}, engine)",
    }
    return [source, *(_variable(name, query) for name, query in filters.items())]


def _variable(name: str, query: str) -> dict[str, Any]:
    metrics_of(query)
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _annotation(name: str, expr: str, color: str, title: str) -> dict[str, Any]:
    query = Query(expr=expr, legend="")
    metrics_of(expr)
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "expr": expression(query),
        "iconColor": color,
        "step": RATE_STEP,
        "titleFormat": title,
        "useValueForTime": False,
    }


def _annotations() -> list[dict[str, Any]]:
    return [
        _annotation("Overrides", "kvctl_override_active{} == 1", "orange", "{{knob}} overridden"),
        _annotation(
            "Restarts",
            "increase(kvctl_engine_restarts_total{}[$__rate_interval]) > 0",
            "red",
            "engine restarted",
        ),
        _annotation(
            "Preemptions",
            "increase(kvctl_engine_preemptions_total{}[$__rate_interval]) > 0",
            "purple",
            "preemption on rank {{rank}}",
        ),
    ]


def _link() -> dict[str, Any]:
    """To the other dashboards, with variables and time kept."""
    return {
        "title": "kvctl",
        "type": "dashboards",
        "tags": ["kvctl"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "icon": "external link",
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }


def dashboard(board: Board) -> dict[str, Any]:
    """The whole dashboard. Raises PanelError."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.about,
        "tags": ["kvctl", "vllm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": _annotations()},
        "templating": {"list": _variables()},
        "links": [_link()],
        "panels": list(_place(board.rows)),
    }


def files() -> dict[str, str]:
    """Text of everything that is generated, by path under grafana/."""
    boards = {
        f"dashboards/{board.uid}.json": json.dumps(dashboard(board), indent=2) + "\n" for board in BOARDS
    }
    return boards | {f"prometheus/{name}": text for name, text in rule_files.files().items()}


def main() -> int:
    """Write them all."""
    for name, text in files().items():
        (HERE / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
