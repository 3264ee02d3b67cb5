"""``python -m tests.bench.calibration``: the simulated engine against the real one, on the same arrivals.

The step's coefficients are fitted to what the real engine counted while it was loaded: in each window between
two pages

    seconds = base x steps + prefill_token x prompt tokens + decode_sequence x output tokens
              + kv_token x steps x KV tokens held

by least squares with no coefficient below zero. What a request spends before its first step
is the difference of median times to first token at the lowest rate, where hardly anybody waits.
Then every run that was made on the real engine is replayed in virtual time with the same arrivals and policy,
and mean occupancy, median time to first token and preemptions are compared. The fit uses the runs of the
first seed alone.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from kvctl.sim.fitting import fit
from kvctl.sim.profiles import Profile
from kvctl.sim.replay_policies import parse_policy, run_policy
from kvctl.sim.replay_score import figures
from kvctl.sim.trace import Row
from tests.bench.goodput.bench import Bench, Group, Record, Turn, scene_of
from tests.bench.goodput.figures import TARGET, Told
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
    held = USUAL.tokens * (before.usage + after.usage) / 2
    prompt = after.prompt_tokens - before.prompt_tokens
    output = after.generation_tokens - before.generation_tokens
    return Window(after.at - before.at, (steps, prompt, output, steps * held))


def fitted(records: Sequence[Record], name: str = "measured") -> Profile:
    """The profile of the engine while those runs were made."""
    lowest = min(record.group.rate for record in records)
    found = [one for record in records for one in windows(record.pages)]
    if len(found) < ENOUGH:
        raise ValueError(f"{len(found)} windows are too few to fit a profile to")
    base, prefill, decode, held = fit([one.amounts for one in found], [one.seconds for one in found])
    steps = Profile(
        name=name,
        about="fitted to what the engine counted while it was loaded",
        base_s=base,
        prefill_token_s=prefill,
        decode_sequence_s=decode,
        kv_token_s=held,
    )
    way_in = median(
        record.figures["ttft_p50_s"] - simulated(record, steps)["ttft_p50_s"]
        for record in records
        if record.group.rate == lowest
    )
    return replace(steps, request_s=max(way_in, 0.0))


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
    parser.add_argument("--of", type=Path, metavar="FILE", help="runs that were kept, in place of new ones")
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
    return {"profile": coefficients, "fitted_to_seed": first, "compared": compare(records, profile)}


if __name__ == "__main__":
    main()
