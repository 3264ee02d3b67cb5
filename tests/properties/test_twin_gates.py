"""Two gates hear the same, and one looks at the curve for every arrival: they say the same, whatever happens.

Queues, tenants, enforcement, margins, policies and capacities come and go while requests are in flight.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.events import (
    Abandoned,
    Admit,
    Arrived,
    Command,
    DrainChanged,
    Ended,
    Event,
    KnobsChanged,
    LeftQueue,
    Progressed,
    Queued,
    Reconfigured,
    Reject,
    Scraped,
    Ticked,
)
from kvctl.core.gate import Gate
from kvctl.core.outcomes import EndReason, LargeRequests, Policy
from kvctl.core.queue import QueueConfig
from kvctl.core.supply import GateConfig
from kvctl.core.tenants import TenantRule
from tests.core.conversation import PAGE, Conversation, shape
from tests.core.test_newcomers import LookingGate
from tests.effort import examples

POLICIES = [Policy.FORECAST, Policy.FORECAST, *Policy]
REASONS = [EndReason.FINISHED, EndReason.CAPPED, EndReason.CLIENT_GONE]


def word(command: Command) -> tuple[object, ...] | None:
    """What must be the same: the verdict and its reason, not the figure that was bounded."""
    if isinstance(command, Admit):
        return "admit", command.request_id, command.shadow, command.alone
    if isinstance(command, Reject):
        return "reject", command.request_id, command.reason
    return (type(command), command.request_id) if isinstance(command, Queued | LeftQueue) else None


class Twins:
    """Both, and what is in flight and waits at either."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.config = GateConfig(ttft_target_s=rng.choice([None, 2.0]), itl_target_s=None)
        self.talks = [Conversation(), Conversation()]
        capacity = rng.choice([8000, 48_000, 200_000])
        for talk, kind in zip(self.talks, (Gate, LookingGate), strict=True):
            talk.gate = kind(self.config)
            talk.up(replace(PAGE, capacity_tokens=capacity))
        self.gate = self.talks[0].gate
        self.page = self.talks[0].last_page[0]
        self.live: list[str] = []
        self.waiting: list[str] = []
        self.asked = 0

    def say(self, event: Event) -> None:
        told = [talk.say(event) for talk in self.talks]
        one, other = [[said for said in map(word, commands) if said] for commands in told]
        assert one == other
        for bounded, exact in zip(*told, strict=True):
            if isinstance(bounded, Admit) and isinstance(exact, Admit):
                assert bounded.forecast_tokens >= exact.forecast_tokens * (1.0 - 1e-9) - 1e-6
        for command in told[0]:
            self._heard(command)

    def _heard(self, command: Command) -> None:
        if isinstance(command, Admit):
            self.live.append(command.request_id)
            if self.gate._policy is not Policy.NONE and not (command.alone or command.shadow):
                assert command.forecast_tokens is not None
                assert command.forecast_tokens <= self.gate._supply.budget.tokens
        if isinstance(command, Queued):
            self.waiting.append(command.request_id)
        elif isinstance(command, Admit | Reject) and command.request_id in self.waiting:
            self.waiting.remove(command.request_id)

    def arrive(self) -> None:
        rng = self.rng
        self.asked += 1
        prompt = rng.choice([10, 300, 2000, 6000])
        prompts = [prompt] if rng.random() < 0.9 else [prompt, prompt // 2 + 1] * rng.choice([1, 6])
        asked = shape(
            prompts,
            rng.choice([16, 512, 4096, None]),
            n=rng.choice([1, 1, 3]),
            stream=rng.random() < 0.7,
            tenant=rng.choice(["", "t", "u"]),
        )
        self.say(Arrived(f"a{self.asked}", asked))

    def end(self) -> None:
        if self.live:
            gone = self.live.pop(self.rng.randrange(len(self.live)))
            output = self.rng.choice([None, 5, 300])
            self.say(Ended(gone, self.rng.choice(REASONS), output, None))

    def progress(self) -> None:
        if self.live:
            self.say(Progressed(self.rng.choice(self.live), self.rng.choice([1, 10, 300])))

    def abandon(self) -> None:
        if self.waiting:
            self.say(Abandoned(self.waiting.pop(self.rng.randrange(len(self.waiting)))))

    def tick(self) -> None:
        self.say(Ticked())

    def scrape(self) -> None:
        rng = self.rng
        self.page = replace(
            self.page, at=self.talks[0].now, kv_usage_ratio=rng.choice([None, 0.0, 0.1, 0.95])
        )
        if rng.random() < 0.3:
            self.page = replace(self.page, capacity_tokens=rng.choice([4000, 8000, 48_000, 200_000]))
        if rng.random() < 0.1:
            self.page = replace(self.page, started_at=rng.random() * 1e6)
        self.say(Scraped((self.page,), self.talks[0].now))

    def turn_knobs(self) -> None:
        self.say(KnobsChanged(self.rng.choice([0.0, 0.05, 0.3, 0.6]), self.rng.choice(POLICIES)))

    def reload(self) -> None:
        rng = self.rng
        limited = TenantRule(name="t", weight=2.0, tokens_in_flight=rng.choice([None, 5000]))
        rules: list[tuple[TenantRule, ...]] = [(), (), (limited, TenantRule(name="u"))]
        self.config = replace(
            self.config,
            queue=QueueConfig(
                max_wait_s=rng.choice([0.0, 0.0, 5.0, 60.0]), large=rng.choice(list(LargeRequests))
            ),
            tenants=rng.choice(rules),
            enforce_ratio=rng.choice([1.0, 1.0, 0.5, 0.0]),
            margin_ratio=rng.choice([0.0, 0.05, 0.4]),
            policy=rng.choice(POLICIES[:4]),
            max_num_seqs=rng.choice([None, 5]),
        )
        self.say(Reconfigured(self.config))
        self.say(DrainChanged(draining=False))

    def the_sums_are_those_of_their_parts(self) -> None:
        for talk in self.talks:
            ledger, newcomers = talk.gate.ledger, talk.gate._demand._sharing.newcomers
            assert ledger.claimed_tokens == sum(lease.claim.tokens for lease in ledger)
            assert newcomers._tall == sum(tall for tall, _ in newcomers._open.values())
            assert newcomers._most == sum(most for _, most in newcomers._open.values())


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 1 << 30))
def test_one_that_looks_at_every_curve_says_the_same(seed: int) -> None:
    twins = Twins(seed)
    does: list[tuple[Callable[[], None], int]] = [
        (twins.arrive, 45),
        (twins.end, 17),
        (twins.progress, 10),
        (twins.abandon, 4),
        (twins.tick, 10),
        (twins.scrape, 5),
        (twins.turn_knobs, 4),
        (twins.reload, 4),
    ]
    steps, weights = [step for step, _ in does], [weight for _, weight in does]
    for step in twins.rng.choices(steps, weights, k=100):
        pause = twins.rng.choice([0.0, 0.0, 0.01, 0.2, 1.0])
        for talk in twins.talks:
            talk.now += pause
        step()
        twins.the_sums_are_those_of_their_parts()
    while twins.waiting or twins.live:
        twins.abandon()
        twins.end()
    assert all(talk.gate.ledger.claimed_tokens == talk.gate.ledger.sequences == 0 for talk in twins.talks)
