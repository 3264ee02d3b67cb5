"""``python -m tests.bench.goodput``: policies side by side through the real daemon.

The same seeded arrivals for every policy, one after the other on one engine (vLLM on the CPU, or the
simulated one), callers that retry as the openai client does. Goodput counts answers whose first token came
within 2 s of the first attempt and whose tokens came every 100 ms; refused, late and cut ones are misses.
Policies that the daemon does not have take its gate's place in the same process. The first run of the machine
installs the engine (see tests/live/venv.py). Figures of different runs of this program are not comparable on
a busy machine; the policies within one are.

``NAME=best`` is searched on the simulated engine, with the step times that the real one has just shown, and
confirmed with two neighbours on the first seed; the best of the three is what the other seeds run. What is
hopeless under overload (no gate, and worst cases where callers send no cap) runs on the first seed alone, and
so does past-future where they send none, which is nearly all one to it.
Rates are multiples of what that engine can serve, unless ``--rate`` is given.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvctl.sim.profiles import PROFILES, Profile
from tests.bench import given
from tests.bench.calibration import calibration, fitted, kept, tell_paces
from tests.bench.goodput.bench import ALONE, CAPPED, POLICIES, Bench, Group, Record, Turn, resolve, saturation
from tests.bench.goodput.report import best_limit, medians, standing, table
from tests.bench.goodput.stage import POOLS, PROFILE, STAGES
from tests.bench.goodput.workload import BURSTS

LOADS = (1.3, 2.0)
CAPS = ("2048", "none")
SEEDS = (1, 2, 3)
QUICK_S, USUAL_S = 20.0, 40.0
MEASURING_RATE = 20.0  # enough to keep the engine busy while its step times are measured
MEASURED = ("concurrency=60", "concurrency=20")
OWN_LIMIT = "engine-queue"  # the engine starts anew for each
ONCE = (("none", "2048"), ("static", "none"), ("past-future", "none"))
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
    parser.add_argument("--workload", type=_workload, default=BURSTS, help="bursts, or a trace file [bursts]")
    parser.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N", help="tokens that all begin with"
    )
    parser.add_argument(
        "--prefixes", action="store_true", help="prompts of a trace begin alike as its rows did"
    )
    parser.add_argument("--pool", choices=sorted(POOLS), default="usual", help="long: 128,000, context 32k")
    parser.add_argument("--quick", action="store_true", help="twice saturation, one cap, one seed: minutes")
    parser.add_argument("--lock", type=Path, help="of a machine that is shared: held for minutes at a time")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="what tests.bench.calibration --of reads")
    parser.add_argument(
        "--of", type=given.file, metavar="FILE", help="runs that were kept, in place of new ones"
    )
    parser.add_argument("-o", "--output", choices=("json", "table"), default="table")
    return parser.parse_args()


def _workload(text: str) -> str:
    return text if text == BURSTS else str(given.file(text))


def measure(bench: Bench, base: Group) -> Profile:
    """The step times of the engine as it runs now, from two crowds of different size."""
    if bench.stage.counts_steps:
        for policy in MEASURED:
            bench.run(replace(base, rate=MEASURING_RATE, cap="2048", seed=0, seconds=QUICK_S), policy)
        return fitted(bench.recorded)
    return PROFILES[PROFILE]


def loads(asked: argparse.Namespace, base: Group, profile: Profile) -> list[float]:
    """Requests a second."""
    times = asked.load or (LOADS[-1:] if asked.quick else LOADS)
    return asked.rate or [round(saturation(base, profile) * load, 1) for load in times]


def chosen(asked: argparse.Namespace) -> list[str]:
    """The policies asked for."""
    return asked.policy or [*POLICIES, *([ALONE] if asked.shared_prefix or asked.prefixes else [])]


def planned(policies: Sequence[str], group: Group, first: Group, runs: Sequence[dict[str, Any]]) -> list[str]:
    """What runs in a group; ``first`` is that of the first seed and cap. Of limits tried there, the best."""
    own = [one for one in policies if group.cap == first.cap or one in CAPPED]
    if group.seed == first.seed:
        return own
    here = [run for run in runs if run["rate"] == group.rate]
    return [one for one in own if (one, group.cap) not in ONCE and best_limit(here, one) == one]


def run_all(asked: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """All runs, in the form in which they are printed.

    The engine's own limits come last, those of a rate together: the fewer times it has to start.
    """
    seconds = asked.seconds or (QUICK_S if asked.quick else USUAL_S)
    base = Group(
        rate=0.0,
        seed=1,
        cap="2048",
        workload=asked.workload,
        seconds=seconds,
        common=asked.shared_prefix,
        prefixes=asked.prefixes,
        pool=POOLS[asked.pool],
    )
    asks = asked.rate is None or any(policy.endswith("=best") for policy in chosen(asked))
    profile = measure(bench, base) if asks else PROFILES[PROFILE]
    caps = asked.cap or (CAPS[:1] if asked.quick else CAPS)
    seeds = asked.seed or (SEEDS[:1] if asked.quick else SEEDS)
    rates = loads(asked, base, profile)
    groups = [replace(base, rate=r, seed=seed, cap=cap) for seed in seeds for r in rates for cap in caps]
    policies = {rate: resolve(chosen(asked), replace(groups[0], rate=rate), profile) for rate in rates}
    runs: list[dict[str, Any]] = [
        {"rate": one.rate, "seed": one.seed, "cap": one.cap, "policies": {}} for one in groups
    ]
    for last in (False, True):
        for group, run in sorted(
            zip(groups, runs, strict=True), key=lambda pair: pair[0].rate if last else 0.0
        ):
            own = [one for one in policies[group.rate] if one.startswith(OWN_LIMIT) is last]
            run["policies"] |= bench.run_group(group, planned(own, group, groups[0], runs))
            sys.stderr.write(table(runs) + "\n")
    return {"runs": runs, "workload": asked.workload, "seconds": seconds}


def main() -> None:
    """Run and print."""
    asked = arguments()
    if asked.of is not None:
        records = kept(asked.of)
        found = {"runs": of_records(records)}
    else:
        records, found = made(asked)
    told = found | {
        "paces_between": tell_paces(records),
        "medians": medians(found["runs"]),
        "targets": standing(found["runs"]),
    }
    if asked.output == "json":
        json.dump(told | {"calibration": replayed(records)}, sys.stdout, indent=2)
    else:
        sys.stdout.write(table(found["runs"]) + "\n")


def made(asked: argparse.Namespace) -> tuple[list[Record], dict[str, Any]]:
    """The runs that are asked for."""
    turn = Turn(asked.lock)
    with tempfile.TemporaryDirectory() as folder, turn.taken():
        stage = STAGES[asked.engine](POOLS[asked.pool])
        try:
            bench = Bench(stage, Path(folder), turn, asked.keep)
            return bench.recorded, run_all(asked, bench)
        finally:
            stage.close()
            turn.give_back()


def of_records(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Runs that were kept, by rate, seed and cap; of one that was made again, the last."""
    runs: dict[tuple[float, int, str], dict[str, Any]] = {}
    for one in records:
        key = (one.group.rate, one.group.seed, one.group.cap)
        run = runs.setdefault(key, dict(zip(("rate", "seed", "cap"), key, strict=True)) | {"policies": {}})
        run["policies"][one.policy] = one.figures
    return list(runs.values())


def replayed(records: Sequence[Record]) -> dict[str, Any] | None:
    """The runs beside their replays, where a replay knows the policy and the prompts."""
    again = [
        one
        for one in records
        if one.policy.partition("=")[0] in REPLAYED
        and not (one.group.common or one.group.prefixes or one.figures["disturbed"])
    ]
    return calibration(again, PROFILES[PROFILE]) if again else None


if __name__ == "__main__":
    main()
