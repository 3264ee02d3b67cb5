"""``kvctl install-units``, from the clone and from an installed wheel."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from grafana.alerts import ALERTS
from kvctl.cli.install_units import install_units
from kvctl.settings.loading import load

ROOT = Path(__file__).parents[2]
SETTINGS = "etc/kvctl/kvctl.toml"
UNIT = "etc/systemd/system/kvctl.service"


def install(prefix: Path, *more: str) -> Result:
    return CliRunner().invoke(install_units, ["--prefix", str(prefix), *more])


def words(result: Result) -> dict[str, str]:
    """What was done, by path below the prefix."""
    lines = result.output.partition("\n\n")[0].splitlines()
    found = (line.split(maxsplit=1) for line in lines if not line.startswith("nothing"))
    return {path: word for word, path in found}


def test_a_dry_run_says_all_and_does_nothing(tmp_path: Path) -> None:
    result = install(tmp_path, "--dry-run")
    assert result.exit_code == 0
    assert set(words(result).values()) == {"create"}
    assert "nothing was done" in result.output
    assert list(tmp_path.iterdir()) == []


def test_everything_lies_where_it_is_looked_for(tmp_path: Path) -> None:
    result = install(tmp_path, "--program", "/srv/kvctl/bin/kvctl")
    assert result.exit_code == 0, result.output
    unit = (tmp_path / UNIT).read_text()
    assert "ExecStart=/srv/kvctl/bin/kvctl serve" in unit
    assert "ExecReload=/srv/kvctl/bin/kvctl reload" in unit
    assert "/opt/kvctl" not in unit
    for name in ("sysusers.d", "tmpfiles.d"):
        assert (tmp_path / "etc" / name / "kvctl.conf").is_file()
    load(tmp_path / SETTINGS, {})
    boards = sorted((tmp_path / "usr/share/kvctl/grafana/dashboards").glob("*.json"))
    assert [json.loads(path.read_text())["uid"] for path in boards] == [path.stem for path in boards]
    assert len(boards) == 3
    provisioning = tmp_path / "usr/share/kvctl/grafana/provisioning/dashboards.yml"
    (looked_for,) = re.findall(r"^ *path: (\S+)$", provisioning.read_text(), re.MULTILINE)
    assert f"{tmp_path}{looked_for}" == str(boards[0].parent)
    assert f"copy {str(provisioning).removeprefix(str(tmp_path))} to" in result.output
    runbooks = {path.stem for path in (tmp_path / "usr/share/doc/kvctl/runbooks").glob("*.md")}
    assert runbooks == {alert.name for alert in ALERTS}
    assert "systemctl daemon-reload && systemctl enable --now kvctl" in result.output


def test_documents_lead_to_documents_that_are_there(tmp_path: Path) -> None:
    install(tmp_path)
    folder = tmp_path / "usr/share/doc/kvctl"
    pages = [*folder.glob("*.md"), *folder.glob("runbooks/*.md")]
    assert {"operations.md", "configuration.md", "metrics.md", "admin-api.md"} <= {
        each.name for each in pages
    }
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_settings_are_read_by_kvctl_alone(tmp_path: Path) -> None:
    install(tmp_path)
    assert (tmp_path / SETTINGS).stat().st_mode & 0o777 == 0o640
    assert (tmp_path / UNIT).stat().st_mode & 0o777 == 0o644


def test_again_changes_nothing(tmp_path: Path) -> None:
    install(tmp_path)
    assert set(words(install(tmp_path)).values()) == {"same"}


def test_settings_are_kept_and_units_replaced(tmp_path: Path) -> None:
    install(tmp_path)
    for place in (SETTINGS, UNIT):
        (tmp_path / place).write_text('engine_url = "http://mine:1"\n')
    result = install(tmp_path)
    done = words(result)
    assert done[str(tmp_path / SETTINGS)] == "keep"
    assert done[str(tmp_path / UNIT)] == "replace"
    assert "mine" in (tmp_path / SETTINGS).read_text()
    assert "mine" not in (tmp_path / UNIT).read_text()
    assert "systemctl restart kvctl" in result.output


def test_alerts_link_to_the_sites_runbooks(tmp_path: Path) -> None:
    install(tmp_path, "--runbooks", "https://wiki.example/kvctl/")
    text = (tmp_path / "usr/share/kvctl/prometheus/kvctl.alerts.yml").read_text()
    assert "https://wiki.example/kvctl/KvctlDown.md" in text
    assert "file:" not in text


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_without_permission_it_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    result = install(tmp_path)
    assert result.exit_code == 5


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("")
    result = install(tmp_path)
    assert result.exit_code == 1
    assert "etc/systemd" in result.output


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built here, without a network; skipped where the build backend is not installed."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "tests")
    shutil.copytree(ROOT, source, ignore=ignored)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_carries_all_that_is_installed(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    assert (tmp_path / "site/kvctl/py.typed").is_file()
    assert (tmp_path / "site/kvctl/web/page.html").is_file()
    script = "from kvctl.cli.install_units import install_units; install_units()"
    done = subprocess.run(
        [sys.executable, "-c", script, "--prefix", str(tmp_path / "root")],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "root" / UNIT).is_file()
    assert str(ROOT) not in done.stdout.replace(sys.prefix, ""), "nothing is taken from the source tree"
