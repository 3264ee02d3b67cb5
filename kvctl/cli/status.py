"""``kvctl status``: the tick's sentence first, then the numbers behind it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvctl.cli.common import count, daemon, emit, output_option, paint, percent, span, table, talks_to_daemon
from kvctl.cli.knobs import override_lines
from kvctl.core.outcomes import SERVING, EngineState

Document = Mapping[str, Any]
_GUESSED = {"plan": " (planned)", "fallback": " (assumed)"}


@click.command()
@output_option
@talks_to_daemon
def status(output: str, socket: Path | None, timeout: float) -> None:
    """What the daemon does and why."""
    with daemon(socket, timeout) as client:
        document = client.get("/v1/status")
    if output == "json":
        emit(document)
    else:
        click.echo("\n".join(page(document)))


def page(document: Document) -> list[str]:
    """The lines of the table form."""
    engines, gpus = document["engines"], document["gpus"]
    blocks = [
        [_coloured(document)],
        table([_engine(name, gate) for name, gate in engines.items()]).splitlines(),
        table([row for gate in engines.values() for row in map(_rank, gate["ranks"])]).splitlines(),
        table([_gpu(card) for card in gpus]).splitlines(),
        override_lines(document["overrides"]),
    ]
    head, *rest = [block for block in blocks if block]
    return head + [line for block in rest for line in ["", *block]]


def _coloured(document: Document) -> str:
    states = {gate["state"] for gate in document["engines"].values()}
    if document["mode"] != "active" or states - {str(state) for state in SERVING}:
        return paint(document["sentence"], fg="red")
    return paint(document["sentence"], fg="green" if states <= {EngineState.UP.value} else "yellow")


def _engine(name: str, gate: Document) -> Mapping[str, str]:
    return {
        "ENGINE": name,
        "STATE": gate["state"],
        "POLICY": gate["policy"],
        "CAPACITY": count(gate["capacity_tokens"]) + _GUESSED.get(gate["capacity_source"], ""),
        "MARGIN": percent(gate["margin_ratio"]),
        "BUDGET": count(gate["budget_tokens"]),
        "REASON": gate["budget_reason"],
        "FORECAST": count(gate["forecast_peak_tokens"]),
        "HEADROOM": count(gate["headroom_tokens"]),
        "HELD": count(gate["held_tokens"]),
        "LEASES": count(gate["leases"]),
    }


def _rank(rank: Document) -> Mapping[str, str]:
    return {
        "RANK": rank["rank"],
        "AGE": f"{rank['age_s']:.1f} s",
        "CAPACITY": count(rank["capacity_tokens"]),
        "USED": percent(rank["kv_usage_ratio"]),
        "RUNNING": count(rank["running"]),
        "WAITING": count(rank["waiting"]),
        "PREEMPTIONS": count(rank["preemptions_total"]),
    }


def _gpu(card: Document) -> Mapping[str, str]:
    return {
        "GPU": "?" if card["index"] is None else str(card["index"]),
        "NAME": card["name"] or "?",
        "USED": _gib(card["used_bytes"]),
        "FREE": _gib(card["free_bytes"]),
        "TOTAL": _gib(card["total_bytes"]),
        "AGE": span(card["age_s"]) if card["age_s"] >= 1 else f"{card['age_s']:.1f} s",
        "STATE": "lost" if card["lost"] else "ok",
    }


def _gib(amount: int | None) -> str:
    return "?" if amount is None else f"{amount / 2**30:.1f} GiB"
