"""Medians over the runs, and how the forecast stands against every other policy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

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
        names = [name for name in own[0] if name not in ("after_warm_up", "requests", "disturbed")]
        found[policy] = {name: _median(one[name] for one in own) for name in names}
        warm = [one["after_warm_up"]["goodput_rps"] for one in own if one["after_warm_up"]]
        requests = sum(one["requests"] for one in own)
        preempted = sum(one["preemptions"] for one in own)
        found[policy] |= {
            "goodput_rps_after_warm_up": _median(warm),
            "preemptions": preempted,
            "requests": requests,
            "preemptions_per_1000": round(1000 * preempted / requests, 3),
        }
    return found


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None


def standing(runs: Runs) -> list[dict[str, Any]]:
    """Each target with what was found, at every rate; goodput is that after the warm-up."""
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
    own, other = _goodput(runs, "forecast", cap), _best(runs, wanted.against, cap)
    if own is None or other is None:
        return
    policy, goodput = other
    ratio = own / goodput if goodput else None
    yield {
        "rate": rate,
        "cap": cap,
        "against": policy,
        "wanted": wanted.ratio,
        "found": None if ratio is None else round(ratio, 3),
        "met": ratio is None or ratio >= wanted.ratio,
    }


def _best(runs: Runs, name: str, cap: str) -> tuple[str, float] | None:
    """Of the limits tried, the one with the highest goodput."""
    names = {policy for run in runs for policy in run["policies"] if policy.partition("=")[0] == name}
    known = [
        (policy, found) for policy in sorted(names) if (found := _goodput(runs, policy, cap)) is not None
    ]
    return max(known, key=lambda pair: pair[1], default=None)


def _goodput(runs: Runs, policy: str, cap: str) -> float | None:
    """The median under that cap; of a policy that no cap touches, under whichever it ran with."""
    own = [run for run in runs if policy in run["policies"]]
    with_cap = [run for run in own if run["cap"] == cap] or own
    figures = [run["policies"][policy] for run in with_cap]
    return _median((one["after_warm_up"] or one)["goodput_rps"] for one in figures)


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
        group = [run for run in runs if (run["rate"], run["cap"]) == (rate, cap)]
        lines.append(f"{rate:g} requests/s, caps of {cap}, {len(group)} seed(s)")
        for policy, one in medians(group).items():
            warm, whole = one["goodput_rps_after_warm_up"], one["goodput_rps"]
            lines.append(
                f"  {policy:<18}{_number(warm):>8} ({_number(whole)})  preempted {one['preemptions']:>4}"
                f"  TTFT p50 {_number(one['ttft_p50_s'])} p99 {_number(one['ttft_p99_s'])} s"
                f"  KV {one['kv_usage_mean']:.0%}"
            )
    disturbed = sum(bool(one.get("disturbed")) for run in runs for one in run["policies"].values())
    if disturbed:
        lines.append(f"{disturbed} run(s) left out: the machine was too busy to make the load")
    for one in standing(runs):
        word = "met" if one["met"] else "MISSED"
        if "against" in one:
            lines.append(
                f"{word:>7}: {one['found']} x {one['against']} (wanted {one['wanted']}),"
                f" {one['rate']:g}/s, cap {one['cap']}"
            )
        else:
            lines.append(f"{word:>7}: {one['preemptions_per_1000']} preempted of 1,000")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
