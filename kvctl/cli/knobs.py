"""``kvctl set``, ``unset`` and ``overrides``: what on-call may move, for how long and why."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from kvctl.cli.common import daemon, emit, output_option, paint, percent, span, talks_to_daemon

DEFAULT_FOR = "30m"


class Span(click.ParamType[float]):
    """A time such as 30m."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        from kvctl.settings.units import duration  # noqa: PLC0415 - only set needs it

        try:
            return duration(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}: write 90s, 30m or 2h", param, ctx)


_revision_option = click.option(
    "--if-match",
    type=click.IntRange(0),
    metavar="REVISION",
    help="Only if the overrides are at this revision.",
)


@click.command("set")
@click.argument("knob")
@click.argument("value")
@click.option(
    "--for",
    "ttl",
    type=Span(),
    default=DEFAULT_FOR,
    show_default=True,
    help="How long; then the setting is back.",
)
@click.option("--reason", required=True, help="Why; it is kept in the audit log.")
@_revision_option
@output_option
@talks_to_daemon
def set_knob(
    *,
    knob: str,
    value: str,
    ttl: float,
    reason: str,
    if_match: int | None,
    output: str,
    socket: Path | None,
    timeout: float,
) -> None:
    """Override KNOB (margin, policy) with VALUE for a while.

    Example: kvctl set margin 12% --for 30m --reason "preemptions since 02:10"
    """
    body = {"value": value, "ttl_s": ttl, "reason": reason}
    with daemon(socket, timeout) as client:
        change = client.put(f"/v1/overrides/{quote(knob, safe='')}", body, if_match)
    _tell(change, output)


@click.command("unset")
@click.argument("knob")
@_revision_option
@output_option
@talks_to_daemon
def unset_knob(knob: str, if_match: int | None, output: str, socket: Path | None, timeout: float) -> None:
    """End the override of KNOB; its setting is back at once."""
    with daemon(socket, timeout) as client:
        change = client.delete(f"/v1/overrides/{quote(knob, safe='')}", if_match)
    _tell(change, output)


@click.command("overrides")
@output_option
@talks_to_daemon
def list_overrides(output: str, socket: Path | None, timeout: float) -> None:
    """The overrides in force, and their revision."""
    with daemon(socket, timeout) as client:
        document = client.get("/v1/overrides")
    if output == "json":
        emit(document)
    else:
        lines = override_lines(document) or ["no override is in force"]
        click.echo("\n".join([*lines, f"revision {document['revision']}"]))


def _tell(change: Mapping[str, Any], output: str) -> None:
    if output == "json":
        emit(change)
    else:
        knob = change["knob"]
        life = "" if change["left_s"] is None else f" for {span(change['left_s'])}"
        moved = f"{value_text(knob, change['old'])} -> {value_text(knob, change['new'])}"
        click.echo(f"{knob}: {moved}{life} (revision {change['revision']})")
    if not change["kept"]:
        click.echo(
            "kvctl: in force, but the daemon could not write it down: a restart would undo it", err=True
        )


def override_lines(document: Mapping[str, Any]) -> list[str]:
    """One line for each override in force."""
    return [
        f"{paint(knob, bold=True)} = {value_text(knob, each['value'])} for {span(each['left_s'])} more, "
        f"by {each['actor']}: {each['reason']}"
        for knob, each in document["active"].items()
    ]


def value_text(knob: str, value: Any) -> str:
    """A knob's value as an operator would write it."""
    return percent(value) if knob == "margin" else str(value)
