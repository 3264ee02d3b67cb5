"""``python -m tests.bench.calibration``: the simulated engine against the real one, on the same arrivals.

The step's coefficients are fitted to what the real engine counted while it was loaded: in each window between
two pages

    seconds = base x steps + prefill_token x prompt tokens + decode_sequence x output tokens
              + kv_token x steps x KV tokens held

by least squares with no coefficient below zero. What a request spends before its first step is the difference
of both engines' medians from the attempt that got in to the first token, fitted over the runs:

    seconds = request + request_sequence x sequences that run

Both fits use the runs of the first seed alone. Then every run that was made on the real engine is replayed
in virtual time with the same arrivals and policy, on an engine as fast as the real one was in it (its pace:
the seconds of its windows over those that the profile gives them), and mean occupancy, median time to first
token and preemptions are compared.

Where about half of those who are served get in at their first try, the median time to first token falls
between two humps, and a handful of callers move it from one to the other; that from the attempt that got
in stands beside it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from kvctl.sim.fitting import fit
from kvctl.sim.profiles import Profile
from kvctl.sim.replay_policies import parse_policy, run_policy
from kvctl.sim.replay_score import figures, taken_in
from kvctl.sim.trace import Row
from tests.bench import given
from tests.bench.goodput.bench import Bench, Group, Record, Turn, scene_of
from tests.bench.goodput.figures import TARGET, Told, middle
from tests.bench.goodput.stage import USUAL, CpuStage, Page, Pool
from tests.bench.goodput.workload import BURSTS

POLICIES = ("none", "concurrency=40", "forecast")
WITHIN = 0.15
ENOUGH = 20


@dataclass(frozen=True, slots=True)
class Window:
    """What an engine did between two pages: seconds, and the four amounts that they are spent on."""

    seconds: float
    amounts: tuple[float, float, float, float]


def windows(pages: Sequence[Page], pool: Pool = USUAL) -> list[Window]:
    """Those in which the engine was busy throughout and, as in the one before, nobody was preempted.

    What a preempted answer is computed again is counted nowhere.
    """
    return [
        _window(before, after, pool.tokens)
        for earlier, before, after in zip([*pages[:1], *pages], pages, pages[1:], strict=False)
        if before.running
        and after.running
        and before.steps is not None
        and after.steps is not None
        and after.steps > before.steps
        and after.preemptions == earlier.preemptions
    ]


def _window(before: Page, after: Page, capacity: int) -> Window:
    steps = (after.steps or 0) - (before.steps or 0)
    held = capacity * (before.usage + after.usage) / 2
    prompt = after.prompt_tokens - before.prompt_tokens
    output = after.generation_tokens - before.generation_tokens
    return Window(after.at - before.at, (steps, prompt, output, steps * held))


def fitted(records: Sequence[Record], name: str = "measured") -> Profile:
    """The profile of the engine while those runs were made."""
    steps = replace(step_times(records), name=name)
    ways = [(record.figures["running_mean"], way) for record in records if (way := _way_in(record, steps))]
    if not ways:
        return steps
    request, sequence = fit([(1.0, running) for running, _ in ways], [seconds for _, seconds in ways])
    return replace(steps, request_s=request, request_sequence_s=sequence)


def step_times(records: Sequence[Record]) -> Profile:
    """The coefficients of a step. Raises ValueError where too little was counted."""
    found = [one for record in records for one in windows(record.pages, record.group.pool)]
    if len(found) < ENOUGH:
        raise ValueError(f"{len(found)} windows are too few to fit a profile to")
    base, prefill, decode, held = fit([one.amounts for one in found], [one.seconds for one in found])
    return Profile(
        name="measured",
        about="fitted to what the engine counted while it was loaded",
        base_s=base,
        prefill_token_s=prefill,
        decode_sequence_s=decode,
        kv_token_s=held,
    )


def _way_in(record: Record, steps: Profile) -> float | None:
    """Seconds by which the real callers' median to the first token exceeds that of a way that takes none."""
    real, virtual = record.figures.get(TAKEN_IN), simulated(record, steps)[TAKEN_IN]
    return None if real is None or virtual is None else max(real - virtual, 0.0)


def pace(record: Record, profile: Profile) -> float:
    """How many times slower the engine was in that run than the profile says; 1.0 where nothing tells."""
    weights = (profile.base_s, profile.prefill_token_s, profile.decode_sequence_s, profile.kv_token_s)
    seen = windows(record.pages, record.group.pool)
    expected = sum(a * b for one in seen for a, b in zip(one.amounts, weights, strict=True))
    return sum(one.seconds for one in seen) / expected if expected else 1.0


def tell_paces(records: Sequence[Record]) -> list[float] | None:
    """Put into each run's figures how fast the engine was in it; the least and the most of all runs.

    1 is the mean, more is slower: other work on the machine, whatever its priority, takes caches and memory.
    None where the engine counts no steps.
    """
    try:
        mean = step_times(records)
    except ValueError:
        return None
    for record in records:
        record.figures["pace"] = round(pace(record, mean), 3)
    told = [record.figures["pace"] for record in records]
    return [min(told), max(told)]


def simulated(record: Record, profile: Profile) -> dict[str, Any]:
    """The figures of the same arrivals and policy in virtual time."""
    scene = replace(scene_of(record.group, profile.slower(pace(record, profile))), rows=record.rows)
    run = run_policy(parse_policy(record.policy), scene)
    found = figures(run, TARGET)
    told = {name: getattr(found, name) for name in COMPARED if name != TAKEN_IN}
    return told | {TAKEN_IN: middle([taken_in(call) for call in run.calls])}


TAKEN_IN = "taken_in_p50_s"
COMPARED = ("kv_usage_mean", "ttft_p50_s", TAKEN_IN, "preemptions", "goodput_rps")


def compare(records: Sequence[Record], profile: Profile) -> list[dict[str, Any]]:
    """By policy and rate: medians over the seeds of both engines, their ratios, and whether they agree."""
    told = []
    keys = dict.fromkeys((one.policy, one.group.rate, one.group.cap) for one in records)
    for policy, rate, cap in keys:
        own = [r for r in records if (r.policy, r.group.rate, r.group.cap) == (policy, rate, cap)]
        virtual = [simulated(record, profile) for record in own]
        real = [{name: record.figures.get(name) for name in COMPARED} for record in own]
        names = ("kv_usage_mean", "ttft_p50_s", TAKEN_IN, "goodput_rps")
        usage, ttft, taken, good = (_ratio(virtual, real, name) for name in names)
        told.append(
            {
                "policy": policy,
                "rate": rate,
                "cap": cap,
                "seeds": [record.group.seed for record in own],
                "kv_usage_ratio": usage,
                "ttft_p50_ratio": ttft,
                "taken_in_p50_ratio": taken,
                "goodput_ratio": good,
                "paces": [round(pace(record, profile), 3) for record in own],
                "real": real,
                "simulated": virtual,
                "kv_usage_within": _near(usage),
                "ttft_p50_within": _near(ttft),
                "taken_in_p50_within": _near(taken),
                "preemptions_within": _within_spread(virtual, real),
            }
        )
    return told


def _near(ratio: float | None) -> bool:
    return ratio is not None and abs(ratio - 1.0) <= WITHIN


def _ratio(virtual: Sequence[dict[str, Any]], real: Sequence[dict[str, Any]], name: str) -> float | None:
    """Median of the simulated over median of the real."""
    made, was = (middle([one[name] for one in side]) for side in (virtual, real))
    return round(made / was, 3) if made is not None and was else None


def _within_spread(virtual: Sequence[dict[str, Any]], real: Sequence[dict[str, Any]]) -> bool:
    """Whether the simulated median lies among the real ones, give or take two deviations of a count."""
    counts = [one["preemptions"] for one in real]
    middle = median(one["preemptions"] for one in virtual)
    slack = 2.0 * max(median(counts), 1.0) ** 0.5
    return bool(min(counts) - slack <= middle <= max(counts) + slack)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.calibration", description=__doc__)
    parser.add_argument("--rate", type=float, action="append", help="requests a second [10 and 20]")
    parser.add_argument(
        "--seed", type=int, action="append", help="step times are fitted to the first [1, 2, 3]"
    )
    parser.add_argument("--policy", action="append", help=f"in front of both engines {POLICIES}")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the runs there")
    parser.add_argument(
        "--of", type=given.file, metavar="FILE", help="runs that were kept, in place of new ones"
    )
    parser.add_argument("--lock", type=Path, help="of a machine that is shared: held for minutes at a time")
    return parser.parse_args()


def main() -> None:
    """Run, fit, replay and print."""
    asked = arguments()
    records = made(asked) if asked.of is None else kept(asked.of)
    json.dump(calibration(records), sys.stdout, indent=2)


def made(asked: argparse.Namespace) -> Sequence[Record]:
    """The runs on the real engine."""
    turn = Turn(asked.lock)
    with tempfile.TemporaryDirectory() as folder, turn.taken():
        stage = CpuStage()
        try:
            bench = Bench(stage, Path(folder), turn, asked.keep)
            for seed in asked.seed or (1, 2, 3):
                for rate in asked.rate or (10.0, 20.0):
                    group = Group(rate=rate, seed=seed, cap="2048", workload=BURSTS, seconds=asked.seconds)
                    bench.run_group(group, asked.policy or POLICIES)
        finally:
            stage.close()
            turn.give_back()
    return bench.recorded


def kept(path: Path) -> list[Record]:
    """Runs that were written."""
    return [_record(one) for one in json.loads(path.read_text(encoding="utf-8"))]


def _record(one: dict[str, Any]) -> Record:
    group = one["group"]
    return Record(
        Group(**(group | {"pool": Pool(**group["pool"])} if "pool" in group else group)),
        one["policy"],
        [Row(**row) for row in one["rows"]],
        [Page(**page) for page in one["pages"]],
        one["figures"],
        [Told(**call) for call in one.get("calls", ())],
    )


def calibration(records: Sequence[Record], usual: Profile | None = None) -> dict[str, Any]:
    """The fitted profile, and both engines side by side; ``usual``: where too little was counted to fit."""
    records = [record for record in records if not record.figures.get("disturbed")]
    if not records:
        raise ValueError("the machine was too busy in every run")
    first = records[0].group.seed
    own = [record for record in records if record.group.seed == first]
    enough = sum(len(windows(record.pages)) for record in own) >= ENOUGH
    profile = fitted(own) if usual is None or enough else usual
    coefficients = {name: getattr(profile, name) for name in Profile.__slots__}
    compared = compare(records, profile)
    within = {name: sum(one[name] for one in compared) for name in compared[0] if name.endswith("_within")}
    return {
        "profile": coefficients,
        "fitted_to_seed": first,
        "within": within | {"of": len(compared)},
        "compared": compared,
    }


if __name__ == "__main__":
    main()
