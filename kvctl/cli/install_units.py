"""``kvctl install-units``: puts units, rules and dashboards where systemd and others look for them.

What an administrator writes (settings, drop-ins) is kept; everything else belongs to the package and is
replaced.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

import kvctl
from kvctl.cli.common import DENIED, FAILED, CommandError

PROGRAM_OF_UNITS = "/opt/kvctl/bin/kvctl"
RUNBOOKS_OF_ALERTS = "file:///usr/share/doc/kvctl/runbooks"
_PACKAGE = Path(kvctl.__file__).parent
_UNITS = "etc/systemd/system"
_SHARE = "usr/share/kvctl"
_DOC = "usr/share/doc/kvctl"
_PROVISIONING = f"{_SHARE}/grafana/provisioning/dashboards.yml"

# source folder, file or pattern in it, target file or (for a pattern) folder
_PLACES: tuple[tuple[str, str, str], ...] = (
    ("systemd", "kvctl.service", f"{_UNITS}/kvctl.service"),
    ("systemd", "kvctl@.service", f"{_UNITS}/kvctl@.service"),
    ("systemd", "notify-reload.conf", f"{_SHARE}/systemd/notify-reload.conf"),
    ("systemd", "kvctl.sysusers", "etc/sysusers.d/kvctl.conf"),
    ("systemd", "kvctl.tmpfiles", "etc/tmpfiles.d/kvctl.conf"),
    ("systemd", "kvctl.toml", "etc/kvctl/kvctl.toml"),
    ("systemd", "kvctl.env", f"{_SHARE}/systemd/kvctl.env"),
    ("grafana/dashboards", "*.json", f"{_SHARE}/grafana/dashboards"),
    ("grafana/provisioning/dashboards", "kvctl.yml", _PROVISIONING),
    ("grafana/provisioning/datasources", "kvctl.yml", f"{_SHARE}/grafana/provisioning/datasources.yml"),
    ("grafana/prometheus", "*.yml", f"{_SHARE}/prometheus"),
    ("docs/runbooks", "*.md", f"{_DOC}/runbooks"),
    ("docs", "*.md", _DOC),
)
_KEPT = frozenset({"etc/kvctl/kvctl.toml"})
_SECRET = 0o640
_PLAIN = 0o644


@dataclass(frozen=True, slots=True)
class File:
    """One file: its content, and its place below the prefix."""

    place: str
    text: str

    @property
    def mode(self) -> int:
        """Settings may hold keys."""
        return _SECRET if self.place in _KEPT else _PLAIN


@click.command("install-units")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option(
    "--prefix",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/"),
    show_default=True,
    help="Root below which the files are put, for packages and images.",
)
@click.option("--program", type=click.Path(path_type=Path), help="The kvctl that the units run. [this one]")
@click.option(
    "--runbooks",
    default=RUNBOOKS_OF_ALERTS,
    show_default=True,
    help="URL of the folder of runbooks that the alerts link to.",
)
def install_units(*, dry_run: bool, prefix: Path, program: Path | None, runbooks: str) -> None:
    """Install units, user, folders, dashboards, rules, runbooks and an example configuration.

    Nothing is started, and /etc/kvctl/kvctl.toml is left alone where there is one.

    Example: kvctl install-units --dry-run

    Example: kvctl install-units --prefix build/root --program /opt/kvctl/bin/kvctl
    """
    run = program or _this_program()
    files = list(_files(run, runbooks.rstrip("/")))
    done = [(_do(each, prefix, dry_run=dry_run), each) for each in files]
    for word, each in done:
        click.echo(f"{word:9} {prefix / each.place}")
    if dry_run:
        click.echo("nothing was done (--dry-run)")
    for line in _next_steps(run, str(prefix), service_changed=_changed(done)):
        click.echo(line)


def _this_program() -> Path:
    """The kvctl of this environment itself, not a link to it that may disappear."""
    beside = Path(sys.executable).parent / "kvctl"
    found = beside if beside.exists() else Path(shutil.which("kvctl") or PROGRAM_OF_UNITS)
    return found.absolute()


def _files(program: Path, runbooks: str) -> Iterator[File]:
    for folder, pattern, place in _PLACES:
        found = sorted(_source(folder).glob(pattern))
        if not found:
            raise CommandError(f"{folder}/{pattern}: not in this installation of kvctl", FAILED)
        for path in found:
            text = path.read_text(encoding="utf-8").replace(PROGRAM_OF_UNITS, str(program))
            text = text.replace(RUNBOOKS_OF_ALERTS, runbooks)
            yield File(f"{place}/{path.name}" if "*" in pattern else place, text)


def _source(folder: str) -> Path:
    """In an installed package beside the modules, in a clone beside the package."""
    installed = _PACKAGE / "share" / folder
    return installed if installed.is_dir() else _PACKAGE.parent / folder


def _do(file: File, prefix: Path, *, dry_run: bool) -> str:
    """Place one file; returns the word for what was done."""
    target = prefix / file.place
    try:
        word = _word(file, target)
        if word in ("create", "replace") and not dry_run:
            _write(file, target)
    except PermissionError:
        raise CommandError(f"{target}: no permission; run it as root, or with --prefix", DENIED) from None
    except OSError as error:
        raise CommandError(f"{target}: {error.strerror}", FAILED) from None
    return word


def _word(file: File, target: Path) -> str:
    if not target.exists():
        return "create"
    if target.read_text(encoding="utf-8") == file.text:
        return "same"
    return "keep" if file.place in _KEPT else "replace"


def _write(file: File, target: Path) -> None:
    """Write the file whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file.mode)
    with os.fdopen(handle, "w", encoding="utf-8") as written:
        written.write(file.text)
        os.fchmod(handle, file.mode)
    fresh.replace(target)


def _changed(done: list[tuple[str, File]]) -> bool:
    return any(word == "replace" and each.place.startswith(_UNITS) for word, each in done)


def _next_steps(program: Path, prefix: str, *, service_changed: bool) -> Iterator[str]:
    kvctl_ = shlex.quote(str(program))
    yield ""
    if prefix != "/":
        yield f"placed below {prefix}; on the machine itself the next commands are:"
    yield "next, as root:"
    yield "  systemd-sysusers kvctl.conf && systemd-tmpfiles --create kvctl.conf"
    yield "  editor /etc/kvctl/kvctl.toml          # engine_url"
    yield f"  {kvctl_} check-config && sudo -u kvctl {kvctl_} doctor"
    start = "restart kvctl" if service_changed else "enable --now kvctl"
    yield f"  systemctl daemon-reload && systemctl {start}"
    yield "  usermod -aG kvctl NAME                # each person on call"
    yield "Prometheus: rule_files: [/usr/share/kvctl/prometheus/kvctl.rules.yml, .../kvctl.alerts.yml]"
    yield f"Documents: /{_DOC}/operations.md and what lies beside it"
    yield f"Grafana: copy /{_PROVISIONING} to /etc/grafana/provisioning/dashboards/kvctl.yml"
