"""``kvctl top``: the live view."""

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvctl.cli.common import count, daemon, percent, talks_to_daemon

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

Document = Mapping[str, Any]
_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60
_SHOWN = 8  # of the last refusals


@click.command()
@click.option("--interval", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, help="Seconds.")
@click.option("--frames", type=click.IntRange(1), help="Stop after so many. [until Ctrl-C]")
@talks_to_daemon
def top(*, interval: float, frames: int | None, socket: Path | None, timeout: float) -> None:
    """Budget against forecast, usage, what runs, and the last refusals, live."""
    from rich.console import Console  # noqa: PLC0415 - no other command waits for rich
    from rich.live import Live  # noqa: PLC0415

    console, past = Console(), History()
    with daemon(socket, timeout) as client, Live(console=console, screen=console.is_terminal) as live:
        shown = 0
        while frames is None or shown < frames:
            document = client.get("/v1/status")
            refused = client.get(f"/v1/decisions?refused=1&limit={_SHOWN}")["decisions"]
            past.note(document)
            live.update(frame(document, refused, past), refresh=True)
            shown += 1
            if frames is None or shown < frames:
                time.sleep(interval)


class History:
    """Headroom of late, by engine, for the small curve."""

    def __init__(self) -> None:
        self._taken: dict[str, deque[float]] = {}

    def note(self, document: Document) -> None:
        """One more reading."""
        for name, gate in document["engines"].items():
            share = gate["forecast_peak_tokens"] / max(gate["budget_tokens"], 1)
            self._taken.setdefault(name, deque(maxlen=_HISTORY)).append(share)

    def curve(self, name: str) -> str:
        """The share of the budget that the forecast takes, a character a reading."""
        steps = len(_BARS) - 1
        return "".join(_BARS[min(max(round(each * steps), 0), steps)] for each in self._taken.get(name, ()))


def frame(document: Document, refused: list[Document], past: History) -> "Group":
    """One picture."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    colour = "green" if document["mode"] == "active" else "red"
    parts: list[RenderableType] = [
        Text(f"kvctl {document['version']}  {document['mode']}", style=f"bold {colour}")
    ]
    parts += [_engine(name, gate, past) for name, gate in document["engines"].items()]
    parts += [
        Text(f"{k} = {v['value']} for {v['left_s']:.0f} s more: {v['reason']}", style="yellow")
        for k, v in document["overrides"]["active"].items()
    ]
    parts.append(_refusals(refused))
    return Group(*parts)


def _engine(name: str, gate: Document, past: History) -> "RenderableType":
    from rich.panel import Panel  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    grid = Table.grid(padding=(0, 2))
    budget = max(gate["budget_tokens"], 1)
    for label, value in (
        ("capacity", gate["capacity_tokens"]),
        ("budget", gate["budget_tokens"]),
        ("forecast", gate["forecast_peak_tokens"]),
        ("held", gate["held_tokens"]),
    ):
        grid.add_row(label, count(value), _bar(value / budget))
    used = [rank["kv_usage_ratio"] for rank in gate["ranks"] if rank["kv_usage_ratio"] is not None]
    grid.add_row("engine usage", percent(max(used)) if used else "?", _bar(max(used)) if used else "")
    grid.add_row("in flight", count(gate["leases"]), f"nearest limit {gate['binding_limit']}")
    grid.add_row("of late", "", past.curve(name))
    colour = "green" if gate["state"] == "up" else "red"
    return Panel(grid, title=f"{name}  {gate['state']}", border_style=colour, title_align="left")


def _bar(share: float, width: int = 40) -> str:
    full = min(max(round(share * width), 0), width)
    return "█" * full + "·" * (width - full)


def _refusals(refused: list[Document]) -> "RenderableType":
    from rich.table import Table  # noqa: PLC0415

    made = Table(title="last refusals", title_justify="left", expand=False, box=None)
    for head in ("time", "id", "prompt", "allowed", "reason", "retry after"):
        made.add_column(head)
    for it in reversed(refused):
        later = "-" if it["retry_after_s"] is None else f"{it['retry_after_s']:g} s"
        made.add_row(
            it["time"][11:19],
            it["id"][:36],
            count(it["prompt_tokens"]),
            count(it["allowed_output"]),
            it["reason"],
            later,
        )
    return made
