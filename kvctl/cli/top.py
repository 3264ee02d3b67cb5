"""``kvctl top``: the live view.

What the daemon tells is put in as text, never as markup, and fits the screen: with more engines than there is
room for, each has a line instead of a panel.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvctl.cli.common import Between, count, daemon, percent, span, talks_to_daemon
from kvctl.cli.knobs import drain_lines
from kvctl.cli.terminal import shown

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType

Document = Mapping[str, Any]
_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60
_SHOWN = 8  # of the last refusals
_PANEL_LINES = 10  # of one engine, written out
_OTHER_COLUMNS = 52  # characters beside a refusal's id
_STATE = 14  # characters of an engine's longest state, and what is between columns
_COLUMNS = {"budget": 0, "forecast": 0, "used": 46, "runs": 56, "waits": 62, "of late": 72}
"""Of an engine's line, with the width of the screen from which they are shown."""


@click.command()
@click.option("--interval", type=Between(0.2, 60), default=1.0, show_default=True, help="Seconds.")
@click.option("--frames", type=click.IntRange(1), help="Stop after so many. [until Ctrl-C]")
@talks_to_daemon
def top(*, interval: float, frames: int | None, socket: Path | None, timeout: float) -> None:
    """Budget against forecast, usage, what runs, and the last refusals, live."""
    from rich.console import Console  # noqa: PLC0415 - no other command waits for rich

    console, past = Console(), History()
    with daemon(socket, timeout) as client, _screen(console) as draw:
        drawn = 0
        while frames is None or drawn < frames:
            document = client.get("/v1/status")
            refused = client.get(f"/v1/decisions?refused=1&limit={_SHOWN}")["decisions"]
            past.note(document)
            draw(frame(shown(document), shown(refused), past, console.size))
            drawn += 1
            if frames is None or drawn < frames:
                time.sleep(interval)


@contextmanager
def _screen(console: "Console") -> "Iterator[Callable[[Group], None]]":
    """What draws a picture in place of the one before; below it where nothing can be drawn over."""
    from rich.live import Live  # noqa: PLC0415

    if not console.is_terminal or console.is_dumb_terminal:
        yield console.print
        return
    with Live(console=console, screen=True) as live:
        yield lambda picture: live.update(picture, refresh=True)


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


def frame(
    document: Document, refused: list[Document], past: History, size: tuple[int, int] = (80, 24)
) -> "Group":
    """One picture of at most ``size`` columns and lines, as far as engines and overrides allow."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    colour = "green" if document["mode"] == "active" else "red"
    overrides = [
        Text(f"{k} = {v['value']} for {v['left_s']:.0f} s more: {v['reason']}", "yellow", overflow="ellipsis")
        for k, v in document["overrides"]["active"].items()
    ]
    overrides += [Text(line, "red", overflow="ellipsis") for line in drain_lines(document["overrides"])]
    for line in overrides:
        line.no_wrap = True
    title = Text(f"kvctl {document['version']}  {document['mode']}", style=f"bold {colour}")
    width, height = size
    engines, least = document["engines"], 4  # lines: the title, the refusals' two heads and one of them
    if len(engines) * _PANEL_LINES + len(overrides) + least <= height:
        told = [_engine(name, gate, past) for name, gate in engines.items()]
        lines = len(engines) * _PANEL_LINES
    else:
        told, lines = [_in_lines(engines, past, width)], len(engines) + 1
    room = height - lines - len(overrides) - least + 1
    return Group(title, *told, *overrides, _refusals(refused[-max(room, 1) :], width))


def _engine(name: str, gate: Document, past: History) -> "RenderableType":
    from rich.panel import Panel  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    grid = Table.grid(padding=(0, 2))
    budget = max(gate["budget_tokens"], 1)
    for label, value in (
        ("capacity", gate["capacity_tokens"]),
        ("budget", gate["budget_tokens"]),
        ("forecast", gate["forecast_peak_tokens"]),
        ("held", gate["held_tokens"]),
    ):
        grid.add_row(label, count(value), _bar(value / budget))
    used = _used(gate)
    grid.add_row("engine usage", percent(used), "" if used is None else _bar(used))
    grid.add_row("in flight", count(gate["leases"]), f"nearest limit {gate['binding_limit']}")
    grid.add_row("in queue", count(_waiting(gate)), _oldest(gate))
    grid.add_row("of late", "", past.curve(name))
    title = Text(f"{name}  {gate['state']}")
    return Panel(grid, title=title, border_style=_colour(gate), title_align="left")


def _in_lines(engines: Document, past: History, width: int) -> "RenderableType":
    """A line for each engine; on a narrow screen with fewer columns, which can be read."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    heads = [head for head, least in _COLUMNS.items() if width >= least]
    room = max(width - _STATE - sum(len(head) + 1 for head in heads), 8)
    most = None if heads == list(_COLUMNS) else room
    made.add_column("engine", no_wrap=True, overflow="ellipsis", ratio=1, min_width=8, max_width=most)
    made.add_column("state", no_wrap=True)
    for head in heads:
        made.add_column(head, justify="right", no_wrap=True, min_width=len(head), max_width=12)
    for name, gate in engines.items():
        cells = {
            "budget": count(gate["budget_tokens"]),
            "forecast": count(gate["forecast_peak_tokens"]),
            "used": percent(None if (used := _used(gate)) is None else round(used, 3)),
            "runs": count(gate["leases"]),
            "waits": count(_waiting(gate)),
            "of late": past.curve(name)[-12:],
        }
        made.add_row(Text(name), Text(gate["state"], style=_colour(gate)), *(cells[head] for head in heads))
    return made


def _colour(gate: Document) -> str:
    return "green" if gate["state"] == "up" else "red"


def _used(gate: Document) -> float | None:
    """Of the fullest rank."""
    known = [rank["kv_usage_ratio"] for rank in gate["ranks"] if rank["kv_usage_ratio"] is not None]
    return max(known, default=None)


def _waiting(gate: Document) -> int:
    return sum(gate["queue"]["waiting"].values()) if gate["queue"] else 0


def _oldest(gate: Document) -> str:
    return f"the first for {span(gate['queue']['oldest_s'])}" if _waiting(gate) else ""


def _bar(share: float, width: int = 40) -> str:
    full = min(max(round(share * width), 0), width)
    return "█" * full + "·" * (width - full)


def _refusals(refused: list[Document], width: int) -> "RenderableType":
    """The last ones, the latest first; ids give way on a narrow screen."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    made = Table(title="last refusals", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column("time", no_wrap=True)
    made.add_column("id", no_wrap=True, overflow="ellipsis", max_width=max(width - _OTHER_COLUMNS, 8))
    sizes = ("prompt", "allowed") if width >= _OTHER_COLUMNS + 8 else ()
    for head in sizes:
        made.add_column(head, justify="right", no_wrap=True)
    made.add_column("reason", no_wrap=True)
    made.add_column("retry", justify="right", no_wrap=True)
    for it in reversed(refused):
        later = "-" if it["retry_after_s"] is None else f"{it['retry_after_s']:g} s"
        told = (count(it["prompt_tokens"]), count(it["allowed_output"])) if sizes else ()
        made.add_row(it["time"][11:19], Text(it["id"]), *told, it["reason"], later)
    return made
