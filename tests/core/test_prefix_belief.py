"""When the gate counts common prefixes once, and what makes it stop: the engine, its ranks, its gauge."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.claim import Shape
from kvctl.core.events import (
    Admit,
    Arrived,
    Command,
    Ended,
    EngineDescribed,
    Noted,
    Progressed,
    Scraped,
    Ticked,
)
from kvctl.core.gate import Gate
from kvctl.core.ledger import Lease
from kvctl.core.outcomes import EndReason, Note, Policy
from kvctl.core.reconcile import DOUBTED_S, DOUBTFUL_PAGES
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, RankSample
from tests.effort import examples

CAPACITY = 100_000
PROMPT, SHARED = 3100, 2944  # 23 borders of 128 tokens
PAGE_S = 0.2

SAMPLE = RankSample(
    rank="0",
    at=0.0,
    kv_usage_ratio=0.0,
    running=0,
    waiting=0,
    preemptions_total=0,
    generation_tokens_total=0,
    prefix_hits_total=0,
    prefix_queries_total=0,
    capacity_tokens=CAPACITY,
    capacity_exact=True,
    block_size=16,
    awake=True,
    prefix_caching=True,
    started_at=1.0,
)


@dataclass
class Site:
    """A gate, and an engine that says what it is told to say."""

    gate: Gate = field(default_factory=lambda: Gate(GateConfig(ttft_target_s=None, itl_target_s=None)))
    now: float = 0.0
    tokens: int = 0
    notes: list[Note] = field(default_factory=list)

    def pages(self, count: int, used_tokens: float, *, ranks: int = 1, **said: Any) -> None:
        for _ in range(count):
            self.now += PAGE_S
            self.tokens += 10
            one = replace(
                SAMPLE,
                at=self.now,
                kv_usage_ratio=used_tokens / CAPACITY,
                generation_tokens_total=self.tokens,
                **said,
            )
            samples = tuple(replace(one, rank=str(rank)) for rank in range(ranks))
            self._take(self.gate.handle(Scraped(samples, asked_at=self.now - 0.05), self.now))
            self._take(self.gate.handle(Ticked(), self.now))

    def _take(self, commands: list[Command]) -> None:
        self.notes += [command.word for command in commands if isinstance(command, Noted)]

    def start(self, **said: Any) -> None:
        self.pages(1, 0.0, **said)
        self.gate.handle(EngineDescribed(EngineInfo(models=("m",), context_tokens=8192)), self.now)

    def admit(self, count: int) -> None:
        prefix = tuple((tokens, tokens) for tokens in range(128, SHARED + 1, 128))
        for number in range(count):
            shape = Shape(
                route="chat",
                model="m",
                prompts=(PROMPT,),
                asked_output=500,
                stream=True,
                prefixes=((*prefix, (PROMPT - 28, -number)),),
            )
            commands = self.gate.handle(Arrived(f"{self.now}-{number}", shape), self.now)
            assert isinstance(commands[-1], Admit)
            self.gate.handle(Progressed(f"{self.now}-{number}", 1), self.now)

    @property
    def shared(self) -> int:
        return self.gate.status(self.now).shared_prefix_tokens


@pytest.mark.parametrize("caching", [None, False])
def test_nothing_is_shared_unless_the_engine_says_that_it_caches(caching: bool | None) -> None:
    site = Site()
    site.start(prefix_caching=caching)
    assert not site.gate.sharing
    site.admit(5)
    assert site.shared == 0


def test_nor_where_the_operator_says_no() -> None:
    site = Site(Gate(GateConfig(prefix_sharing=False)))
    site.start()
    assert not site.gate.sharing


def test_nor_over_several_pools() -> None:
    site = Site()
    site.start(ranks=2)
    site.admit(5)
    assert site.shared == 0
    site.pages(1, 0.0)
    assert site.shared == 4 * SHARED


def test_usage_of_an_engine_that_shares_is_nobodys() -> None:
    site = Site()
    site.start()
    site.admit(20)
    held = site.gate.status(site.now).held_tokens
    assert site.shared == 19 * SHARED
    site.pages(100, held)
    assert site.gate.sharing
    assert site.gate.status(site.now).unattributed_tokens == 0


def test_a_gauge_that_shows_no_sharing_is_believed_and_told_once() -> None:
    site = Site()
    site.start()
    site.admit(20)
    whole = sum(lease.held_tokens() for lease in site.gate.ledger)
    site.pages(DOUBTFUL_PAGES - 1, whole)
    assert site.gate.sharing
    site.pages(2, whole)
    assert not site.gate.sharing
    status = site.gate.status(site.now)
    assert (status.shared_prefix_tokens, status.held_tokens) == (0, whole)
    site.pages(60, whole)
    assert site.notes.count(Note.SHARING_DOUBTED) == 1
    assert site.gate.status(site.now).unattributed_tokens < 0.02 * CAPACITY
    site.pages(int(DOUBTED_S / PAGE_S), whole)
    assert site.notes.count(Note.SHARING_DOUBTED) == 2  # tried again, and found wanting again


def test_cache_hits_say_that_the_rest_is_somebody_elses() -> None:
    site = Site()
    site.start()
    site.admit(20)
    site.pages(60, sum(lease.held_tokens() for lease in site.gate.ledger), prefix_hits_total=20 * SHARED)
    assert site.gate.sharing
    assert site.gate.status(site.now).unattributed_tokens > 10 * SHARED


def test_another_process_is_asked_anew() -> None:
    site = Site()
    site.start()
    site.admit(20)
    site.pages(DOUBTFUL_PAGES + 1, sum(lease.held_tokens() for lease in site.gate.ledger))
    assert not site.gate.sharing
    for lease in list(site.gate.ledger):
        site.gate.handle(Ended(lease.id, EndReason.ENGINE_ERROR), site.now)
    site.pages(1, 0.0, started_at=2.0)
    assert site.gate.sharing


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("page"), st.integers(0, 1), st.integers(1, 2)),
        st.tuples(st.just("token"), st.integers(0, 9), st.integers(1, 40)),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=examples(80), deadline=None)
def test_sums_are_exact_whatever_is_believed_meanwhile(steps: list[tuple[str, int, int]]) -> None:
    site = Site(Gate(GateConfig(ttft_target_s=None, itl_target_s=None, policy=Policy.NONE)))
    site.start()
    gate, ledger = site.gate, site.gate.ledger
    for serial, (what, one, other) in enumerate(steps):
        names = [lease.id for lease in ledger]
        if what == "arrive":
            chain = tuple((128 * k, 100 * (one % 2**k) + k) for k in range(1, 4))
            shape = Shape(
                route="c", model="m", prompts=(500,), n=other, asked_output=64, stream=True, prefixes=(chain,)
            )
            gate.handle(Arrived(str(serial), shape), site.now)
        elif what == "page":
            site.pages(1, 0.0, ranks=other, prefix_caching=bool(one))
        elif names and what == "end":
            gate.handle(Ended(names[one % len(names)], EndReason.CLIENT_GONE), site.now)
        elif names:
            gate.handle(Progressed(names[one % len(names)], other), site.now)
        saved = naive_saving(list(ledger)) if gate.sharing else 0
        assert ledger.shared_tokens == saved
        assert ledger.held_tokens() == sum(lease.held_tokens() for lease in ledger) - saved
        assert gate.status(site.now).forecast_peak_tokens <= ledger.claimed_tokens + 1e-6
    for lease in list(ledger):
        gate.handle(Ended(lease.id, EndReason.CLIENT_GONE), site.now)
    status = gate.status(site.now)
    assert (status.held_tokens, status.claimed_tokens, status.shared_prefix_tokens) == (0, 0, 0)
    assert status.forecast_peak_tokens == 0.0


def naive_saving(leases: list[Lease]) -> int:
    """Each chain's blocks by all borders up to theirs; a prompt's last part is its own sequences' alone."""
    readers: dict[tuple[object, ...], int] = {}
    for lease in leases:
        (chain,) = lease.claim.prefixes
        borders = [*chain, (499, lease.id)] if lease.claim.n > 1 else list(chain)
        start = 0
        for at, (end, _) in enumerate(borders, 1):
            whole = end // 16 * 16
            for block in range(start, whole, 16):
                known = (block, *borders[:at])
                readers[known] = readers.get(known, 0) + lease.claim.n
            start = whole
    return 16 * sum(count - 1 for count in readers.values())
