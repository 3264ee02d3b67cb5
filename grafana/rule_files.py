"""Prometheus's files: recording rules, alerts, and the alerts' unit tests for ``promtool test rules``."""

from collections.abc import Iterable, Iterator

from grafana.alerting import Alert, Story, check_alerts, check_recordings
from grafana.alerts import GROUPS
from grafana.recordings import RECORDINGS

_MADE = "# Made by python -m grafana.generate; do not edit.\n"
RULES = "kvctl.rules.yml"
ALERTS = "kvctl.alerts.yml"
TESTS = "kvctl.alerts.test.yml"


def files() -> dict[str, str]:
    """Text by file name. Raises RuleError."""
    recorded = check_recordings(RECORDINGS)
    for alerts in GROUPS.values():
        check_alerts(alerts, recorded)
    return {RULES: _rules(), ALERTS: _alerts(), TESTS: _tests()}


def _rules() -> str:
    lines = [_MADE + "groups:", "  - name: kvctl-rules", "    rules:"]
    for each in RECORDINGS:
        lines += [f"      - record: {each.record}", "        expr: |-", f"          {each.expr}"]
    return "\n".join(lines) + "\n"


def _alerts() -> str:
    lines = [_MADE + "groups:"]
    for group, alerts in GROUPS.items():
        lines += [f"  - name: {group}", "    rules:", *(line for each in alerts for line in _alert(each))]
    return "\n".join(lines) + "\n"


def _alert(alert: Alert) -> Iterator[str]:
    yield f"      - alert: {alert.name}"
    yield "        expr: |-"
    yield f"          {alert.expr}"
    yield f"        for: {alert.hold}"
    yield f"        labels: {{severity: {alert.severity}}}"
    yield "        annotations:"
    for name, text in (
        ("summary", alert.summary),
        ("description", alert.description),
        ("runbook_url", alert.runbook),
    ):
        yield f"          {name}: {_quoted(text)}"


def _tests() -> str:
    lines = [_MADE + f"rule_files: [{RULES}, {ALERTS}]", "evaluation_interval: 1m", "tests:"]
    for alerts in GROUPS.values():
        for each in alerts:
            for number, story in enumerate((each.story, *each.other)):
                lines += _test(each, story, f" ({number + 1})" if number else "")
    return "\n".join(lines) + "\n"


def _test(alert: Alert, story: Story, which: str) -> Iterator[str]:
    yield f"  - name: {_quoted(alert.name + which) if which else alert.name}"
    yield "    interval: 1m"
    yield "    input_series:"
    for series in story.series:
        yield f"      - {{series: {_quoted(series.name)}, values: {_quoted(series.values)}}}"
    yield "    promql_expr_test:"
    firing = f'count(ALERTS{{alertname="{alert.name}", alertstate="firing"}})'
    for at, count in ((story.calm, 0), (story.fires, 1), (story.over, 0)):
        expected = _samples(range(1, count + 1))
        yield f"      - {{expr: {_quoted(firing)}, eval_time: {at}, exp_samples: [{expected}]}}"


def _samples(values: Iterable[int]) -> str:
    return ", ".join(f"{{labels: '{{}}', value: {value}}}" for value in values)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
