"""What the demo shows while it runs: a live table on a terminal, one line a second elsewhere."""

from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvctl.cli.demo_run import LaneRun, Play
from kvctl.cli.demo_summary import gated
from kvctl.sim.load import phase_at
from kvctl.sim.score import is_good

_WORDS = {
    "calm": "calm: fewer calls than the engine can serve.",
    "burst": (
        "burst: about twice what the engine can serve. none lets all in, to wait and to preempt one another;"
        " static reserves worst cases and leaves the pool empty; forecast fills it and sends the rest away"
        " for a moment."
    ),
    "over": "no more arrivals: what is in flight may finish.",
}
_NEIGHBOUR_WORDS = (
    " Somebody else's process has taken memory of the card: the budget shrinks until it leaves."
)


class View(Protocol):
    """Shows a play once a second. Use as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def show(self, play: Play) -> None:
        """The play as it stands."""
        ...


def make_view(console: Console) -> View:
    """A live table if ``console`` is a terminal, else lines."""
    return TableView(console) if console.is_terminal else LineView(console)


def phase_words(play: Play) -> str:
    """What is going on, in words."""
    return _WORDS[phase_name(play)] + (_NEIGHBOUR_WORDS if play.neighbour_is_there else "")


def phase_name(play: Play) -> str:
    """The load's phase: calm, burst, or over."""
    phase = phase_at(play.now_s / play.seconds)
    return "over" if phase is None else phase.name


def good_so_far(run: LaneRun) -> int:
    """Calls served in time up to now."""
    return sum(is_good(outcome) for outcome in run.outcomes)


def refusals_so_far(run: LaneRun) -> int:
    """Answers 429 and 503 up to now."""
    return sum(outcome.refusals for outcome in run.outcomes)


def line(play: Play) -> str:
    """One second of the play on one line."""
    run = gated(play)
    gate = run.gate
    budget = "budget unknown"
    if gate:
        budget = f"budget {gate['budget_tokens']:>6,} {gate['budget_reason']:<10}"
        budget += f" forecast {gate['forecast_peak_tokens']:>6,.0f}"
    lanes = " | ".join(_lane_words(one) for one in play.lanes)
    return f"{play.now_s:4.0f} s {phase_name(play):<5} {budget} | {lanes}"


def _lane_words(run: LaneRun) -> str:
    engine = run.engine
    return (
        f"{run.policy}: {engine.kv_usage:4.0%} run {engine.running:.0f} wait {engine.waiting:.0f}"
        f" good {good_so_far(run)} 429 {refusals_so_far(run)} preempted {engine.preemptions:.0f}"
    )


class LineView:
    """One line a second, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to put back."""

    def show(self, play: Play) -> None:
        """Print a line, and what is going on when that has changed."""
        words = phase_words(play)
        if words != self._phase:
            self._phase = words
            self._console.print(f"--- {words}", highlight=False, soft_wrap=True)
        self._console.print(line(play), highlight=False, soft_wrap=True)


class TableView:
    """A table that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, play: Play) -> None:
        """Redraw."""
        self._live.update(live_table(play), refresh=True)


def live_table(play: Play) -> RenderableType:
    """The play as it stands: a heading, one row for each policy, the last changes of the budget."""
    table = Table(show_edge=False, pad_edge=False)  # with the cells below: 80 columns are enough
    for name in (
        "policy",
        "in engine",
        "waiting",
        "KV used",
        "budget",
        "forecast",
        "in time",
        "429s",
        "preempted",
    ):
        table.add_column(name.replace(" ", "\n"), justify="left" if name == "policy" else "right")
    for run in play.lanes:
        table.add_row(*_cells(run))
    heading = Text(f"{play.now_s:3.0f} / {play.seconds:g} s  {phase_words(play)}", style="bold")
    changes = [
        Text(f"{one.t_s:5.1f} s  budget {one.before:,} -> {one.after:,} ({one.reason})")
        for one in gated(play).events[-4:]
    ]
    return Group(heading, table, *changes)


def _cells(run: LaneRun) -> list[str]:
    engine, gate = run.engine, run.gate
    return [
        run.policy.value,
        f"{engine.running:.0f}",
        f"{engine.waiting:.0f}",
        f"{engine.kv_usage:.0%}",
        f"{gate['budget_tokens']:,}" if gate else "?",
        f"{gate['forecast_peak_tokens']:,.0f}" if gate else "?",
        f"{good_so_far(run)}",
        f"{refusals_so_far(run)}",
        f"{engine.preemptions:.0f}",
    ]
