"""``kvctl reload``: the daemon reads its settings again; the command ends when they are in force."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from kvctl.admin.client import RefusedError
from kvctl.cli.common import FAILED, CommandError, answer, daemon, output_option, talks_to_daemon

PENDING = "/v1/config/pending"


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what a reload, or a restart, would change.")
@output_option
@talks_to_daemon
def reload(*, dry_run: bool, output: str, socket: Path | None, timeout: float) -> None:
    """Read file, environment and credentials again, and put in force what can change while kvctl runs.

    Everything is judged first: with a fault in it nothing changes, and the exit status is 1.
    """
    with daemon(socket, timeout) as client:
        try:
            document = client.get(PENDING) if dry_run else client.post("/v1/reload")
        except RefusedError as error:
            if error.code != "bad_settings":
                raise
            kept = "nothing was changed: the old settings stay in force"
            would = f"{kept}; a reload would say the same"
            raise CommandError(f"{error}\n{would if dry_run else kept}", FAILED) from None
    answer(document, output, _foreseen if dry_run else _lines)


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield from _applied(document, "")
    yield from _waiting(document)
    if not document["applied"] and not document["needs_restart"]:
        yield "nothing has changed"
    yield f"settings revision {document['revision']}"


def _foreseen(document: Mapping[str, Any]) -> Iterator[str]:
    yield from _applied(document, " after a reload (kvctl reload)")
    yield from _waiting(document)
    if not document["applied"] and not document["needs_restart"]:
        yield "the settings in force are those that a reload would find"


def _applied(document: Mapping[str, Any], when: str) -> Iterator[str]:
    for each in document["applied"]:
        yield f"{each['key']}: {each['old']} -> {each['new']}{when}"


def _waiting(document: Mapping[str, Any]) -> Iterator[str]:
    for each in document["needs_restart"]:
        yield f"{each['key']}: {each['old']} -> {each['new']} after a restart (systemctl restart kvctl)"
