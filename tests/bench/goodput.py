"""``python -m tests.bench.goodput``: policies through the real daemon, in front of vLLM on CPU.

The same seeded arrivals for every policy, one after the other on one engine, callers that retry as the openai
client does. Goodput counts answers whose first token came within 2 s of the first attempt and whose tokens
came every 100 ms; refused, late and cut requests count as misses. The first run of the machine installs the
engine (see tests/live/venv.py). Figures of different runs of this program are not comparable on a busy
machine; the policies within one are.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine
from tests.live.load import arrivals, drive

POLICIES = ("none", "static", "forecast")
ALONE = "forecast alone"  # the same gate without knowing what prompts have in common
PATIENCE_S = 60.0


def idle(engine: Engine) -> bool:
    metrics = engine.metrics()
    return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"] == 0


@dataclass(frozen=True, slots=True)
class Job:
    """One run: ``rate`` requests a second for ``seconds``, the arrivals following from ``seed``."""

    policy: str
    rate: float
    seconds: float
    seed: int
    common: int = 0  # tokens with which all prompts begin


def drive_one(engine: Engine, job: Job, folder: Path) -> dict[str, Any]:
    """Drive one policy through a daemon of its own, started fresh in ``folder``."""
    eventually(lambda: idle(engine), 120, "the engine is idle")
    salt = f"{job.policy} {job.seed}"
    load = arrivals(engine, job.rate, job.seconds, job.seed, salt, common=job.common)
    before = engine.metrics()["vllm:num_preemptions_total"]
    folder.mkdir()
    settings = {"POLICY": job.policy, "TOKENIZER": str(engine.model)}
    if job.policy == ALONE:
        settings |= {"POLICY": "forecast", "PREFIX_SHARING": "off"}
    daemon = Daemon(engine.base_url, folder, settings)
    daemon.start()
    try:
        daemon.wait_ready()
        outcome = asyncio.run(drive(daemon.base_url, load, PATIENCE_S))
        refusals = daemon.metric("rejections_total")
    finally:
        daemon.stop()
    preemptions = engine.metrics()["vllm:num_preemptions_total"] - before
    made = {
        "goodput_rps": round(outcome.good / job.seconds, 2),
        "requests": len(load),
        "good": outcome.good,
        "completed": outcome.completed,
        "refused": len(outcome.refused),
        "refusals": refusals,
        "preemptions": preemptions,
        "ttft_p50_s": round(sorted(outcome.ttft)[len(outcome.ttft) // 2], 3) if outcome.ttft else None,
    }
    sys.stderr.write(json.dumps(asdict(job) | made) + "\n")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, action="append", help="requests a second; may be repeated [16]")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, action="append", help="may be repeated [1]")
    parser.add_argument("--policy", choices=(*POLICIES, ALONE), action="append")
    parser.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N", help="tokens with which all prompts begin"
    )
    given = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder, Engine() as engine:
        for rate, seed in itertools.product(given.rate or [16.0], given.seed or [1]):
            policies = {}
            for policy in given.policy or POLICIES:
                job = Job(policy, rate, given.seconds, seed, given.shared_prefix)
                policies[policy] = drive_one(engine, job, Path(folder) / f"{policy}-{rate}-{seed}")
            runs.append({"rate": rate, "seed": seed, "policies": policies})
    json.dump({"runs": runs}, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
