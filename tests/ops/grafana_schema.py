"""The part of Grafana's classic dashboard model (schemaVersion 39) that is used here; closed: typos show.

A shape is a type, a literal (its value), a list of one shape (of every item), a dict (all keys required,
those with ``?`` not), or a tuple of shapes (any of them).
"""

from collections.abc import Iterator
from typing import Any

Shape = Any

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_LEGEND = {"displayMode": ("list", "table"), "placement": ("bottom", "right"), "showLegend": bool}
_THRESHOLDS = {"mode": "absolute", "steps": [{"color": str, "value": (type(None), float, int)}]}
_CUSTOM = {
    "lineWidth?": int,
    "fillOpacity?": int,
    "spanNulls?": bool,
    "showPoints?": ("never", "auto", "always"),
    "stacking?": {"mode": ("none", "normal", "percent"), "group": str},
}
_DEFAULTS = {
    "unit": str,
    "noValue": str,
    "decimals?": int,
    "color": {"mode": ("thresholds", "palette-classic")},
    "thresholds": _THRESHOLDS,
    "custom": _CUSTOM,
}
_TARGET = {
    "interval?": str,
    "datasource": _DATASOURCE,
    "expr": str,
    "legendFormat": str,
    "refId": str,
    "editorMode": ("code", "builder"),
    "range": bool,
}
_GRID = {"x": int, "y": int, "w": int, "h": int}
_ROW = {"id": int, "type": "row", "title": str, "collapsed": bool, "panels": [dict], "gridPos": _GRID}
_COMMON = {
    "id": int,
    "title": str,
    "description": str,
    "datasource": _DATASOURCE,
    "gridPos": _GRID,
    "fieldConfig": {"defaults": _DEFAULTS, "overrides": [dict]},
    "targets": [_TARGET],
}
_TIMESERIES = {
    "legend": _LEGEND,
    "tooltip": {"mode": ("single", "multi", "none"), "sort": ("none", "asc", "desc")},
}
_TIMELINE = {"legend": _LEGEND, "showValue": ("auto", "always", "never"), "mergeValues": bool}
_STAT = {
    "reduceOptions": {"calcs": [str], "fields": str, "values": bool},
    "textMode": ("auto", "value", "value_and_name", "name", "none"),
}
_PANELS = {
    "row": _ROW,
    "timeseries": _COMMON | {"type": "timeseries", "options": _TIMESERIES},
    "state-timeline": _COMMON | {"type": "state-timeline", "options": _TIMELINE},
    "stat": _COMMON | {"type": "stat", "options": _STAT},
}
_SOURCE_VARIABLE = {"name": str, "type": "datasource", "query": "prometheus", "label": str, "hide": int}
_VARIABLE = {
    "name": str,
    "label": str,
    "type": "query",
    "datasource": _DATASOURCE,
    "definition": str,
    "query": {"query": str, "refId": str},
    "refresh": (0, 1, 2),
    "sort": int,
    "multi": bool,
    "includeAll": bool,
    "allValue": str,
    "current": {"selected": bool, "text": [str], "value": [str]},
    "hide": (0, 1, 2),
}
_ANNOTATION = {
    "name": str,
    "datasource": _DATASOURCE,
    "enable": bool,
    "expr": str,
    "iconColor": str,
    "step": str,
    "titleFormat": str,
    "useValueForTime": bool,
}
_LINK = {
    "title": str,
    "type": ("dashboards", "link"),
    "tags": [str],
    "asDropdown": bool,
    "includeVars": bool,
    "keepTime": bool,
    "icon": str,
    "targetBlank": bool,
    "tooltip": str,
    "url": str,
}
DASHBOARD: Shape = {
    "uid": str,
    "title": str,
    "description": str,
    "tags": [str],
    "schemaVersion": 39,
    "version": int,
    "editable": bool,
    "graphTooltip": (0, 1, 2),
    "refresh": str,
    "time": {"from": str, "to": str},
    "timezone": ("browser", "utc"),
    "annotations": {"list": [_ANNOTATION]},
    "templating": {"list": [(_SOURCE_VARIABLE, _VARIABLE)]},
    "links": [_LINK],
    "panels": [_PANELS],
}


def complaints(found: Any, shape: Shape, at: str = "") -> Iterator[str]:
    """Where ``found`` is not of ``shape``, and what it is instead."""
    match shape:
        case _ if shape is _PANELS:
            yield from _panel(found, at)
        case dict():
            yield from _object(found, shape, at)
        case list():
            yield from _items(found, shape[0], at)
        case tuple():
            if all(list(complaints(found, one, at)) for one in shape):
                yield f"{at}: {found!r} is none of the forms allowed"
        case type():
            if not isinstance(found, shape) or (shape is int and isinstance(found, bool)):
                yield f"{at}: {found!r} is no {shape.__name__}"
        case _:
            if found != shape:
                yield f"{at}: {found!r} is not {shape!r}"


def _panel(found: Any, at: str) -> Iterator[str]:
    kind = found.get("type") if isinstance(found, dict) else None
    if kind not in _PANELS:
        yield f"{at}.type: {kind!r} is no kind of panel used here"
        return
    yield from complaints(found, _PANELS[kind], at)


def _items(found: Any, shape: Shape, at: str) -> Iterator[str]:
    if not isinstance(found, list):
        yield f"{at}: {found!r} is no list"
        return
    for number, item in enumerate(found):
        yield from complaints(item, shape, f"{at}[{number}]")


def _object(found: Any, shape: dict[str, Shape], at: str) -> Iterator[str]:
    if not isinstance(found, dict):
        yield f"{at}: {found!r} is no object"
        return
    known = {key.removesuffix("?"): (one, key.endswith("?")) for key, one in shape.items()}
    for key in found.keys() - known.keys():
        yield f"{at}.{key}: not a key of the model"
    for key, (one, optional) in known.items():
        if key in found:
            yield from complaints(found[key], one, f"{at}.{key}".lstrip("."))
        elif not optional:
            yield f"{at}.{key}: missing"
