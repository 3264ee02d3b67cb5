"""``python -m tests.bench.goodput``: policies side by side through the real daemon.

The same seeded arrivals for every policy, one after the other on one engine (vLLM on the CPU, or the
simulated one), callers that retry as the openai client does. Goodput counts answers whose first token came
within 2 s of the first attempt and whose tokens came every 100 ms; refused, late and cut ones are misses.
Policies that the daemon does not have take its gate's place in the same process. The first run of the machine
installs the engine (see tests/live/venv.py). Figures of different runs of this program are not comparable on
a busy machine; the policies within one are.

``NAME=best`` is searched on the simulated engine, with the step times that the real one has just shown, and
confirmed with two neighbours. Rates are multiples of what that engine can serve, unless ``--rate`` is given.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvctl.sim.profiles import PROFILES, Profile
from tests.bench.calibration import calibration, fitted
from tests.bench.goodput.bench import ALONE, CAPPED, POLICIES, Bench, Group, Turn, resolve, saturation
from tests.bench.goodput.report import medians, standing, table
from tests.bench.goodput.stage import PROFILE, STAGES
from tests.bench.goodput.workload import BURSTS

LOADS = (1.3, 2.0)
CAPS = ("2048", "none")
SEEDS = (1, 2, 3)
QUICK_S, USUAL_S = 12.0, 20.0
MEASURING_RATE = 20.0  # enough to keep the engine busy while its step times are measured
REPLAYED = ("none", "static", "forecast", "concurrency", "kv-gauge", "past-future", "clairvoyant")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.goodput", description=__doc__)
    parser.add_argument("--engine", choices=sorted(STAGES), default="cpu")
    parser.add_argument("--policy", action="append", help=f"may be repeated [{', '.join(POLICIES)}]")
    parser.add_argument("--rate", type=float, action="append", help="requests a second; may be repeated")
    parser.add_argument("--load", type=float, action="append", help="times saturation [1.3, 2.0]")
    parser.add_argument("--cap", action="append", choices=CAPS, help="that callers send [both]")
    parser.add_argument("--seed", type=int, action="append", help="may be repeated [1, 2, 3]")
    parser.add_argument("--seconds", type=float, help=f"of arrivals [{USUAL_S:g}; quick: {QUICK_S:g}]")
    parser.add_argument("--workload", default=BURSTS, help="bursts, or a trace file [bursts]")
    parser.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N", help="tokens that all begin with"
    )
    parser.add_argument("--quick", action="store_true", help="twice saturation, one cap, one seed: minutes")
    parser.add_argument("--lock", type=Path, help="of a machine that is shared: held for minutes at a time")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="what tests.bench.calibration --of reads")
    parser.add_argument("-o", "--output", choices=("json", "table"), default="table")
    return parser.parse_args()


def measure(bench: Bench, base: Group) -> Profile:
    """The step times of the engine as it runs now."""
    if bench.stage.counts_steps:
        bench.run(replace(base, rate=MEASURING_RATE, cap="2048", seed=0), "concurrency=60")
        return fitted(bench.recorded)
    return PROFILES[PROFILE]


def groups(asked: argparse.Namespace, base: Group, profile: Profile) -> Iterator[Group]:
    """What is run, a seed after the other, so that each seed is a whole."""
    loads = asked.load or (LOADS[-1:] if asked.quick else LOADS)
    rates = asked.rate or [round(saturation(base, profile) * load, 1) for load in loads]
    caps = asked.cap or (CAPS[:1] if asked.quick else CAPS)
    for seed in asked.seed or (SEEDS[:1] if asked.quick else SEEDS):
        for rate in rates:
            for cap in caps:
                yield replace(base, rate=rate, seed=seed, cap=cap)


def chosen(asked: argparse.Namespace) -> list[str]:
    """The policies asked for."""
    return asked.policy or [*POLICIES, *([ALONE] if asked.shared_prefix else [])]


def run_all(asked: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """All runs, in the form in which they are printed."""
    seconds = asked.seconds or (QUICK_S if asked.quick else USUAL_S)
    base = Group(
        rate=0.0,
        seed=1,
        cap="2048",
        workload=asked.workload,
        seconds=seconds,
        common=asked.shared_prefix,
    )
    asks = asked.rate is None or any(policy.endswith("=best") for policy in chosen(asked))
    profile = measure(bench, base) if asks else PROFILES[PROFILE]
    policies: dict[float, list[str]] = {}
    runs = []
    for group in groups(asked, base, profile):
        named = policies.setdefault(group.rate, resolve(chosen(asked), group, profile))
        if group.cap == "none":
            named = [policy for policy in named if policy in CAPPED]
        found = bench.run_group(group, named)
        runs.append({"rate": group.rate, "seed": group.seed, "cap": group.cap, "policies": found})
        sys.stderr.write(table(runs) + "\n")
    return {"runs": runs, "workload": asked.workload, "seconds": seconds}


def main() -> None:
    """Run and print."""
    asked = arguments()
    turn = Turn(asked.lock)
    with tempfile.TemporaryDirectory() as folder, turn.taken():
        stage = STAGES[asked.engine]()
        try:
            bench = Bench(stage, Path(folder), turn, asked.keep)
            found = run_all(asked, bench)
        finally:
            stage.close()
            turn.give_back()
    again = [
        one
        for one in bench.recorded
        if one.policy.partition("=")[0] in REPLAYED and not one.group.common and not one.figures["disturbed"]
    ]
    told = found | {
        "medians": medians(found["runs"]),
        "targets": standing(found["runs"]),
        "calibration": calibration(again, PROFILES[PROFILE]) if again else None,
    }
    if asked.output == "json":
        json.dump(told, sys.stdout, indent=2)
    else:
        sys.stdout.write(table(found["runs"]) + "\n")


if __name__ == "__main__":
    main()
