"""Medians over the runs, and how the forecast stands against every other policy.

Targets are judged in pairs: both policies' goodput on the same arrivals, those that came when each had
answered a hundred, and the median of that ratio over the seeds. ``evened`` is the same as if the engine had
been as fast in one run as in the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.bench.goodput.figures import in_common

Figures = Mapping[str, Any]
Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The forecast's goodput over another policy's; ``cap``: as callers send it, None: whatever it is."""

    against: str
    ratio: float
    cap: str | None = None


WANTED = (
    Wanted("clairvoyant", 0.90),
    Wanted("static", 1.5, "2048"),
    Wanted("static", 2.5, "none"),
    Wanted("kv-gauge", 1.1),
    Wanted("concurrency", 1.0),
    Wanted("engine-queue", 1.0),
)
PREEMPTIONS_PER_1000 = 1.0


def sound(runs: Runs) -> list[dict[str, Any]]:
    """Without the policies' runs for which the machine was too busy."""
    return [
        {**run, "policies": {name: one for name, one in run["policies"].items() if not one.get("disturbed")}}
        for run in runs
    ]


def medians(runs: Runs) -> dict[str, dict[str, Any]]:
    """By policy: the median of each figure over all runs; preemptions are those of all runs together."""
    runs = sound(runs)
    found: dict[str, dict[str, Any]] = {}
    for policy in dict.fromkeys(policy for run in runs for policy in run["policies"]):
        own = [run["policies"][policy] for run in runs if policy in run["policies"]]
        lists = {name for one in own for name, value in one.items() if isinstance(value, bool | dict | list)}
        names = [name for name in own[0] if name not in lists]
        found[policy] = {name: _median(one[name] for one in own) for name in names}
        warm = [one["after_warm_up"]["goodput_rps"] for one in own if one["after_warm_up"]]
        requests = sum(one["requests"] for one in own)
        preempted = sum(one["preemptions"] for one in own)
        found[policy] |= {
            "goodput_rps_after_warm_up": _median(warm),
            "after_warm_up_least_and_most": [min(warm), max(warm)] if warm else None,
            "preemptions": preempted,
            "requests": requests,
            "preemptions_per_1000": round(1000 * preempted / requests, 3),
        }
    return found


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None


def standing(runs: Runs) -> list[dict[str, Any]]:
    """Each target with what was found, at every rate."""
    told: list[dict[str, Any]] = []
    runs = sound(runs)
    for rate in sorted({run["rate"] for run in runs}):
        at_rate = [run for run in runs if run["rate"] == rate]
        for wanted in WANTED:
            caps = sorted({run["cap"] for run in at_rate})
            for cap in [cap for cap in caps if wanted.cap in (None, cap)]:
                told += _against(wanted, at_rate, cap, rate)
    return told + list(_preempted(runs))


def _against(wanted: Wanted, runs: Runs, cap: str, rate: float) -> Iterator[dict[str, Any]]:
    policy = best_limit(runs, wanted.against)
    ratios, evened = [], []
    for one, other in _pairs(runs, policy, cap):
        own, goodput = in_common(one, other)
        if goodput:
            ratios.append(round(own / goodput, 3))
            evened.append(ratios[-1] * one.get("pace", 1.0) / other.get("pace", 1.0))
    if not ratios:
        return
    found = round(median(ratios), 3)
    yield {
        "rate": rate,
        "cap": cap,
        "against": policy,
        "wanted": wanted.ratio,
        "found": found,
        "by_seed": ratios,
        "evened": round(median(evened), 3),
        "met": found >= wanted.ratio,
    }


def best_limit(runs: Runs, policy: str) -> str:
    """Of limits of the same name, the one with the highest goodput of those that ran on most seeds."""
    name = policy.partition("=")[0]
    seeds: dict[str, int] = {}
    for run in runs:
        for one in run["policies"]:
            if one.partition("=")[0] == name:
                seeds[one] = seeds.get(one, 0) + 1
    most = [one for one, count in seeds.items() if count == max(seeds.values())]
    return max(sorted(most), key=lambda one: _goodput(runs, one), default=policy)


def _goodput(runs: Runs, policy: str) -> float:
    own = [run["policies"][policy] for run in runs if policy in run["policies"]]
    return float(median((one["after_warm_up"] or one)["goodput_rps"] for one in own))


def _pairs(runs: Runs, policy: str, cap: str) -> Iterator[tuple[Figures, Figures]]:
    """The forecast's run and the other's, by seed; what no cap touches ran under one cap only."""
    for run in runs:
        forecast = run["policies"].get("forecast") if run["cap"] == cap else None
        same = [one for one in runs if one["seed"] == run["seed"] and policy in one["policies"]]
        same.sort(key=lambda one: one["cap"] != cap)
        if forecast is not None and same:
            yield forecast, same[0]["policies"][policy]


def _preempted(runs: Runs) -> Iterator[dict[str, Any]]:
    own = [run["policies"]["forecast"] for run in runs if "forecast" in run["policies"]]
    if own:
        found = 1000 * sum(one["preemptions"] for one in own) / sum(one["requests"] for one in own)
        yield {
            "preemptions_per_1000": round(found, 3),
            "wanted": PREEMPTIONS_PER_1000,
            "met": found <= PREEMPTIONS_PER_1000,
        }


def table(runs: Runs) -> str:
    """Goodput after the warm-up (and of the whole run) and preemptions, medians over the seeds."""
    lines = []
    for rate, cap in dict.fromkeys((run["rate"], run["cap"]) for run in runs):
        group = [run for run in runs if (run["rate"], run["cap"]) == (rate, cap) and run["policies"]]
        if group:
            lines.append(f"{rate:g} requests/s, caps of {cap}, {len(group)} seed(s)")
            lines += [_line(policy, one) for policy, one in medians(group).items()]
    disturbed = sum(bool(one.get("disturbed")) for run in runs for one in run["policies"].values())
    if disturbed:
        lines.append(f"{disturbed} run(s) left out: the machine was too busy to make the load")
    return "\n".join(lines + [_verdict(one) for one in standing(runs)])


def _line(policy: str, one: Figures) -> str:
    warm, span = one["goodput_rps_after_warm_up"], one["after_warm_up_least_and_most"]
    spread = "" if span is None else f"{span[0]:.1f}-{span[1]:.1f}"
    return (
        f"  {policy:<18}{_number(warm):>8} {spread:<10} ({_number(one['goodput_rps'])})"
        f"  preempted {one['preemptions']:>4}  TTFT p50 {_number(one['ttft_p50_s'])}"
        f" p99 {_number(one['ttft_p99_s'])} s  KV {one['kv_usage_mean']:.0%}"
    )


def _verdict(one: Mapping[str, Any]) -> str:
    word = "met" if one["met"] else "MISSED"
    if "against" not in one:
        return f"{word:>7}: {one['preemptions_per_1000']} preempted of 1,000"
    seeds = " ".join(f"{ratio:.2f}" for ratio in one["by_seed"])
    where = f"{one['rate']:g}/s, cap {one['cap']}"
    told = f"{one['found']} x {one['against']} (wanted {one['wanted']}), {where}"
    return f"{word:>7}: {told}: {seeds}, evened {one['evened']}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
