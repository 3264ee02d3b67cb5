"""``kvctl reload``: the daemon reads its settings again; the command ends when they are in force."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from kvctl.admin.client import RefusedError
from kvctl.cli.common import FAILED, CommandError, answer, daemon, output_option, talks_to_daemon


@click.command()
@output_option
@talks_to_daemon
def reload(output: str, socket: Path | None, timeout: float) -> None:
    """Read file, environment and credentials again, and put in force what can change while kvctl runs.

    Everything is judged first: with a fault in it nothing changes, and the exit status is 1.
    """
    with daemon(socket, timeout) as client:
        try:
            document = client.post("/v1/reload")
        except RefusedError as error:
            if error.code != "bad_settings":
                raise
            raise CommandError(
                f"{error}\nnothing was changed: the old settings stay in force", FAILED
            ) from None
    answer(document, output, _lines)


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    for each in document["applied"]:
        yield f"{each['key']}: {each['old']} -> {each['new']}"
    for each in document["needs_restart"]:
        yield f"{each['key']}: {each['old']} -> {each['new']} after a restart (systemctl restart kvctl)"
    if not document["applied"] and not document["needs_restart"]:
        yield "nothing has changed"
    yield f"settings revision {document['revision']}"
