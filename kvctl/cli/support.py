"""``kvctl support``: one archive for a bug report. No secrets and no prompt text are in what it asks for."""

import io
import json
import os
import platform
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import click

from kvctl import __version__
from kvctl.admin.client import AdminClient, ClientError, DeniedError, TimedOutError, UnreachableError
from kvctl.cli.common import CommandError, talks_to_daemon, usual_socket

A = TypeVar("A")
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
What is in here: the settings (secrets starred; config-of-file.json: those that a start would find, where no
daemon answers), the daemon's state, its last decisions (counts and ids, no prompt text), its metrics page and
the engines', the audit log's last lines, versions.
"""


@click.command()
@click.option("--file", type=click.Path(path_type=Path), help="Where to. [kvctl-support-TIME.tar.gz]")
@talks_to_daemon
def support(file: Path | None, socket: Path | None, timeout: float) -> None:
    """Collect what a bug report needs into one tar.gz. What cannot be had is named in it, not left out."""
    target = file or Path(f"kvctl-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    client = _Patient(AdminClient(socket or usual_socket(), timeout))
    try:
        with target.open("xb") as out:
            _write(out, target, client, timeout)
    except FileExistsError:
        raise CommandError(f"{target} is there already; name another with --file") from None
    except OSError as error:
        raise CommandError(f"{target}: {error.strerror}; name another place with --file") from None
    click.echo(str(target))
    if client.silent is not None:
        click.echo(f"kvctl: without what the daemon knows: {client.silent}", err=True)


class _Patient:
    """Asks a daemon until it does not answer, and then no more: each call would wait as long."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client
        self.silent: ClientError | None = None  # why it is asked no more

    def get(self, route: str) -> dict[str, Any]:
        """A document. Raises ClientError."""
        return self._asked(self._client.get, route)

    def text(self, route: str) -> str:
        """A page. Raises ClientError."""
        return self._asked(self._client.text, route)

    def _asked(self, ask: Callable[[str], A], route: str) -> A:
        if self.silent is not None:
            raise self.silent
        try:
            return ask(route)
        except (UnreachableError, DeniedError, TimedOutError) as error:
            self.silent = error
            raise


def _write(out: BinaryIO, target: Path, client: _Patient, timeout: float) -> None:
    """The archive; where it cannot be finished, none is left behind."""
    try:
        with tarfile.open(fileobj=out, mode="w:gz") as archive:
            for name, content in collect(client, timeout):
                _add(archive, name, content)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def collect(client: _Patient, timeout: float) -> Iterator[tuple[str, str]]:
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
    settings, of_file = _settings(client)
    if of_file:
        yield "config-of-file.json", json.dumps(settings, indent=2, default=str)
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


def _settings(client: _Patient) -> tuple[Mapping[str, Any], bool]:
    """The daemon's settings; where it does not tell, those that a start would find, and True."""
    try:
        return client.get("/v1/config")["settings"], False
    except ClientError:
        pass
    from kvctl.settings.document import as_document  # noqa: PLC0415 - a daemon that answers makes it needless
    from kvctl.settings.errors import SettingsError  # noqa: PLC0415
    from kvctl.settings.loading import load  # noqa: PLC0415

    try:
        return as_document(load(None, os.environ))["settings"], True
    except SettingsError as error:
        return {"problems": list(error.problems)}, True


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
