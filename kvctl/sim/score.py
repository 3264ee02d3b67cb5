"""Outcomes of a load -> goodput and the figures beside it.

Goodput is calls a second, over the whole run, that came complete with a first token within ``TTFT_S`` of the
first attempt and at most ``TPOT_S`` per token after it: the targets that MLPerf sets for 8B models. Calls
that were refused to the end, broke, or had not finished when the run ended count as misses.

A call that still waits at the end enters the first-token percentiles with the time it has waited: leaving it
out would flatter the policy that makes callers wait longest. Calls that gave up have no time to first token.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvctl.sim.client import Outcome

TTFT_S = 2.0
TPOT_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One policy's figures. Percentiles are None where nobody got that far."""

    calls: int
    good: int
    completed: int
    refused: int  # gave up after a refusal
    refusals: int  # answers 429 and 503, retried ones included
    unfinished: int
    failed: int
    goodput_rps: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None


def is_good(outcome: Outcome) -> bool:
    """Whether a call came within its targets."""
    ttft, tpot = outcome.ttft_s, outcome.tpot_s
    return ttft is not None and tpot is not None and ttft <= TTFT_S and tpot <= TPOT_S


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that ``share`` of ``values`` do not pass (nearest rank); None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def first_token_times(outcomes: Iterable[Outcome], now: float) -> list[float]:
    """Times to first token, with those who still wait at the time they have waited."""
    times = []
    for outcome in outcomes:
        ttft = outcome.ttft_s
        if ttft is not None:
            times.append(ttft)
        elif not outcome.given_up:
            times.append(now - outcome.call.at_s)
    return times


def score(outcomes: Sequence[Outcome], seconds: float) -> Score:
    """The figures of a run that took ``seconds``."""
    refused = sum(one.given_up and one.refusals > 0 and one.first_at is None for one in outcomes)
    completed = sum(one.complete for one in outcomes)
    gave_up = sum(one.given_up for one in outcomes)
    good = sum(is_good(one) for one in outcomes)
    waits = first_token_times(outcomes, seconds)
    return Score(
        calls=len(outcomes),
        good=good,
        completed=completed,
        refused=refused,
        refusals=sum(one.refusals for one in outcomes),
        unfinished=len(outcomes) - completed - gave_up,
        failed=gave_up - refused,
        goodput_rps=good / seconds,
        ttft_p50_s=quantile(waits, 0.5),
        ttft_p99_s=quantile(waits, 0.99),
        tpot_p50_s=quantile([t for one in outcomes if (t := one.tpot_s) is not None], 0.5),
    )
