"""A comparison on the terminal: the figures, and pool usage over time for each policy."""

import click

from kvctl.cli.common import paint, table
from kvctl.cli.replay_run import Comparison
from kvctl.sim.replay import Run
from kvctl.sim.replay_score import Figures, figures

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
    results = {name: figures(run, target) for name, run in found.runs.items()}
    click.echo(table([_row(name, one) for name, one in results.items()]))
    click.echo()
    for name, run in found.runs.items():
        click.echo(f"{paint(name, bold=True)}: KV usage, peak in each {scene.seconds / WIDTH:.3g} s")
        click.echo(f"  {spark(run, scene.seconds)}")


def _row(name: str, one: Figures) -> dict[str, str]:
    return {
        "POLICY": name,
        "GOOD/S": f"{one.goodput_rps:.2f}",
        "GOOD": f"{one.goodput_frac:.1%}",
        "DONE": str(one.completed),
        "REFUSED": str(one.refused),
        "PREEMPTED": str(one.preemptions),
        "TTFT P50": _seconds(one.ttft_p50_s),
        "TTFT P99": _seconds(one.ttft_p99_s),
        "TPOT P99": _seconds(one.tpot_p99_s),
        "KV USED": f"{one.kv_usage_mean:.0%}",
        "RETRY OK": "-" if one.retry_success_frac is None else f"{one.retry_success_frac:.0%}",
    }


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1 else f"{value:.1f}"


def spark(run: Run, seconds: float, width: int = WIDTH) -> str:
    """Usage over time in one line of bars, each the highest in its stretch."""
    highest = [0.0] * width
    for point in run.points:
        at = min(int(point.at_s / seconds * width), width - 1)
        highest[at] = max(highest[at], point.usage)
    return "".join(BARS[min(round(value * (len(BARS) - 1)), len(BARS) - 1)] for value in highest)
