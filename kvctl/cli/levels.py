"""``kvctl loglevel``: more of the log, for a while."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvctl.cli.common import answer, daemon, for_option, output_option, span, talks_to_daemon


@click.command()
@click.argument("level", required=False, type=click.Choice(["debug", "info", "warning", "error"]))
@for_option("How long; then the setting log_level applies again.")
@click.option("--reason", default="", help="Why; it is kept in the audit log.")
@output_option
@talks_to_daemon
def loglevel(
    *, level: str | None, ttl: float, reason: str, output: str, socket: Path | None, timeout: float
) -> None:
    """Log at LEVEL for a while; without LEVEL: show the one in force.

    Example: kvctl loglevel debug --for 5m --reason "who is refused?"
    """
    with daemon(socket, timeout) as client:
        if level is None:
            document = client.get("/v1/loglevel")
        else:
            document = client.post("/v1/loglevel", {"level": level, "ttl_s": ttl, "reason": reason})
    answer(document, output, lambda it: [_line(it)])


def _line(document: Mapping[str, Any]) -> str:
    left = document["left_s"]
    return str(document["level"]) + ("" if left is None else f" for {span(left)}")
