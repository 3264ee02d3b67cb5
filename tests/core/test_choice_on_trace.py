"""Real gates and the first requests of a trace of coding agents: the choice, the caches and the load."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvctl.core.choice import WarmPrefixes, choose
from kvctl.core.claim import Shape
from kvctl.core.events import Admit, Arrived, Ended, EngineDescribed, Progressed, Scraped, Ticked
from kvctl.core.gate import Gate
from kvctl.core.outcomes import EndReason
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, RankSample
from kvctl.sim.beginnings import prefix
from kvctl.sim.trace import Row, read_trace

TRACE = Path(__file__).parents[1] / "live" / "traces" / "weka_claudecode_first80.csv"
OUTPUT = 200


@dataclass(frozen=True, slots=True)
class Run:
    hit_rate: float
    admitted: tuple[int, ...]


def gate(capacity: int) -> Gate:
    made = Gate(GateConfig(capacity_tokens=capacity, ttft_target_s=None, itl_target_s=None))
    made.handle(EngineDescribed(EngineInfo(models=("m",), context_tokens=40_000)), 0.0)
    return made


def tick(pool: Gate, capacity: int, now: float) -> None:
    sample = RankSample(
        rank="0", at=now, capacity_tokens=capacity, capacity_exact=True, generation_tokens_total=now
    )
    pool.handle(Scraped((sample,), now), now)
    pool.handle(Ticked(), now)


def run(rows: list[Row], capacities: tuple[int, ...], *, at_once: int, in_turn: bool) -> Run:
    """Each request runs until ``at_once`` came after it. What a pool took in is what its cache holds."""
    gates, warm = [gate(each) for each in capacities], [WarmPrefixes() for _ in capacities]
    flying: list[tuple[int, str]] = []
    admitted, hits, asked, now = [0] * len(gates), 0, 0, 0.0
    for row in rows:
        now += 0.5
        for pool, capacity in zip(gates, capacities, strict=True):
            tick(pool, capacity, now)
        if len(flying) >= at_once:
            at, done = flying.pop(0)
            gates[at].handle(Progressed(done, OUTPUT), now)
            gates[at].handle(Ended(done, EndReason.FINISHED, OUTPUT), now)
        begins, tokens = (prefix(row),), row.prompt_tokens
        shape = Shape(route="c", model="m", prompts=(tokens,), asked_output=2000, stream=True)
        known = [each.warm_tokens(begins) / tokens for each in warm]
        at = row.number % len(gates) if in_turn else choose([g.offer(shape, now) for g in gates], known)[0]
        commands = gates[at].handle(Arrived(str(row.number), shape), now)
        assert any(isinstance(command, Admit) for command in commands), commands
        flying.append((at, str(row.number)))
        hits, asked = hits + warm[at].warm_tokens(begins), asked + tokens
        admitted[at] += 1
        warm[at].took(begins, capacities[at])
    return Run(hits / asked, tuple(admitted))


@pytest.mark.parametrize("capacities", [(400_000, 400_000), (800_000, 400_000), (300_000,) * 4])
@pytest.mark.parametrize("at_once", [4, 10])
def test_prefixes_are_drawn_together_and_load_is_not(capacities: tuple[int, ...], at_once: int) -> None:
    rows = read_trace(TRACE)
    in_turn = run(rows, capacities, at_once=at_once, in_turn=True)
    chosen = run(rows, capacities, at_once=at_once, in_turn=False)
    assert chosen.hit_rate > in_turn.hit_rate + 0.1, (in_turn, chosen)
    shares = [
        count / len(rows) / (size / sum(capacities))
        for count, size in zip(chosen.admitted, capacities, strict=True)
    ]
    assert all(0.4 < share < 1.8 for share in shares), chosen
