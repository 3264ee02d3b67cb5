"""``kvctl engines``: every engine with its ranks, one line each."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from kvctl.cli.common import (
    count,
    look,
    looks_at_daemon,
    percent,
    table,
)


@click.command()
@looks_at_daemon
def engines(**asked: Any) -> None:
    """The engines and their ranks: state, pool, what runs and waits in them."""
    look("/v1/engines", lambda it: _lines(it["engines"]), **asked)


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield table([row for name, gate in found.items() for row in _rows(name, gate)])
    for name, gate in found.items():
        yield ""
        names = ", ".join(gate["models"]) or "no model yet"
        yield f"{name} serves {names}, context {count(gate['context_tokens'])}"


def _rows(name: str, gate: Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
    for rank in gate["ranks"] or [{}]:
        yield {
            "ENGINE": name,
            "STATE": gate["state"],
            "RANK": rank.get("rank", "-"),
            "CAPACITY": count(rank.get("capacity_tokens")),
            "USED": percent(rank.get("kv_usage_ratio")),
            "RUNNING": count(rank.get("running")),
            "WAITING": count(rank.get("waiting")),
            "GAUGE": rank.get("usage_gauge") or "?",
        }
