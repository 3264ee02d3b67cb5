"""``python -m tests.bench.calibration``: the simulated engine against the real one, on the same arrivals.

The step's coefficients are fitted to what the real engine counted while it was loaded: in each window between
two pages

    seconds = base x steps + prefill_token x prompt tokens + decode_sequence x output tokens
              + kv_token x steps x KV tokens held

by least squares with no coefficient below zero. What a request spends outside the steps is the difference of
median times to first token where hardly anybody waits. Then every run that was made on the real engine is
replayed in virtual time with the same arrivals and policy, and mean occupancy, median time to first token and
preemptions are compared. The fit uses the runs of the first seed, the comparison shows the others apart.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from kvctl.sim.profiles import Profile
from kvctl.sim.replay_policies import parse_policy, run_policy
from kvctl.sim.replay_score import figures
from tests.bench.goodput.bench import TARGET, Bench, Group, Record, Turn, scene_of
from tests.bench.goodput.stage import CAPACITY, CpuStage, Page

POLICIES = ("none", "concurrency=40", "forecast")
WITHIN = 0.15


@dataclass(frozen=True, slots=True)
class Window:
    """What an engine did between two pages: seconds, and the four amounts that they are spent on."""

    seconds: float
    amounts: tuple[float, float, float, float]


def windows(pages: Sequence[Page]) -> list[Window]:
    """Those in which the engine was busy throughout and nothing was computed twice."""
    return [
        _window(before, after)
        for before, after in pairwise(pages)
        if before.running
        and after.running
        and before.steps is not None
        and after.steps is not None
        and after.steps > before.steps
        and after.preemptions == before.preemptions
    ]


def _window(before: Page, after: Page) -> Window:
    steps = (after.steps or 0) - (before.steps or 0)
    held = CAPACITY * (before.usage + after.usage) / 2
    prompt = after.prompt_tokens - before.prompt_tokens
    output = after.generation_tokens - before.generation_tokens
    return Window(after.at - before.at, (steps, prompt, output, steps * held))


def fit(found: Sequence[Window]) -> tuple[float, float, float, float]:
    """The coefficients, none below zero. Raises ValueError where there is too little to go by."""
    if len(found) < 20:
        raise ValueError(f"{len(found)} windows are too few to fit a profile to")
    scale = [max(window.amounts[n] for window in found) or 1.0 for n in range(4)]
    rows = [[amount / most for amount, most in zip(one.amounts, scale, strict=True)] for one in found]
    seconds = [one.seconds for one in found]
    best, least = [0.0] * 4, float("inf")
    for size in range(1, 5):
        for chosen in combinations(range(4), size):
            solved = _solve([[row[n] for n in chosen] for row in rows], seconds)
            if solved is None or min(solved) < 0.0:
                continue
            whole = [0.0] * 4
            for n, value in zip(chosen, solved, strict=True):
                whole[n] = value
            error = sum((_dot(row, whole) - one) ** 2 for row, one in zip(rows, seconds, strict=True))
            if error < least:
                best, least = whole, error
    base, prefill, decode, held = (value / most for value, most in zip(best, scale, strict=True))
    return base, prefill, decode, held


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _solve(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """Least squares by the normal equations; None where they have no one answer."""
    size = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)]
        + [sum(row[i] * value for row, value in zip(rows, values, strict=True))]
        for i in range(size)
    ]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(matrix[row][at]))
        if abs(matrix[pivot][at]) < 1e-9:
            return None
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        for row in range(size):
            if row != at:
                factor = matrix[row][at] / matrix[at][at]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[at], strict=True)]
    return [matrix[at][size] / matrix[at][at] for at in range(size)]


def fitted(records: Sequence[Record], name: str = "measured") -> Profile:
    """The profile of the engine while those runs were made."""
    base, prefill, decode, held = fit([one for record in records for one in windows(record.pages)])
    return Profile(
        name=name,
        about="fitted to what the engine counted while it was loaded",
        base_s=base,
        prefill_token_s=prefill,
        decode_sequence_s=decode,
        kv_token_s=held,
    )


def simulated(record: Record, profile: Profile) -> dict[str, Any]:
    """The figures of the same arrivals and policy in virtual time."""
    scene = replace(scene_of(record.group, profile), rows=record.rows)
    found = figures(run_policy(parse_policy(record.policy), scene), TARGET)
    return {name: getattr(found, name) for name in COMPARED}


COMPARED = ("kv_usage_mean", "ttft_p50_s", "preemptions", "goodput_rps")


def compare(records: Sequence[Record], profile: Profile) -> list[dict[str, Any]]:
    """By policy and rate: medians over the seeds of both engines, their ratios, and whether they agree."""
    told = []
    keys = dict.fromkeys((one.policy, one.group.rate, one.group.cap) for one in records)
    for policy, rate, cap in keys:
        own = [r for r in records if (r.policy, r.group.rate, r.group.cap) == (policy, rate, cap)]
        virtual = [simulated(record, profile) for record in own]
        real = [{name: record.figures[name] for name in COMPARED} for record in own]
        usage, ttft = (_ratio(virtual, real, name) for name in ("kv_usage_mean", "ttft_p50_s"))
        told.append(
            {
                "policy": policy,
                "rate": rate,
                "cap": cap,
                "seeds": [record.group.seed for record in own],
                "kv_usage_ratio": usage,
                "ttft_p50_ratio": ttft,
                "real": real,
                "simulated": virtual,
                "kv_usage_within": usage is not None and abs(usage - 1.0) <= WITHIN,
                "ttft_p50_within": ttft is not None and abs(ttft - 1.0) <= WITHIN,
                "preemptions_within": _within_spread(virtual, real),
            }
        )
    return told


def _ratio(virtual: Sequence[dict[str, Any]], real: Sequence[dict[str, Any]], name: str) -> float | None:
    """Median of the simulated over median of the real."""
    made = [median(one[name] for one in side if one[name] is not None) for side in (virtual, real)]
    return round(made[0] / made[1], 3) if made[1] else None


def _within_spread(virtual: Sequence[dict[str, Any]], real: Sequence[dict[str, Any]]) -> bool:
    """Whether the simulated median lies among the real ones, give or take two deviations of a count."""
    counts = [one["preemptions"] for one in real]
    middle = median(one["preemptions"] for one in virtual)
    slack = 2.0 * max(median(counts), 1.0) ** 0.5
    return bool(min(counts) - slack <= middle <= max(counts) + slack)
