"""``python -m tests.bench.replay``: every policy on every workload, and the targets.

Each workload is replayed at 1.3 and 2 times its saturation, over several stretches of the trace, with the
caps that callers may send. Policies that no cap can touch run once per stretch. A workload whose trace is not
there is named on standard error, and the others are replayed. The result is JSON lines on
standard output (one run each) or a table.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kvctl.sim.replay import Scene
from kvctl.sim.replay_policies import WITH_MARGIN, Spec, find_best, parse_policy, run_policy
from kvctl.sim.replay_score import Target, figures
from kvctl.sim.replay_setup import engine_config, make_scene, read_profile
from kvctl.sim.trace import Row
from tests.bench.workloads import WORKLOADS, by_name, median

CAPS = ("exact", "4096", "none")
LOADS = (1.3, 2.0)
CAPPED = ("forecast", "static", "past-future")
ANY_CAP = ("clairvoyant", "none", "kv-gauge", "concurrency=best")
TARGET = Target()
TRACES = Path(__file__).with_name("traces")
UNAWARE = " alone"


@dataclass(frozen=True, slots=True)
class Job:
    """One stretch of one workload under one load and seed: all policies."""

    folder: Path
    workload: str
    load: float
    seed: int
    requests: int
    policies: tuple[str, ...]
    caps: tuple[str, ...]
    shared_prefix: int = 0  # tokens of a system prompt before every prompt
    prefix_caching: bool = False
    unaware: bool = False  # the gate's own policies also without knowing of prefixes
    capacity: int | None = None  # KV tokens of the pool; None: the workload's


@cache
def rows_of(folder: Path, name: str) -> list[Row]:
    """A workload's requests, read once in a process."""
    return by_name(name).rows(folder)


def scene_of(job: Job, rate: float, cap: str) -> Scene:
    """The stretch that belongs to the seed."""
    workload = by_name(job.workload)
    rows = rows_of(job.folder, job.workload)
    engine = engine_config(
        read_profile(workload.profile),
        job.capacity or workload.capacity,
        workload.context,
        prefix_caching=job.prefix_caching,
    )
    room = max(len(rows) - job.requests, 0)
    start = 0 if room == 0 else (job.seed - 1) * 3001 % room
    return make_scene(
        rows,
        engine,
        cap=cap,
        rate=rate,
        start=start,
        requests=job.requests,
        seed=job.seed,
        shared_prefix=job.shared_prefix,
    )


@cache
def saturation(job: Job) -> float:
    """Requests a second that the engine completes when far more come and none has to be preempted."""
    rate = 2.0
    while True:
        scene = scene_of(job, rate, "exact")
        run = run_policy(Spec("clairvoyant"), scene)
        in_time = sum(call.ended_at is not None and call.ended_at <= scene.seconds for call in run.calls)
        if in_time < 0.6 * len(run.calls):
            return in_time / scene.seconds
        rate *= 2.0


def run(job: Job) -> list[dict[str, Any]]:
    """All runs of a job."""
    rate = job.load * saturation(replace(job, load=0.0, seed=1, policies=(), caps=(), unaware=False))
    results = []
    for cap, name in _runs(job):
        scene = scene_of(job, rate, cap)
        spec = parse_policy(name.removesuffix(UNAWARE))
        spec = replace(spec, prefix_sharing=not name.endswith(UNAWARE))
        if spec.to_search:
            spec = find_best(spec, scene, TARGET)
        found = asdict(figures(run_policy(spec, scene), TARGET))
        results.append(
            {
                "workload": job.workload,
                "load": job.load,
                "rate": rate,
                "seed": job.seed,
                "cap": cap,
                "policy": name,
                "limit": spec.limit,
                "requests": len(scene.rows),
                **found,
            }
        )
    return results


def _runs(job: Job) -> Iterator[tuple[str, str]]:
    own = [name + UNAWARE for name in job.policies if job.unaware and name in WITH_MARGIN]
    for name in (*job.policies, *own):
        caps = job.caps if _capped(name) else ("4096",)
        for cap in caps:
            yield cap, name


def _capped(name: str) -> bool:
    """Whether the callers' caps make a difference to a policy."""
    return name.removesuffix(UNAWARE).partition("=")[0] in CAPPED


def table(results: Sequence[dict[str, Any]]) -> str:
    """Medians over seeds: goodput of each policy, and the forecast's standing against each."""
    policies = list(dict.fromkeys(one["policy"] for one in results))
    cells: dict[tuple[str, float, str, str], list[dict[str, Any]]] = {}
    for one in results:
        cells.setdefault((one["workload"], one["load"], one["cap"], one["policy"]), []).append(one)
    lines = [
        f"{'workload':<14}{'load':>5}{'req/s':>7} {'cap':<6}"
        + "".join(f"{p[:11]:>12}" for p in policies)
        + "  preempted/1000"
    ]
    for workload, load in dict.fromkeys((one["workload"], one["load"]) for one in results):
        for cap in CAPS:
            found = [
                cells.get((workload, load, cap, p))
                or (cells.get((workload, load, "4096", p)) if not _capped(p) else None)
                for p in policies
            ]
            if not any((workload, load, cap, p) in cells for p in policies if _capped(p)):
                continue
            rate = next(one["rate"] for group in found if group for one in group)
            goods = "".join(f"{_goodput(group):>12}" for group in found)
            preempted = " ".join(
                f"{p[:3]} {_preempted(group)}" for p, group in zip(policies, found, strict=True) if group
            )
            lines.append(f"{workload:<14}{load:>5}{rate:>7.2f} {cap:<6}{goods}  {preempted}")
    return "\n".join(lines)


def _goodput(group: list[dict[str, Any]] | None) -> str:
    return "-" if not group else f"{median([one['goodput_rps'] for one in group]):.2f}"


def _preempted(group: list[dict[str, Any]]) -> str:
    return f"{1000 * sum(one['preemptions'] for one in group) / sum(one['requests'] for one in group):.1f}"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.replay", description=__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with traces [tests/bench/traces]")
    parser.add_argument("--workload", action="append", choices=[one.name for one in WORKLOADS])
    parser.add_argument("--policy", action="append")
    parser.add_argument("--cap", action="append", choices=CAPS)
    parser.add_argument("--load", action="append", type=float)
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens of a common system prompt")
    parser.add_argument("--prefix-caching", action="store_true", help="of the engine")
    parser.add_argument("--capacity-tokens", type=int, help="KV pool; else each workload's own")
    parser.add_argument("--unaware", action="store_true", help="the gate also without knowing of prefixes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("-o", "--output", choices=["json", "table"], default="table")
    return parser.parse_args(argv)


def there(names: Sequence[str], folder: Path) -> list[str]:
    """Those workloads that can be replayed; of each other one, why not, on standard error."""
    absent = {name: why for name in names if (why := by_name(name).missing(folder)) is not None}
    for why in absent.values():
        print(why, file=sys.stderr)  # noqa: T201
    return [name for name in names if name not in absent]


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    asked = arguments(argv)
    workloads = there(asked.workload or [one.name for one in WORKLOADS], asked.traces)
    if not workloads:
        sys.exit("nothing is left to replay")
    jobs = [
        Job(
            asked.traces,
            workload,
            load,
            seed,
            asked.requests,
            tuple(asked.policy or (*CAPPED, *ANY_CAP)),
            tuple(asked.cap or CAPS),
            asked.shared_prefix,
            asked.prefix_caching or asked.shared_prefix > 0,
            asked.unaware,
            asked.capacity_tokens,
        )
        for workload in workloads
        for load in asked.load or LOADS
        for seed in asked.seed or (1, 2)
    ]
    results: list[dict[str, Any]] = []
    with ProcessPoolExecutor(asked.processes) as pool:
        for found in pool.map(run, jobs):
            results += found
            if asked.output == "json":
                for one in found:
                    print(json.dumps(one), flush=True)  # noqa: T201
    if asked.output == "table":
        print(table(results))  # noqa: T201


if __name__ == "__main__":
    main()
