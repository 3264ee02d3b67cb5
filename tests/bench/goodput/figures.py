"""What a run came to, and what is kept of it.

Two runs are compared over the arrivals that both have in common once each has answered a hundred: their
``good_by_second`` from the later of their ``hundredth_s`` on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from kvctl.sim.replay import Call, Run
from kvctl.sim.replay_score import Target, figures, is_good, taken_in
from kvctl.sim.score import quantile
from tests.bench.goodput.callers import Heard
from tests.bench.goodput.stage import Page

TARGET = Target()
WARM_UP = 100  # answers that end before the figures called after_warm_up begin
LATE_S = 0.25  # a hundredth of the callers later than this: the machine was too busy for the run to count

Figures = dict[str, Any]

REPLAYED = (
    "goodput_rps",
    "goodput_frac",
    "goodput_tokens_per_s",
    "completed",
    "refused",
    "preemptions",
    "recomputed_frac",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p99_s",
    "kv_usage_mean",
    "retry_success_frac",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A call in short; times are seconds of the run, ``asked_at`` that of the last try."""

    at_s: float
    tries: int
    asked_at: float | None
    first_at: float | None
    ended_at: float | None
    output: int


def told(calls: Sequence[Call]) -> list[Told]:
    """What is kept of calls."""
    return [
        Told(
            at_s=round(call.row.at_s, 3),
            tries=call.tries,
            asked_at=_short(call.asked_at),
            first_at=_short(call.first_at),
            ended_at=_short(call.ended_at),
            output=call.output,
        )
        for call in calls
    ]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def document(calls: Sequence[Call], pages: Sequence[Page], heard: Heard) -> Figures:
    """The figures of a replay, and those of the calls that came after the first hundred had ended."""
    began, ended = pages[0], pages[-1]
    came = [page for page in pages[1:] if page.at - began.at <= calls[-1].row.at_s]
    run = Run(calls=list(calls), usages=[page.usage for page in came])
    run.preemptions = ended.preemptions - began.preemptions
    found: Figures = {name: getattr(figures(run, TARGET), name) for name in REPLAYED}
    found["recomputed_frac"] = None  # on no page of the engine
    late = quantile(heard.late_s, 0.99) or 0.0
    found |= {
        "requests": len(calls),
        "taken_in_p50_s": middle([taken_in(call) for call in calls]),
        "running_mean": fmean(page.running for page in came) if came else 0.0,
        "refusals": dict(heard.refusals),
        "wait_told_p50_s": middle(heard.hints_s),
        "hundredth_s": hundredth(calls),
        "good_by_second": by_second(calls),
        "after_warm_up": _after_warm_up(calls),
        "callers_late_p99_s": round(late, 3),
        "disturbed": late > LATE_S,
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def middle(values: Sequence[float | None]) -> float | None:
    """The median of what is known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def hundredth(calls: Sequence[Call]) -> float | None:
    """When the hundredth answer had ended; None: no more than that came."""
    ends = sorted(call.ended_at for call in calls if call.ended_at is not None)
    return ends[WARM_UP - 1] if len(ends) > WARM_UP else None


def by_second(calls: Sequence[Call]) -> list[int]:
    """Of those that came in each whole second of the arrivals, how many got good answers."""
    counts = [0] * int(calls[-1].row.at_s)
    for call in calls:
        if call.row.at_s < len(counts) and is_good(call, TARGET):
            counts[int(call.row.at_s)] += 1
    return counts


def in_common(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
    """Goodput of two runs of the same arrivals, over those that came when both had answered a hundred.

    Of whole runs where one of them never came so far.
    """
    begins = [run["hundredth_s"] for run in (one, other)]
    seconds = len(one["good_by_second"])
    since = 0 if None in begins else math.ceil(max(begins))
    if since >= seconds:
        since = 0
    goods = (sum(run["good_by_second"][since:]) / (seconds - since) for run in (one, other))
    return next(goods), next(goods)


def _after_warm_up(calls: Sequence[Call]) -> Figures | None:
    """Of a run by itself; None where no more than a hundred ended."""
    since = hundredth(calls)
    later = [] if since is None else [call for call in calls if call.row.at_s > since]
    if since is None or not later:
        return None
    good = sum(is_good(call, TARGET) for call in later)
    seconds = max(later[-1].row.at_s - since, 1e-9)
    return {
        "goodput_rps": round(good / seconds, 4),
        "goodput_frac": round(good / len(later), 4),
        "seconds": round(seconds, 1),
        "requests": len(later),
    }
