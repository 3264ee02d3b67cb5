"""``python -m tests.bench.fuzz --minutes N``: looks for workloads and faults that make the gate misbehave.

Each seed draws an engine, a workload, callers' caps, and what telemetry does wrong: lag, freezes, gaps, a
wrong capacity, another engine's page, restarts, a neighbour on the card, traffic past the gate, longer
answers. The run is watched for what must not be: a refusal on an idle engine, a limit that stays shut where
nothing binds, nobody admitted, pressure that swings without a preemption, and preemptions. A finding names
its seed, and the seed gives the same run again: ``--seed N``.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvctl.core.events import Admit, Arrived, Command, Event, Reject
from kvctl.core.gate import Gate
from kvctl.core.outcomes import SERVING, Decision, RejectReason
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import RankSample
from kvctl.sim.lengths import LogNormal
from kvctl.sim.policies_core import CoreGate
from kvctl.sim.replay import Run, Scene, replay
from kvctl.sim.replay_faults import Fault, FaultKind
from kvctl.sim.replay_setup import caps, engine_config, read_profile
from kvctl.sim.trace import Row

LOCKED_S = 20  # seconds in a row that are no accident
LOW_USAGE = 0.35
CALM_S = 15.0  # after a fault's end, before it is no excuse any more
MOST_PREEMPTED = 0.01  # of the requests
STEADY_RATIO = 0.05  # of pressure, peak to peak


class Lie(StrEnum):
    """What a page says that is not so."""

    NONE = "none"
    GAPS = "gaps"  # one page in three without the gauge
    CAPACITY = "capacity"  # one page in ten with half the pool
    STRANGER = "stranger"  # one page in ten of another engine behind the same address


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen, in which run."""

    seed: int
    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Plot:
    """All that a seed draws."""

    scene: Scene
    lie: Lie

    @property
    def honest(self) -> bool:
        """Whether what the gate is told is true, and the engine all its own."""
        return self.lie is Lie.NONE and not self.scene.faults and self.scene.telemetry_lag_s <= 1.0


def plot(seed: int, requests: int = 400) -> Plot:
    """The run of a seed."""
    draw = random.Random(seed)
    profile, capacity = draw.choice((("8b-24g", 48_000), ("8b-24g", 20_000), ("8b-h200", 200_000)))
    engine = engine_config(read_profile(profile), capacity, min(16_384, capacity))
    rows = list(_rows(draw, requests, engine.max_model_len))
    seconds = rows[-1].at_s
    scene = Scene(
        rows=rows,
        engine=replace(engine, max_num_seqs=draw.choice((256, 256, 32))),
        cap=caps(draw.choice(("exact", "4096", "none"))),
        retries=draw.choice((0, 2)),
        seed=seed,
        telemetry_lag_s=draw.choice((0.1, 0.1, 1.0, 5.0, 18.0)),
        faults=_faults(draw, seconds),
    )
    return Plot(scene, draw.choice((Lie.NONE, Lie.NONE, *Lie)))


def _rows(draw: random.Random, count: int, context: int) -> Iterator[Row]:
    """Poisson arrivals with bursts, of one or two kinds of requests."""
    kinds = [
        (
            LogNormal(mean=draw.choice((60, 400, 2000)), sigma=draw.choice((0.2, 1.0)), low=1, high=6000),
            LogNormal(mean=draw.choice((5, 40, 250, 1200)), sigma=draw.choice((0.1, 0.9)), low=1, high=4000),
            tenant,
        )
        for tenant in ("a", "b")[: draw.choice((1, 2))]
    ]
    rate, burst, at = draw.choice((2.0, 5.0, 12.0, 30.0)), draw.choice((1, 1, 20)), 0.0
    for number in range(count):
        if number % burst == 0:
            at += draw.expovariate(rate / burst)
        prompts, answers, tenant = draw.choice(kinds)
        prompt = min(prompts.draw(draw), context // 2)
        output = min(answers.draw(draw), context - prompt)
        yield Row(number=number, at_s=at, prompt_tokens=prompt, output_tokens=output, tenant=tenant)


def _faults(draw: random.Random, seconds: float) -> tuple[Fault, ...]:
    kind = draw.choice((None, None, *FaultKind))
    if kind is None:
        return ()
    value = {FaultKind.SHIFT: 4.0, FaultKind.BYPASS: 0.3}.get(kind, min(10.0, seconds / 4))
    return (Fault(kind, value, seconds / 3),)


@dataclass(slots=True)
class Second:
    """What was seen in one second of a run."""

    admitted: int = 0
    refused: Counter[RejectReason] = field(default_factory=Counter)
    pressure: float = 1.0
    pace_s: float | None = None
    backlog: int = 0
    serving: bool = True


class Witness(Gate):
    """A gate whose verdicts are noted."""

    def __init__(self, config: GateConfig) -> None:
        super().__init__(config)
        self.seconds: dict[int, Second] = {}
        self.idle_refusals: list[str] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        """As the gate does."""
        idle = len(self.ledger) == 0
        commands = super().handle(event, now)
        if isinstance(event, Arrived):
            self._note(event, commands, now, idle=idle)
        return commands

    def _note(self, event: Arrived, commands: Sequence[Command], now: float, *, idle: bool) -> None:
        second = self.seconds.setdefault(int(now), Second())
        for command in commands:
            if isinstance(command, Admit):
                second.admitted += 1
            elif isinstance(command, Reject) and command.decision is Decision.REJECT_LATER:
                second.refused[command.reason] += 1
                if idle:
                    self.idle_refusals.append(f"at {now:.1f} s: {event.shape.prompts} -> {command.reason}")


class Watched(CoreGate):
    """The gate, told what the plot says, and watched."""

    def __init__(self, config: GateConfig, story: Plot) -> None:
        super().__init__(config)
        self.gate = self.witness = Witness(config)
        self._plot = story
        self._draw = random.Random(story.scene.seed + 1)

    def page(self, sample: RankSample, asked_at: float, now: float) -> None:
        """The page, true or not."""
        super().page(self._told(sample), asked_at, now)

    def _told(self, sample: RankSample) -> RankSample:
        chance, lie = self._draw.random(), self._plot.lie
        if lie is Lie.GAPS and chance < 1 / 3:
            return replace(sample, kv_usage_ratio=None)
        if lie is Lie.CAPACITY and chance < 0.1:
            return replace(sample, capacity_tokens=(sample.capacity_tokens or 0) // 2)
        if lie is Lie.STRANGER and chance < 0.1:
            return replace(sample, started_at=7.0, kv_usage_ratio=0.9, generation_tokens_total=1e6)
        return sample

    def tick(self, now: float) -> None:
        """The beat, and a look."""
        super().tick(now)
        status = self.gate.status(now)
        second = self.witness.seconds.setdefault(int(now), Second())
        second.pressure = min(second.pressure, min(status.pressure.values(), default=1.0))
        second.pace_s = status.guards.decode_pace_s
        second.backlog = status.guards.prefill_backlog_tokens
        second.serving = second.serving and status.state in SERVING


def examine(seed: int, requests: int = 400) -> list[Finding]:
    """One run, and what is wrong with it."""
    story = plot(seed, requests)
    config = GateConfig(jitter_seed=seed * 0.381966 % 1.0)
    watched = Watched(config, story)
    run = replay(story.scene, watched)
    found = [*_idle(story, watched), *_shut(story, watched, run), *_swings(story, watched, run)]
    preempted = run.preemptions / len(story.scene.rows)
    if story.honest and preempted > MOST_PREEMPTED:
        found.append(("preemptions", f"{preempted:.1%} of the requests"))
    return [Finding(seed, what, f"{detail} [{_told_of(story)}]") for what, detail in found]


def _idle(story: Plot, watched: Watched) -> Iterator[tuple[str, str]]:
    bypass = any(fault.kind is FaultKind.BYPASS for fault in story.scene.faults)
    if watched.witness.idle_refusals and not bypass and story.lie in {Lie.NONE, Lie.GAPS}:
        yield "refused on an idle engine", watched.witness.idle_refusals[0]


def _shut(story: Plot, watched: Watched, run: Run) -> Iterator[tuple[str, str]]:
    """Seconds in a row in which callers were refused though neither pool nor pace were near a limit."""
    usage = {int(point.at_s): point for point in run.points}
    idle_run = nobody_run = 0
    for at in range(int(story.scene.seconds)):
        second, point = watched.witness.seconds.get(at, Second()), usage.get(at)
        excused = not second.serving or _recent_fault(story, at) or point is None
        refused = sum(second.refused.values()) > 0
        slack = point is not None and point.usage < LOW_USAGE and point.waiting == 0
        easy = second.pace_s is None or second.pace_s < 0.5 * story.scene.itl_s
        nobody_run = nobody_run + 1 if refused and not second.admitted and slack and not excused else 0
        idle_run = idle_run + 1 if refused and slack and easy and not excused else 0
        if LOCKED_S in {idle_run, nobody_run}:
            why = second.refused.most_common(1)[0][0]
            yield ("starved" if nobody_run == LOCKED_S else "shut"), f"for {LOCKED_S} s to {at} s by {why}"
            return


def _recent_fault(story: Plot, at: int) -> bool:
    lasting = {FaultKind.BYPASS, FaultKind.SHIFT}
    return any(
        fault.at_s <= at and (at < fault.until_s + CALM_S or fault.kind in lasting)
        for fault in story.scene.faults
    )


def _swings(story: Plot, watched: Watched, run: Run) -> Iterator[tuple[str, str]]:
    seen = [second.pressure for at, second in watched.witness.seconds.items() if at > CALM_S]
    if story.honest and not run.preemptions and seen and max(seen) - min(seen) > STEADY_RATIO:
        yield "pressure swings", f"between {min(seen):.2f} and {max(seen):.2f}"


def _told_of(story: Plot) -> str:
    scene = story.scene
    faults = ", ".join(f"{fault.kind}={fault.value:g}@{fault.at_s:.0f}" for fault in scene.faults)
    return (
        f"{scene.engine.profile.name}, {scene.engine.blocks * scene.engine.block_size} tokens,"
        f" {len(scene.rows) / scene.seconds:.1f}/s, lag {scene.telemetry_lag_s:g} s, {story.lie}"
        + (f", {faults}" if faults else "")
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Search and print; 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--from-seed", type=int, default=1)
    parser.add_argument("--seed", type=int, action="append", help="only these")
    parser.add_argument("--requests", type=int, default=400)
    asked = parser.parse_args(argv)
    until, found, runs = time.monotonic() + 60.0 * asked.minutes, 0, 0
    seed = asked.from_seed
    seeds = iter(asked.seed) if asked.seed else iter(range(seed, 1 << 31))
    for seed in seeds:
        if time.monotonic() > until and not asked.seed:
            break
        runs += 1
        for finding in examine(seed, asked.requests):
            found += 1
            print(f"seed {finding.seed}: {finding.what}: {finding.detail}", flush=True)  # noqa: T201
    print(f"{runs} runs, {found} findings")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
