"""What a recording rule and an alert are, and the rules that they keep.

Law of this module: no expression names a metric or a label value that kvctl does not export, or a recorded
series that no rule records; every alert comes with the story that its unit test plays.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from grafana.rules import PanelError, metrics_of
from kvctl.metrics import CATALOG

RUNBOOKS = "file:///usr/share/doc/kvctl/runbooks"
SEVERITIES = ("page", "ticket")
_RECORDED = re.compile(r"\b(?:engine|instance|gpu):\w+:\w+")
_MATCHER = re.compile(r"(kvctl_\w+?)(?:_bucket|_count|_sum)?\{([^}]*)\}")
_PAIR = re.compile(r'(\w+)(=~|!=|!~|=)"([^"]*)"')


class RuleError(ValueError):
    """A rule that would never fire, or an alert that nobody could act on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recording rule."""

    record: str
    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Input of a unit test: a series, and its value at each minute in promtool's notation."""

    name: str
    values: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """How an alert comes and goes: silent at ``calm``, firing at ``fires``, silent again at ``over``."""

    series: tuple[Series, ...]
    fires: str
    over: str
    calm: str = "2m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. ``hold`` is how long the condition lasts before it fires."""

    name: str
    expr: str
    hold: str
    severity: str
    summary: str
    description: str
    story: Story
    other: tuple[Story, ...] = ()  # of an alert with several causes, the others

    @property
    def runbook(self) -> str:
        """Where on-call reads what to do."""
        return f"{RUNBOOKS}/{self.name}.md"


def check_recordings(recordings: Iterable[Recording]) -> frozenset[str]:
    """The names recorded. Raises RuleError."""
    known: set[str] = set()
    for each in recordings:
        _check_expression(each.record, each.expr, known)
        if each.record in known:
            raise RuleError(f"{each.record} is recorded twice")
        known.add(each.record)
    return frozenset(known)


def check_alerts(alerts: Iterable[Alert], recorded: frozenset[str]) -> None:
    """Raise RuleError where an alert breaks a rule of this module."""
    for each in alerts:
        _check_expression(each.name, each.expr, recorded)
        if each.severity not in SEVERITIES:
            raise RuleError(f"{each.name}: severity {each.severity!r} is none of {', '.join(SEVERITIES)}")
        if not (each.summary.strip() and each.description.strip()):
            raise RuleError(f"{each.name}: summary and description are needed")


def _check_expression(name: str, expr: str, recorded: Iterable[str]) -> None:
    try:
        metrics_of(_RECORDED.sub("", expr))
    except PanelError as error:
        raise RuleError(f"{name}: {error}") from None
    if unknown := set(_RECORDED.findall(expr)) - set(recorded):
        raise RuleError(f"{name}: no rule before it records {', '.join(sorted(unknown))}")
    for metric, matchers in _MATCHER.findall(expr):
        for label, operator, value in _PAIR.findall(matchers):
            _check_matcher(name, metric, label, value.split("|") if "~" in operator else [value])


def _check_matcher(name: str, metric: str, label: str, words: list[str]) -> None:
    if label in ("job", "instance", "le"):
        return
    closed = CATALOG[metric].labels.get(label)
    if closed is None:
        raise RuleError(f"{name}: {metric} has no label {label}")
    if strange := [word for word in words if closed and word not in closed]:
        raise RuleError(f"{name}: {metric} has no {label}={strange[0]!r}")
