"""Recording rules and alerts: what promtool says of them, what they may not say, and the runbooks behind."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from grafana import generate
from grafana.alerting import Alert, RuleError, check_alerts, check_recordings
from grafana.alerts import ALERTS
from grafana.recordings import RECORDINGS, TTFT_TARGET_S
from kvctl.gpu.faults import FATAL, EventKind
from kvctl.metrics.catalog import CATALOG
from tests.ops.prometheus import MISSING, PROMTOOL

FOLDER = Path(generate.__file__).parent / "prometheus"
RUNBOOKS = Path(generate.__file__).parents[1] / "docs" / "runbooks"
RECORDED = check_recordings(RECORDINGS)
FIRST = ALERTS[0]
SECTIONS = ("Symptom", "Meaning", "Checks", "What to do", "When to page on")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=MISSING)
each_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert.name))


def promtool(*arguments: str, folder: Path = FOLDER) -> tuple[int, str]:
    done = subprocess.run(
        [str(PROMTOOL), *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("name", ["kvctl.rules.yml", "kvctl.alerts.yml"])
def test_promtool_takes_the_rules(name: str) -> None:
    status, text = promtool("check", "rules", name)
    assert status == 0, text


@pytest.mark.slow
@needs_promtool
def test_every_alert_fires_and_clears() -> None:
    """Each alert's own story: silent, firing, silent."""
    status, text = promtool("test", "rules", "kvctl.alerts.test.yml")
    assert status == 0, text


@pytest.mark.slow
@needs_promtool
def test_a_story_would_notice_an_alert_that_is_missing(tmp_path: Path) -> None:
    for path in FOLDER.glob("kvctl.*.yml"):
        shutil.copy(path, tmp_path)
    rules = tmp_path / "kvctl.alerts.yml"
    rules.write_text(rules.read_text().replace("alert: Kvctl", "alert: NotKvctl"))
    status, text = promtool("test", "rules", "kvctl.alerts.test.yml", folder=tmp_path)
    assert status != 0
    assert [alert.name for alert in ALERTS if f'"{alert.name}"' not in text.replace("\\", "")] == []


@each_alert
def test_every_alert_has_its_runbook(alert: Alert) -> None:
    text = (RUNBOOKS / f"{alert.name}.md").read_text()
    assert text.startswith(f"# {alert.name}\n")
    assert re.findall(r"(?m)^## (.+)$", text) == list(SECTIONS)
    checks = text.split("## Checks")[1].split("## What to do")[0]
    assert len(re.findall(r"(?m)^\d\. ", checks)) == 3
    assert alert.runbook.endswith(f"/runbooks/{alert.name}.md")


def test_every_runbook_has_its_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {alert.name for alert in ALERTS}


def test_runbooks_name_metrics_that_exist() -> None:
    for path in RUNBOOKS.glob("*.md"):
        for name in re.findall(r"\bkvctl_\w+", path.read_text()):
            assert re.sub(r"_(bucket|count|sum)$", "", name) in CATALOG or name in CATALOG, (path.name, name)


def test_the_objective_stands_on_a_bucket_edge() -> None:
    assert TTFT_TARGET_S in CATALOG["kvctl_upstream_ttft_seconds"].buckets


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        ("kvctl_budget_tokenz > 1", "exports no metric kvctl_budget_tokenz"),
        ("engine:kvctl_nothing:ratio > 1", "no rule before it records"),
        ('kvctl_engine_state{state="sleepy"} == 1', "no state='sleepy'"),
        ('kvctl_engine_state{state=~"up|sleepy"} == 1', "no state='sleepy'"),
        ('kvctl_leases{rank="0"} > 1', "has no label rank"),
    ],
)
def test_an_alert_that_could_not_fire_is_an_error(expr: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        check_alerts([replace(FIRST, expr=expr)], RECORDED)


def test_what_the_driver_tells_of_a_card_and_ends_work_has_an_alert() -> None:
    """Kinds that end nothing are on the dashboard and in the log."""
    kinds = re.compile(r'(?:xid|ecc)_[a-z]+(?=[|"])')
    watched = {alert.name: set(kinds.findall(alert.expr)) for alert in ALERTS}
    assert watched["KvctlGpuFault"] == set(FATAL)
    ends_nothing = {EventKind.XID_OTHER, EventKind.ECC_CORRECTED}
    assert set().union(*watched.values()) == set(EventKind) - ends_nothing
    assert {alert.severity for alert in ALERTS if watched[alert.name] & FATAL} == {"page"}


@pytest.mark.parametrize(("days", "severity"), [(30, "ticket"), (3, "page")])
def test_certificates_are_told_of_in_time(days: int, severity: str) -> None:
    (alert,) = (each for each in ALERTS if f"< {days} * 86400" in each.expr)
    assert alert.severity == severity
    assert "kvctl_tls_certificate_expiry_timestamp_seconds" in alert.expr


@pytest.mark.parametrize("change", [{"severity": "loud"}, {"summary": " "}, {"description": ""}])
def test_an_alert_that_nobody_can_act_on_is_an_error(change: dict[str, str]) -> None:
    with pytest.raises(RuleError, match=FIRST.name):
        check_alerts([replace(FIRST, **change)], RECORDED)  # type: ignore[arg-type]


def test_a_series_that_is_recorded_twice_is_an_error() -> None:
    with pytest.raises(RuleError, match="recorded twice"):
        check_recordings([RECORDINGS[0], RECORDINGS[0]])
