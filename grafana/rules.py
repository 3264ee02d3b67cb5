"""What a panel is, and the rules that it keeps.

A panel that asks for a metric or a label that is not in kvctl.metrics.CATALOG, rates a gauge, reads a counter
without rate, sums a ratio or divides unguarded is an error here, not an empty panel at night.
"""

import re
from dataclasses import dataclass

from kvctl.metrics import CATALOG, Kind

_METRIC = re.compile(r"\bkvctl_[a-z0-9_]+")
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


class PanelError(ValueError):
    """A panel that would not show what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query. ``expr`` names metrics bare; ``{}`` after each is filled with the selectors."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; ``unit`` is Grafana's, ``width`` of 24 columns.

    ``empty`` is what the absence of any series means, where that is a good state: it is shown then.
    """

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 12
    height: int = 8
    stacked: bool = False
    empty: str = ""
    decimals: int | None = None
    thresholds: tuple[tuple[float | None, str], ...] = ((None, "green"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]


def metrics_of(expr: str) -> list[str]:
    """The catalog names in ``expr``. Raises PanelError for one that is not there."""
    found = []
    for name in dict.fromkeys(_METRIC.findall(expr)):
        base = name if name in CATALOG else _SUFFIX.sub("", name)
        if base not in CATALOG or (name != base and CATALOG[base].kind is not Kind.HISTOGRAM):
            raise PanelError(f"kvctl exports no metric {name}")
        found.append(base)
    return found


def check(panel: Panel) -> None:
    """Raise PanelError where the panel breaks a rule of this module."""
    if not (panel.unit and panel.about and panel.queries):
        raise PanelError(f"{panel.title}: unit, description and queries are needed")
    for query in panel.queries:
        if not metrics_of(query.expr):
            raise PanelError(f"{panel.title}: {query.expr} asks for nothing of kvctl")
        _check_rates(panel, query.expr)
        _check_labels(panel, query)
        if "/" in query.expr and "clamp_min(" not in query.expr:
            raise PanelError(f"{panel.title}: the division in {query.expr} is not guarded")


def _check_rates(panel: Panel, expr: str) -> None:
    for name in dict.fromkeys(_METRIC.findall(expr)):
        rated = re.search(rf"\b(rate|increase)\({name}\{{}}\[\$__rate_interval\]\)", expr) is not None
        kind = CATALOG[name].kind if name in CATALOG else Kind.HISTOGRAM
        if rated == (kind is Kind.GAUGE):
            raise PanelError(f"{panel.title}: {name} is a {kind}, {'rated' if rated else 'not rated'}")
        if (
            name.endswith("_ratio")
            and kind is Kind.GAUGE
            and re.search(rf"sum[^(]*\([^(]*\) \({name}\{{}}\)", expr)
        ):
            raise PanelError(f"{panel.title}: {name} is a ratio and must not be summed")


def _check_labels(panel: Panel, query: Query) -> None:
    known = {"le", "instance", "job"}.union(*(CATALOG[name].labels for name in metrics_of(query.expr)))
    grouped = re.findall(r"\bby \(([^)]*)\)", query.expr)
    asked = {label.strip() for group in grouped for label in group.split(",")}
    asked |= set(re.findall(r"\{\{(\w+)\}\}", query.legend))
    if asked - known:
        raise PanelError(f"{panel.title}: {', '.join(sorted(asked - known))} is no label of {query.expr}")
