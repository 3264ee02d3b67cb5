"""``kvctl events``: what happens, as it happens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvctl.cli.common import FAILED, CommandError, count, daemon, emit, paint, talks_to_daemon
from kvctl.cli.terminal import shown

_SILENCE_S = 60.0  # the daemon says something every 10 s; more silence is a daemon that hangs


@click.command()
@click.option(
    "-f", "--follow", is_flag=True, help="Go on until Ctrl-C, instead of only showing the last decisions."
)
@click.option("--types", default="", help="Only these: decision,end,budget,state,override,... [all]")
@click.option("-n", "--lines", "most", type=click.IntRange(0, 10_000), default=20, show_default=True)
@click.option("-o", "--output", type=click.Choice(["table", "jsonl"]), default="table", show_default=True)
@talks_to_daemon
def events(*, follow: bool, types: str, most: int, output: str, socket: Path | None, timeout: float) -> None:
    """The last decisions; with -f also what happens: budget and state changes, overrides, events of cards.

    Example: kvctl events -f --types budget,state,override
    """
    asked = {each for each in types.split(",") if each}
    decisions = not asked or "decision" in asked
    if not (decisions or follow):
        text = "only decisions are remembered; with -f the others are shown as they happen"
        raise click.UsageError(f"--types {types}: {text}")
    with daemon(socket, timeout) as client:
        past = client.get(f"/v1/decisions?limit={most}")["decisions"] if decisions else []
    for each in past:
        _show({"type": "decision", **each}, output)
    if not follow:
        return
    with daemon(socket, max(timeout, _SILENCE_S)) as client:
        for happening in client.lines(f"/v1/events?types={types}"):
            if happening["type"] == "cut":
                raise CommandError(f"the daemon cut this stream: {happening['reason']}", FAILED)
            if happening["type"] not in ("hello", "beat"):
                _show(happening, output)
    raise CommandError("the stream ended: the daemon is stopping", FAILED)


def _show(happening: Mapping[str, Any], output: str) -> None:
    if output == "jsonl":
        emit(happening, "jsonl")
    else:
        click.echo(line(shown(happening)))


def line(happening: Mapping[str, Any]) -> str:
    """One happening for people."""
    clock = str(happening.get("time", ""))[11:23]
    return f"{clock}  {_WORDS.get(happening['type'], _other)(happening)}"


def _decision(it: Mapping[str, Any]) -> str:
    size = f"{it['prompt_tokens']:,}+{'?' if it['allowed_output'] is None else it['allowed_output']} tokens"
    if it["reason"] is None:
        return f"{paint('admit ', fg='green')}  {it['id']}  {size}  leaves {count(it['headroom_tokens'])}"
    word = "shadow" if it["shadow"] else "refuse"
    later = "" if it["retry_after_s"] is None else f"  retry after {it['retry_after_s']:g} s"
    return f"{paint(word, fg='red')}  {it['id']}  {size}  {it['reason']}{later}"


def _end(it: Mapping[str, Any]) -> str:
    return f"end     {it['id']}  {it['end']}  {it['output_tokens']:,} tokens in {it['seconds']:.2f} s"


def _sentence(it: Mapping[str, Any]) -> str:
    return f"{it['type']:<6}  {it['sentence']}"


def _change(it: Mapping[str, Any]) -> str:
    moved = f" {it['knob']}: {it.get('old')} -> {it.get('new')}" if it.get("knob") else ""
    moved += f" of {it['engine']}" if it.get("engine") else ""
    why = f" ({it['reason']})" if it.get("reason") else ""
    return f"{paint(str(it['verb']), bold=True)}{moved} by {it['user']}{why}"


def _other(it: Mapping[str, Any]) -> str:
    return f"{it['type']}  " + "  ".join(f"{k}={v}" for k, v in it.items() if k not in ("type", "time"))


_WORDS = {
    "decision": _decision,
    "end": _end,
    "budget": _sentence,
    "state": _sentence,
    "note": _sentence,
    "override": _change,
    "traffic": _change,
    "reload": _change,
    "level": _change,
}
