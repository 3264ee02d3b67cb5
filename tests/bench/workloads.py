"""The workloads of the replay bench: public traces where they lie on this machine, and synthetic ones."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvctl.sim.lengths import LogNormal
from kvctl.sim.trace import Row, read_trace

_COLUMNS = "with the columns that tests/bench/traces/README.md names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A trace and the engine it is replayed on.

    ``file``: of the folder of traces; None: it is synthetic. ``source``: where such a file is to be had.
    """

    name: str
    rows: Callable[[Path], list[Row]]
    file: str | None = None
    source: str = "tests/bench/traces"
    profile: str = "8b-24g"
    capacity: int = 48_000
    context: int = 16_384
    stationary: bool = True
    note: str = ""

    def missing(self, folder: Path) -> str | None:
        """Why it cannot be replayed, in one sentence; None: it can."""
        if self.file is None or (folder / self.file).is_file():
            return None
        return f"{self.name} is left out: there is no {folder / self.file}; it is of {self.source}"


def _traced(name: str, file: str, **more: Any) -> Workload:
    file = f"{file}.csv.gz"
    return Workload(name=name, rows=lambda folder: read_trace(folder / file), file=file, **more)


def synthetic(
    prompts: LogNormal, answers: Callable[[random.Random], int], count: int = 12_000, seed: int = 11
) -> list[Row]:
    """Poisson arrivals at one a second."""
    source = random.Random(seed)
    at, rows = 0.0, []
    for number in range(count):
        at += source.expovariate(1.0)
        rows.append(
            Row(number=number, at_s=at, prompt_tokens=prompts.draw(source), output_tokens=answers(source))
        )
    return rows


def _sharegpt_like(_: Path) -> list[Row]:
    answers = LogNormal(mean=220, sigma=1.0, low=2, high=2048)
    return synthetic(LogNormal(mean=250, sigma=1.3, low=4, high=4000), answers.draw)


def _reasoning(_: Path) -> list[Row]:
    answers = LogNormal(mean=1600, sigma=0.9, low=60, high=12_000)
    return synthetic(LogNormal(mean=300, sigma=1.0, low=20, high=4000), answers.draw)


def _bimodal(_: Path) -> list[Row]:
    short = LogNormal(mean=30, sigma=0.6, low=1, high=200)
    long = LogNormal(mean=1500, sigma=0.3, low=500, high=4000)

    def answer(source: random.Random) -> int:
        return (long if source.random() < 0.15 else short).draw(source)

    return synthetic(LogNormal(mean=500, sigma=0.8, low=20, high=4000), answer)


def _compute_bound(_: Path) -> list[Row]:
    answers = LogNormal(mean=120, sigma=0.5, low=10, high=600)
    return synthetic(LogNormal(mean=3000, sigma=0.3, low=800, high=8000), answers.draw)


def _tenant_at_cap(_: Path) -> list[Row]:
    """One in five requests is of a tenant whose answers always run to 1,500 tokens."""
    usual = _sharegpt_like(Path())
    return [
        replace(row, tenant="greedy", output_tokens=1500) if row.number % 5 == 0 else row for row in usual
    ]


def _new_tenant_burst(_: Path) -> list[Row]:
    """A calm service, and from the 600th request on 200 equal long requests of a tenant never seen before."""
    usual = _sharegpt_like(Path())[:1500]
    start = usual[600].at_s
    burst = [
        Row(number=10_000 + n, at_s=start + n * 0.05, prompt_tokens=300, output_tokens=1200, tenant="new")
        for n in range(200)
    ]
    return sorted([*usual, *burst], key=lambda row: row.at_s)


WORKLOADS = (
    _traced("azure", "azure2023_conv"),
    _traced("servegen", "servegen_mlarge_balanced_20min_10rps"),
    _traced("arxiv", "arxiv_summ_lengths_poisson1rps"),
    Workload(name="sharegpt-like", rows=_sharegpt_like),
    _traced(
        "mooncake",
        "mooncake_conversation",
        source=f"kvcache-ai/Mooncake on GitHub (the FAST'25 conversation trace), {_COLUMNS}",
        profile="8b-h200",
        capacity=400_000,
        context=131_072,
        note="big card",
    ),
    _traced(
        "weka",
        "weka_claudecode_ctx32k",
        source=f"callanjfox/kv-cache-tester on GitHub (sessions cut at 32k of context), {_COLUMNS}",
        profile="8b-h200",
        capacity=128_000,
        context=32_768,
        note="no prefix sharing",
    ),
    Workload(
        name="reasoning",
        rows=_reasoning,
        profile="8b-h200",
        capacity=400_000,
        context=32_768,
        stationary=False,
    ),
    Workload(name="bimodal", rows=_bimodal, stationary=False),
    Workload(name="tenant at cap", rows=_tenant_at_cap, stationary=False),
    Workload(name="new tenant", rows=_new_tenant_burst, stationary=False),
    Workload(
        name="compute-bound",
        rows=_compute_bound,
        profile="8b-h200",
        capacity=900_000,
        stationary=False,
        note="prompts of 3,000, answers of 120",
    ),
)


def by_name(name: str) -> Workload:
    """The workload of that name."""
    return next(one for one in WORKLOADS if one.name == name)


def median(values: list[float]) -> float:
    """NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
