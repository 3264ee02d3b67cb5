"""Queue, large requests and tenants over minutes of virtual time: the very gate, and callers that retry."""

import random
from collections import Counter
from collections.abc import Mapping
from statistics import median

import pytest

from kvctl.core.events import Event
from kvctl.core.outcomes import LargeRequests
from kvctl.core.queue import QueueConfig
from kvctl.core.supply import GateConfig
from kvctl.core.tenants import TenantRule
from kvctl.sim.policies_core import CoreGate
from kvctl.sim.replay import Run, replay
from kvctl.sim.replay_score import Target, is_good
from kvctl.sim.replay_setup import engine_config, make_scene, read_profile
from kvctl.sim.trace import Row

POOL = 24_000


class Watched(CoreGate):
    """Notes when a large request became head of the queue, what was projected then, and when it started."""

    def __init__(self, config: GateConfig) -> None:
        super().__init__(config)
        self.projected: dict[str, tuple[float, float]] = {}  # became head at, starts at
        self.started: dict[str, float] = {}
        self.left: set[str] = set()

    def _say(self, event: Event, now: float) -> None:
        before = len(self._decided)
        super()._say(event, now)
        head = self.gate._room.queue.head
        if head is not None and head.large and head.starts_at is not None:
            self.projected.setdefault(head.id, (now, head.starts_at))
        for name, verdict in self._decided[before:]:
            if name in self.projected and name not in self.started:
                if verdict.admitted:
                    self.started[name] = now
                else:
                    self.left.add(name)


def large_among_small(seed: int, count: int, every: int) -> list[Row]:
    """Small requests at twice what fits, each ``every``-th one more than half of the pool."""
    source, at, rows = random.Random(seed), 0.0, []
    for number in range(count):
        at += source.expovariate(16.0)
        large = number % every == every - 1 and number > 200
        prompt = int(POOL * source.uniform(0.55, 0.8)) if large else source.randint(100, 700)
        output = source.randint(50, 200) if large else min(int(source.lognormvariate(4.3, 0.8)) + 1, 700)
        rows.append(Row(number=number, at_s=at, prompt_tokens=prompt, output_tokens=output))
    return rows


@pytest.mark.slow
def test_large_requests_start_when_they_were_told() -> None:
    """50 heads at least: four in five by their projection, the median near it, none waits for ever."""
    engine = engine_config(read_profile("8b-h200"), POOL, POOL - 2_000)
    scene = make_scene(large_among_small(4, 6_000, 60), engine, requests=None)
    queue = QueueConfig(max_wait_s=1.0, large=LargeRequests.RESERVE, large_share=0.5, large_max_wait_s=60.0)
    door = Watched(GateConfig(queue=queue))
    run = replay(scene, door)
    assert len(door.projected) >= 50
    assert set(door.projected) == set(door.started) | door.left
    by_then = [at <= door.projected[name][1] for name, at in door.started.items()]
    assert sum(by_then) >= 0.8 * len(door.projected)
    waits = [(door.projected[name], at) for name, at in door.started.items()]
    ratios = [(starts_at - since) / (at - since) for (since, starts_at), at in waits if at > since]
    assert 0.5 <= median(ratios) <= 2.0
    assert run.preemptions == 0
    assert all(call.complete or call.given_up for call in run.calls)


def two_tenants(seed: int, rates: Mapping[str, float], seconds: float = 90.0) -> list[Row]:
    source, arrivals = random.Random(seed), []
    for tenant, rate in rates.items():
        at = 0.0
        while (at := at + source.expovariate(rate)) < seconds:
            output = min(int(source.lognormvariate(5.0, 0.8)) + 1, 1500)
            arrivals.append((at, tenant, source.randint(100, 1500), output))
    return [
        Row(number=number, at_s=at, prompt_tokens=prompt, output_tokens=output, tenant=tenant)
        for number, (at, tenant, prompt, output) in enumerate(sorted(arrivals))
    ]


def served(rows: list[Row], *, wait_s: float, rules: tuple[TenantRule, ...] = ()) -> Run:
    engine = engine_config(read_profile("8b-24g"), 48_000, 8_192)
    config = GateConfig(tenants=rules, queue=QueueConfig(max_wait_s=wait_s))
    return replay(make_scene(rows, engine, requests=None), CoreGate(config))


def goodput(run: Run) -> Counter[str]:
    """Tokens of good answers, by tenant."""
    tokens: Counter[str] = Counter()
    for call in run.calls:
        if is_good(call, Target()):
            tokens[call.row.tenant] += call.row.prompt_tokens + call.output
    return tokens


RULES = (TenantRule(name="quiet"), TenantRule(name="flood"))


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
@pytest.mark.parametrize(
    ("seed", "rate"),
    [
        (3, 1.0),
        *(pytest.param(seed, rate, marks=pytest.mark.slow) for seed, rate in ((1, 1.0), (2, 1.0), (1, 2.0))),
    ],
)
def test_a_flooding_tenant_leaves_the_other_its_fair_share(wait_s: float, seed: int, rate: float) -> None:
    """Its fair share: all that it asks for, or half of what the engine serves, whichever is less."""
    rows = two_tenants(seed, {"quiet": rate, "flood": 12.0})
    alone = goodput(served([row for row in rows if row.tenant == "quiet"], wait_s=wait_s))["quiet"]
    got = goodput(served(rows, wait_s=wait_s, rules=RULES))
    assert got["quiet"] >= 0.9 * min(alone, got.total() / 2)


def test_without_rules_the_flood_takes_it_all() -> None:
    """What the rules are for."""
    got = goodput(served(two_tenants(1, {"quiet": 1.0, "flood": 12.0}), wait_s=0.0))
    assert got["quiet"] < 0.25 * got["flood"]


def test_a_tenant_that_is_alone_loses_nothing_by_the_rules() -> None:
    """Work-conserving: what nobody else wants is the flooder's."""
    rows = two_tenants(2, {"flood": 12.0}, 60.0)
    ruled, free = (goodput(served(rows, wait_s=0.0, rules=rules)) for rules in (RULES, ()))
    assert ruled == free
