"""Gliding over steps in bulk gives what step by step gives, to the last bit."""

import heapq
import random
from math import inf

import pytest

from kvctl.sim.profiles import PROFILES
from kvctl.sim.replay_engine import VirtualEngine
from kvctl.sim.scheduler import EngineConfig, Finish, Plan, Scheduler, Sequence

Seen = list[tuple[float, str, int, Finish | None]]
Looks = list[tuple[float, float, int, int]]


def load(seed: int, count: int, blocks: int) -> list[tuple[float, Sequence]]:
    source = random.Random(seed)
    at, made = 0.0, []
    for number in range(count):
        at += source.expovariate(2.0)
        output = source.randint(1, 400)
        sequence = Sequence(
            id=str(number),
            prompt=source.randint(1, min(blocks * 4, 500)),
            max_output=source.choice((output, 200, 4000)),
            true_output=output,
        )
        made.append((at, sequence))
    return made


def glided(
    config: EngineConfig, arrivals: list[tuple[float, Sequence]], looks: list[float]
) -> tuple[Seen, Looks]:
    engine = VirtualEngine(config)
    seen: Seen = []
    looked: Looks = []
    events = list(
        heapq.merge(((at, one) for at, one in arrivals), ((at, None) for at in looks), key=lambda e: e[0])
    )
    for at, sequence in [*events, (inf, None)]:
        while engine.due <= at and engine.due < inf:
            now = engine.due
            for one in engine.step_done():
                if one.sequence.output == 1 or one.finish:
                    seen.append((now, one.sequence.id, one.sequence.output, one.finish))
        if sequence is not None:
            engine.add(sequence, at)
        elif at < inf:
            engine.look(at)
            s = engine.scheduler
            looked.append((at, s.usage_ratio, s.counters.generation_tokens, s.counters.preemptions))
    return seen, looked


def stepped(
    config: EngineConfig, arrivals: list[tuple[float, Sequence]], looks: list[float]
) -> tuple[Seen, Looks]:
    scheduler = Scheduler(config)
    seen: Seen = []
    looked: Looks = []
    plan: Plan | None = None
    due = inf
    events = list(
        heapq.merge(((at, one) for at, one in arrivals), ((at, None) for at in looks), key=lambda e: e[0])
    )
    for at, sequence in [*events, (inf, None)]:
        while plan is not None and due <= at:
            for one in scheduler.commit(plan):
                if one.sequence.output == 1 or one.finish:
                    seen.append((due, one.sequence.id, one.sequence.output, one.finish))
            plan = scheduler.plan()
            due = inf if plan is None else due + plan.seconds
        if sequence is not None:
            scheduler.add(sequence)
            if plan is None:
                plan = scheduler.plan()
                due = inf if plan is None else at + plan.seconds
        elif at < inf:
            c = scheduler.counters
            looked.append((at, scheduler.usage_ratio, c.generation_tokens, c.preemptions))
    return seen, looked


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blocks", [60, 200])
def test_bulk_steps_are_the_same_as_single_steps(seed: int, blocks: int) -> None:
    config = EngineConfig(
        profile=PROFILES["8b-24g"], blocks=blocks, block_size=16, max_model_len=800, max_num_seqs=12
    )
    looks = [0.37 * n for n in range(100)]
    fast = glided(config, load(seed, 40, blocks), looks)
    slow = stepped(config, load(seed, 40, blocks), looks)
    assert fast == slow
    assert len([one for one in fast[0] if one[3]]) == 40
    assert blocks > 60 or fast[1][-1][3] > 0
