"""The demo's result: figures by policy as JSON or as a table, and one sentence each."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvctl.cli.demo_run import LaneRun, Play
from kvctl.core.outcomes import Policy
from kvctl.sim.score import TPOT_S, TTFT_S, Score, score

SLIP_WORTH_A_WORD = 0.05
"""Share of the run that an engine may lose to a busy machine before the summary says so."""


def summary(play: Play, gpu_poll_s: float) -> dict[str, Any]:
    """The whole result as JSON values."""
    scores = {run.policy: score(run.outcomes, play.seconds) for run in play.lanes}
    return {
        "seconds": play.seconds,
        "time": "real: nothing is accelerated",
        "calls": len(play.calls),
        "slo": {"ttft_s": TTFT_S, "tpot_s": TPOT_S},
        "policies": {run.policy.value: _policy(run, scores[run.policy]) for run in play.lanes},
        "budget": _budget(play, gpu_poll_s),
        "sentences": sentences(play, scores),
    }


def _policy(run: LaneRun, figures: Score) -> dict[str, Any]:
    return {
        "goodput_rps": round(figures.goodput_rps, 3),
        "good": figures.good,
        "completed": figures.completed,
        "refused": figures.refused,
        "refusals": figures.refusals,
        "unfinished": figures.unfinished,
        "failed": figures.failed,
        "preemptions": int(run.engine.preemptions),
        "ttft_p50_s": _rounded(figures.ttft_p50_s),
        "ttft_p99_s": _rounded(figures.ttft_p99_s),
        "tpot_p50_s": _rounded(figures.tpot_p50_s),
        "kv_usage_mean": round(run.kv_usage_mean, 3),
        "engine_slipped_s": round(run.engine.slipped_s, 2),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def gated(play: Play) -> LaneRun:
    """The lane whose budget is the demo's subject."""
    return next((run for run in play.lanes if run.policy is Policy.FORECAST), play.lanes[-1])


def _budget(play: Play, gpu_poll_s: float) -> dict[str, Any]:
    run = gated(play)
    events: list[dict[str, Any]] = [
        {"t_s": one.t_s, "kind": "budget", "from": one.before, "to": one.after, "reason": one.reason}
        for one in run.events
    ]
    visits = ((play.neighbour_came_s, "arrives"), (play.neighbour_left_s, "leaves"))
    events += [
        {"t_s": round(at, 2), "kind": "neighbour", "from": None, "to": None, "reason": word}
        for at, word in visits
        if at is not None
    ]
    return {
        "min_tokens": min(run.budgets, default=None),
        "max_tokens": max(run.budgets, default=None),
        "changes": len(run.events),
        "gpu_poll_s": gpu_poll_s,
        "neighbour": {
            "arrived_s": _rounded(play.neighbour_came_s),
            "left_s": _rounded(play.neighbour_left_s),
        },
        "events": sorted(events, key=lambda event: event["t_s"]),
    }


def sentences(play: Play, scores: dict[Policy, Score]) -> list[str]:
    """One sentence for each policy, one for the budget, one for the machine where it was too slow."""
    told = [_SENTENCE[run.policy](run, scores[run.policy]) for run in play.lanes]
    told.append(_budget_sentence(play))
    slowest = max(play.lanes, key=lambda run: run.engine.slipped_s)
    if slowest.engine.slipped_s > SLIP_WORTH_A_WORD * play.seconds:
        told.append(
            f"This machine was too busy: the engine of {slowest.policy} lost {slowest.engine.slipped_s:.1f} s"
            f" of {play.seconds:g}, so the figures are worse than the policies."
        )
    return told


def _none_sentence(run: LaneRun, figures: Score) -> str:
    return (
        f"none: everybody gets in, so half of the callers waited {_seconds(figures.ttft_p50_s)} or more for a"
        f" first token, {figures.completed - figures.good} of {figures.completed} answers came too late, and"
        f" the engine threw work away {run.engine.preemptions:.0f} times to free memory."
    )


def _static_sentence(run: LaneRun, figures: Score) -> str:
    return (
        f"static: the worst case of every request is reserved, so {figures.refused} callers went away with"
        f" a 429 while {1 - run.kv_usage_mean:.0%} of the KV pool stood empty on average."
    )


def _forecast_sentence(run: LaneRun, figures: Score) -> str:
    return (
        f"forecast: {figures.good} of {figures.calls} callers were served in time with"
        f" {run.engine.preemptions:.0f} preemptions; {figures.refused} gave up after three tries."
    )


_SENTENCE = {
    Policy.NONE: _none_sentence,
    Policy.STATIC: _static_sentence,
    Policy.FORECAST: _forecast_sentence,
}


def _budget_sentence(play: Play) -> str:
    run = gated(play)
    if play.neighbour_came_s is None or not run.budgets:
        return "budget: the run ended before the neighbour came."
    fall = next(
        (one for one in run.events if one.t_s >= play.neighbour_came_s and one.reason == "gpu_memory"), None
    )
    if fall is None:
        return "budget: it did not move when the neighbour took memory."
    came = f"the neighbour took memory at {play.neighbour_came_s:.1f} s"
    fell = f"the budget fell to {min(run.budgets):,} tokens after {fall.t_s - play.neighbour_came_s:.1f} s"
    return f"budget: {came}, {fell}, and stood at {run.budgets[-1]:,} of {max(run.budgets):,} at the end."


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _rows(run: LaneRun, figures: Score) -> dict[str, str]:
    return {
        "goodput, requests/s": f"{figures.goodput_rps:.2f}",
        "served in time": f"{figures.good}",
        "completed": f"{figures.completed}",
        "refused to the end": f"{figures.refused}",
        "unfinished at the end": f"{figures.unfinished}",
        "failed": f"{figures.failed}",
        "preemptions": f"{run.engine.preemptions:.0f}",
        "first token, median": _seconds(figures.ttft_p50_s),
        "first token, 99 %": _seconds(figures.ttft_p99_s),
        "KV pool used, mean": f"{run.kv_usage_mean:.0%}",
    }


def summary_table(play: Play) -> RenderableType:
    """The result for people."""
    scores = {run.policy: score(run.outcomes, play.seconds) for run in play.lanes}
    table = Table(
        title=f"The same {len(play.calls)} calls under each policy, {play.seconds:g} s of real time"
    )
    table.add_column("")
    for run in play.lanes:
        table.add_column(run.policy.value, justify="right")
    columns = [_rows(run, scores[run.policy]) for run in play.lanes]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    target = (
        f"In time: first token within {TTFT_S:g} s of the first attempt, then {TPOT_S * 1000:g} ms per token."
    )
    return Group(table, *(Text(line) for line in (target, *sentences(play, scores))))
