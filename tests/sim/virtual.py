"""The real gate before the simulated scheduler in virtual time: no clock, no socket, a run in half a second.

Callers retry as in the demo. What the gate is told comes at the daemon's own beats: pages and ticks every
0.2 s, the card every second.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvctl.core.claim import Shape
from kvctl.core.events import (
    Admit,
    Arrived,
    Ended,
    EngineDescribed,
    GpusRead,
    Progressed,
    Reject,
    Scraped,
    Ticked,
)
from kvctl.core.gate import Gate
from kvctl.core.outcomes import EndReason, Policy
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, GpuSample, RankSample
from kvctl.sim.client import MAX_RETRIES, Outcome, retry_delay
from kvctl.sim.load import NEIGHBOUR, Call
from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig, Finish, Plan, Sampled, Scheduler
from kvctl.sim.scheduler import Sequence as Running

GIB = 1 << 30
TOTAL, FREE, TAKEN = 24 * GIB, 6 * GIB, int(5.4 * GIB)
CONFIG = EngineConfig(profile=PROFILES["1.5b-shared"], blocks=2000, block_size=16)
MODEL = "sim"


@dataclass(slots=True)
class Run:
    """What came of one policy under one load. ``budgets``: (seconds, KV tokens, reason) at every tick."""

    outcomes: list[Outcome] = field(default_factory=list)
    budgets: list[tuple[float, int, str]] = field(default_factory=list)
    scheduler: Scheduler = field(default_factory=lambda: Scheduler(CONFIG))


def play(policy: Policy, calls: Sequence[Call], seconds: float) -> Run:
    """The whole run."""
    world = _World(policy, seconds)
    for call in calls:
        world.arrives(call)
    world.go()
    return world.run


class _World:
    """The future as a heap of (time, order, what happens)."""

    def __init__(self, policy: Policy, seconds: float) -> None:
        self.run = Run()
        self.gate = Gate(GateConfig(policy=policy))
        self.now = 0.0
        self._seconds = seconds
        self._future: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0
        self._stepping = False
        self._random = random.Random(1)
        self._callers: dict[Running, Outcome] = {}
        for delay, beat in (
            (0.0, self._page),
            (0.01, self._card),
            (0.02, self._describe),
            (0.05, self._tick),
        ):
            self._after(delay, beat)

    def arrives(self, call: Call) -> None:
        outcome = Outcome(call=call)
        self.run.outcomes.append(outcome)
        self._after(call.at_s, lambda: self._try(outcome))

    def go(self) -> None:
        while self._future:
            self.now, _, happen = heapq.heappop(self._future)
            if self.now > self._seconds:
                return
            happen()

    def _after(self, delay: float, happen: Callable[[], None]) -> None:
        self._made += 1
        heapq.heappush(self._future, (self.now + delay, self._made, happen))

    def _try(self, outcome: Outcome) -> None:
        call = outcome.call
        outcome.tries += 1
        shape = Shape(
            route="chat",
            model=MODEL,
            prompts=(call.prompt_tokens,),
            asked_output=call.cap_tokens,
            stream=True,
        )
        name = f"{id(outcome)}-{outcome.tries}"
        for command in self.gate.handle(Arrived(name, shape), self.now):
            if isinstance(command, Admit):
                self._start(name, outcome)
            elif isinstance(command, Reject):
                self._refused(outcome, command.retry_after_s)

    def _start(self, name: str, outcome: Outcome) -> None:
        call = outcome.call
        running = Running(
            id=name, prompt=call.prompt_tokens, max_output=call.cap_tokens, true_output=call.output_tokens
        )
        self._callers[running] = outcome
        self.run.scheduler.add(running)
        self._step()

    def _refused(self, outcome: Outcome, hint: float | None) -> None:
        outcome.refusals += 1
        if outcome.tries > MAX_RETRIES:
            outcome.given_up = True
            return
        headers = {} if hint is None else {"retry-after-ms": str(hint * 1000)}
        self._after(retry_delay(headers, outcome.tries - 1, self._random), lambda: self._try(outcome))

    def _step(self) -> None:
        plan = None if self._stepping else self.run.scheduler.plan()
        if plan is not None:
            self._stepping = True
            self._after(plan.seconds, lambda: self._stepped(plan))

    def _stepped(self, plan: Plan) -> None:
        self._stepping = False
        for sampled in self.run.scheduler.commit(plan):
            self._token(sampled)
        self._step()

    def _token(self, sampled: Sampled) -> None:
        running, outcome = sampled.sequence, self._callers[sampled.sequence]
        outcome.first_at = self.now if outcome.first_at is None else outcome.first_at
        outcome.last_at = self.now
        outcome.tokens = running.output
        self.gate.handle(Progressed(running.id, 1), self.now)
        if sampled.finish is not None:
            outcome.complete = True
            reason = EndReason.FINISHED if sampled.finish is Finish.STOP else EndReason.CAPPED
            self.gate.handle(Ended(running.id, reason, running.output, running.prompt), self.now)

    def _page(self) -> None:
        scheduler = self.run.scheduler
        counters = scheduler.counters
        sample = RankSample(
            rank="0",
            at=self.now,
            model=MODEL,
            kv_usage_ratio=scheduler.usage_ratio,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions_total=counters.preemptions,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            awake=True,
            block_size=CONFIG.block_size,
            capacity_tokens=scheduler.pool.usable * CONFIG.block_size,
            capacity_exact=True,
            prefix_caching=False,
            started_at=1.0,
        )
        self.gate.handle(Scraped((sample,), asked_at=self.now), self.now)
        self._after(0.2, self._page)

    def _card(self) -> None:
        comes, leaves = (share * self._seconds for share in NEIGHBOUR)
        free = FREE - (TAKEN if comes <= self.now < leaves else 0)
        card = GpuSample(uuid="GPU-0", at=self.now, total_bytes=TOTAL, free_bytes=free)
        self.gate.handle(GpusRead((card,)), self.now)
        self._after(1.0, self._card)

    def _describe(self) -> None:
        info = EngineInfo(models=(MODEL,), context_tokens=CONFIG.max_model_len)
        self.gate.handle(EngineDescribed(info), self.now)

    def _tick(self) -> None:
        self.gate.handle(Ticked(), self.now)
        status = self.gate.status(self.now)
        self.run.budgets.append((self.now, status.budget_tokens, str(status.budget_reason)))
        self._after(0.2, self._tick)
