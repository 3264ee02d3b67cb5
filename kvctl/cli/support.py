"""``kvctl support``: one archive for a bug report. No secrets and no prompt text are in what it asks for."""

import io
import json
import platform
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from kvctl import __version__
from kvctl.admin.client import AdminClient, ClientError
from kvctl.cli.common import CommandError, talks_to_daemon, usual_socket

_PAGES = ("status", "config", "overrides", "engines", "queue", "gpus", "decisions?limit=1000", "loglevel")
_LIBRARIES = (
    "aiohttp",
    "uvloop",
    "tokenizers",
    "pydantic",
    "prometheus-client",
    "nvidia-ml-py",
    "click",
    "rich",
)
_PAGE_MAX = 8 * 2**20
_AUDIT_LINES = 500
_README = """kvctl support archive, made at {when} by kvctl {version}.

Beside this: the log, which this command does not read. Please add
    journalctl -u kvctl --since -1h > journal.txt
What is in here: the settings (secrets starred), the daemon's state, its last decisions (counts and ids, no
prompt text), its metrics page and the engines', the audit log's last lines, versions.
"""


@click.command()
@click.option("--file", type=click.Path(path_type=Path), help="Where to. [kvctl-support-TIME.tar.gz]")
@talks_to_daemon
def support(file: Path | None, socket: Path | None, timeout: float) -> None:
    """Collect what a bug report needs into one tar.gz. What cannot be had is named in it, not left out."""
    target = file or Path(f"kvctl-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    client = AdminClient(socket or usual_socket(), timeout)
    try:
        with target.open("xb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
            for name, content in collect(client, timeout):
                _add(archive, name, content)
    except FileExistsError:
        raise CommandError(f"{target} is there already; name another with --file") from None
    except OSError as error:
        raise CommandError(f"{target}: {error.strerror}; name another place with --file") from None
    click.echo(str(target))


def collect(client: AdminClient, timeout: float) -> Iterator[tuple[str, str]]:
    """(name, text) of every member."""
    yield (
        "README.txt",
        _README.format(when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), version=__version__),
    )
    yield "versions.json", json.dumps(_versions(), indent=2)
    for page in _PAGES:
        name = f"{page.partition('?')[0]}.json"
        yield name, _tried(lambda page=page: json.dumps(client.get(f"/v1/{page}"), indent=2))  # type: ignore[misc]
    yield "metrics.prom", _tried(lambda: client.text("/v1/metrics"))
    settings = _settings(client)
    for at, url in enumerate(_engine_urls(settings)):
        yield f"engine-{at}.prom", f"# {url}/metrics\n" + _fetched(f"{url}/metrics", timeout)
    yield "audit.jsonl", _audit(settings)


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    member = tarfile.TarInfo(f"kvctl-support/{name}")
    member.size, member.mtime = len(data), int(time.time())
    archive.addfile(member, io.BytesIO(data))


def _versions() -> Mapping[str, Any]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {"kvctl": __version__, "python": sys.version, "machine": platform.platform(), "libraries": found}


def _tried(make: Callable[[], str]) -> str:
    try:
        return make()
    except ClientError as error:
        return f"not to be had: {error}\n"


def _settings(client: AdminClient) -> Mapping[str, Any]:
    try:
        settings: Mapping[str, Any] = client.get("/v1/config")["settings"]
    except ClientError:
        return {}
    return settings


def _engine_urls(settings: Mapping[str, Any]) -> list[str]:
    several = [each["url"] for each in settings.get("engines", {}).get("value") or []]
    one = settings.get("engine_url", {}).get("value")
    return several or ([one] if one else [])


def _fetched(url: str, timeout: float) -> str:
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:  # noqa: S310 - the daemon's own engine
            page: bytes = answer.read(_PAGE_MAX)
    except (OSError, urllib.error.URLError, ValueError) as error:
        return f"not to be had: {error}\n"
    return page.decode(errors="replace")


def _audit(settings: Mapping[str, Any]) -> str:
    folder = settings.get("state_dir", {}).get("value")
    if not folder:
        return "not to be had: the daemon did not say where it is\n"
    try:
        lines = (Path(folder) / "audit.jsonl").read_text(errors="replace").splitlines()
    except OSError as error:
        return f"not to be had: {error}\n"
    return "".join(f"{line}\n" for line in lines[-_AUDIT_LINES:])
