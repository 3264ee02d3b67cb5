"""``kvctl set``, ``unset`` and ``overrides``: what on-call may change, for how long and why."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from kvctl.admin.client import AdminClient
from kvctl.cli.common import (
    answer,
    confirm,
    count,
    daemon,
    for_option,
    output_option,
    paint,
    percent,
    span,
    talks_to_daemon,
    yes_option,
)
from kvctl.cli.terminal import harmless, shown

ALL_ENGINES = "*"  # of drains: all engines, whatever their names
_SHARES = frozenset({"margin", "enforce"})
_TIMES = frozenset({"queue_max_wait"})

_revision_option = click.option(
    "--if-match",
    type=click.IntRange(0),
    metavar="REVISION",
    help="Change only if the overrides are at this revision.",
)


@click.command("set")
@click.argument("knob")
@click.argument("value")
@for_option("How long; then the setting applies again.")
@click.option("--reason", help="Why; it is kept in the audit log. Required, except with --dry-run.")
@_revision_option
@click.option(
    "--dry-run", is_flag=True, help="Change nothing: show before and after, and the last 5 minutes."
)
@yes_option
@output_option
@talks_to_daemon
def set_knob(
    *,
    knob: str,
    value: str,
    ttl: float,
    reason: str | None,
    if_match: int | None,
    dry_run: bool,
    yes: bool,
    output: str,
    socket: Path | None,
    timeout: float,
) -> None:
    """Override KNOB with VALUE for a while.

    Knobs: margin, policy, enforce, max_context, capacity_tokens, queue_max_wait.

    Example: kvctl set margin 12% --for 30m --reason "preemptions since 02:10"
    """
    if reason is None and not dry_run:
        raise click.UsageError("Missing option '--reason': why it is changed.")
    body = {"value": value, "ttl_s": ttl} | ({} if reason is None else {"reason": reason})
    route = f"/v1/overrides/{quote(knob, safe='')}"
    with daemon(socket, timeout) as client:
        if dry_run:
            seen = client.put(f"{route}?dry_run=1", body, if_match)
            answer(seen, output, preview)
            return
        _ask(client, route, body, yes=yes)
        before = client.get("/v1/overrides")["active"]
        change = client.put(route, body, if_match)
    _tell(change, output, before.get(change["knob"]))


def _ask(client: AdminClient, route: str, body: Mapping[str, Any], *, yes: bool) -> None:
    """At a terminal, show what the change would do before it is made, and ask."""
    if yes or not sys.stdin.isatty():
        return
    for line in preview(shown(client.put(f"{route}?dry_run=1", body))):
        click.echo(line, err=True)
    confirm("Put it in force?", yes=yes)


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
    answer(document, output, _held)


def _held(document: Mapping[str, Any]) -> Iterator[str]:
    yield from override_lines(document) or ["no override is in force"]
    yield from drain_lines(document)
    yield f"revision {document['revision']}"


def preview(seen: Mapping[str, Any]) -> Iterator[str]:
    """What a change would do, in lines."""
    knob = seen["knob"]
    yield f"{knob}: {value_text(knob, seen['old'])} -> {value_text(knob, seen['new'])} would mean"
    for name, each in seen["engines"].items():
        before, after = each["before"], each["after"]
        yield f"  {name}:"
        for key in ("budget_tokens", "headroom_tokens"):
            yield f"    {key.removesuffix('_tokens')} {count(before[key])} -> {count(after[key])} KV tokens"
    last = seen["last"]
    if last is None:
        yield "  what it would have meant for the last decisions, the log cannot tell"
        return
    yield (
        f"  of {last['refusals']:,} refusals of the last {span(last['seconds'])} about "
        f"{last['refusals_admitted']:,} would have been admitted,"
    )
    admitted = last["decisions"] - last["refusals"]
    yield f"  of {admitted:,} other decisions about {last['admissions_refused']:,} refused"


def _tell(change: Mapping[str, Any], output: str, replaced: Mapping[str, Any] | None = None) -> None:
    answer(change, output, _moved)
    if replaced is not None and output == "table":
        whose = f"by {replaced['actor']} ({replaced['reason']}), {span(replaced['left_s'])} of it left"
        click.echo(harmless(f"it replaces an override {whose}"))
    if not change["kept"]:
        click.echo(
            "kvctl: in force, but the daemon could not write it down: a restart would undo it", err=True
        )


def _moved(change: Mapping[str, Any]) -> Iterator[str]:
    knob = change["knob"]
    life = "" if change["left_s"] is None else f" for {span(change['left_s'])}"
    moved = f"{value_text(knob, change['old'])} -> {value_text(knob, change['new'])}"
    yield f"{knob}: {moved}{life} (revision {change['revision']})"


def override_lines(document: Mapping[str, Any]) -> list[str]:
    """One line for each override in force."""
    return [
        f"{paint(knob, bold=True)} = {value_text(knob, each['value'])} for {span(each['left_s'])} more, "
        f"by {each['actor']}: {each['reason']}"
        for knob, each in document["active"].items()
    ]


def drain_lines(document: Mapping[str, Any]) -> list[str]:
    """One line for each drain that on-call ordered; none from a daemon older than this command."""
    lines = []
    for name, each in document.get("drains", {}).items():
        whom, back = ("all engines", "") if name == ALL_ENGINES else (name, f" --engine {name}")
        why = f": {each['reason']}" if each["reason"] else ""
        drained = f"{whom} drained for {span(each['for_s'])} by {each['actor']}{why}"
        lines.append(f"{drained}; holds over restarts, kvctl undrain{back} ends it")
    return lines


def value_text(knob: str, value: Any) -> str:
    """A knob's value as an operator would write it."""
    if value is None:
        return "none"
    if knob in _TIMES:
        return f"{value:g} s"
    return percent(value) if knob in _SHARES else str(value)
