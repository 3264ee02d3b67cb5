"""A comparison on the terminal: the figures, and pool usage over time for each policy."""

from collections.abc import Callable, Mapping

import click

from kvctl.cli.common import paint, table
from kvctl.cli.replay_run import Comparison
from kvctl.sim.replay import Run

WIDTH = 72
BARS = " ▁▂▃▄▅▆▇█"


def show_table(found: Comparison) -> None:
    """Print all."""
    scene, target = found.scene, found.target
    rate = (len(scene.rows) - 1) / scene.seconds
    capacity = (scene.engine.blocks - 1) * scene.engine.block_size
    click.echo(
        f"{len(scene.rows):,} requests at {rate:.3g}/s on {scene.engine.profile.name}, {capacity:,} KV"
        f" tokens; good: first token within {target.ttft_s:g} s, then {target.itl_s * 1000:g} ms a token;"
        " times in seconds"
    )
    click.echo()
    click.echo(table([_row(name, one) for name, one in found.document().items()]))
    click.echo()
    for remark in found.remarks:
        click.echo(remark)
    for name, run in found.runs.items():
        click.echo(f"{paint(name, bold=True)}: KV usage, peak in each {scene.seconds / WIDTH:.3g} s")
        click.echo(f"  {spark(run, scene.seconds)}")


def _row(name: str, one: Mapping[str, float | None]) -> dict[str, str]:
    shown = {"POLICY": name}
    return shown | {title: form(one[key]) for title, (key, form) in _COLUMNS.items()}


def _form(spec: str) -> Callable[[float | None], str]:
    return lambda value: "-" if value is None else format(value, spec)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1 else f"{value:.1f}"


_COLUMNS: Mapping[str, tuple[str, Callable[[float | None], str]]] = {
    "GOOD/S": ("goodput_rps", _form(".2f")),
    "GOOD": ("goodput_frac", _form(".1%")),
    "DONE": ("completed", _form("d")),
    "REFUSED": ("refused", _form("d")),
    "PREEMPTED": ("preemptions", _form("d")),
    "TTFT P50": ("ttft_p50_s", _seconds),
    "TTFT P99": ("ttft_p99_s", _seconds),
    "TPOT P99": ("tpot_p99_s", _seconds),
    "KV USED": ("kv_usage_mean", _form(".0%")),
    "RETRY OK": ("retry_success_frac", _form(".0%")),
}


def spark(run: Run, seconds: float, width: int = WIDTH) -> str:
    """Usage over time in one line of bars, each the highest in its stretch."""
    highest = [-1.0] * width
    for point in run.points:
        at = min(int(point.at_s / seconds * width), width - 1)
        highest[at] = max(highest[at], point.usage)
    for at in range(1, width):  # a short run has fewer points than places
        highest[at] = highest[at] if highest[at] >= 0.0 else highest[at - 1]
    return "".join(BARS[min(round(value * (len(BARS) - 1)), len(BARS) - 1)] for value in highest)
