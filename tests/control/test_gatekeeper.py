"""Whoever listens to the gate cannot make it lose a lease."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.control.gatekeeper import Gatekeeper, LeaseHandle
from kvctl.core.claim import Shape
from kvctl.core.events import (
    Admit,
    Arrived,
    Command,
    EngineDescribed,
    Event,
    LeaseEnded,
    Progressed,
    Scraped,
    Ticked,
)
from kvctl.core.gate import Gate
from kvctl.core.outcomes import EndReason
from kvctl.core.snapshot import scales_of
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, RankSample

SHAPE = Shape(route="chat", model="tiny", prompts=(16,), asked_output=16)


def broken(*_: object) -> None:
    raise ZeroDivisionError


async def test_a_listener_that_fails_costs_no_lease(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Command] = []
    keeper = Gatekeeper(Gate(GateConfig()), lambda: 100.0, [broken, seen.append])

    def broken_recorder(event: Event, commands: list[Command], now: float) -> None:
        broken(event, commands, now)

    keeper.record(broken_recorder)
    with caplog.at_level(logging.ERROR):
        keeper.handle(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=4096)))
        lease = await keeper.admit("a", SHAPE)
        assert isinstance(lease, LeaseHandle)
        assert len(keeper.gate.ledger) == 1
        lease.end(EndReason.FINISHED)
        keeper.settle()
    assert len(keeper.gate.ledger) == 0
    assert seen, "the others were told"
    assert "what the gate decided stands" in caplog.text


async def opened(keeper: Gatekeeper, name: str) -> LeaseHandle:
    lease = await keeper.admit(name, SHAPE)
    assert isinstance(lease, LeaseHandle)
    return lease


class FailsOnTokensOfA(Gate):
    """A defect that one lease's progress meets."""

    def handle(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, Progressed) and event.request_id == "a" and event.tokens > 1:
            raise ZeroDivisionError
        return super().handle(event, now)


async def test_tokens_that_cannot_be_counted_keep_no_lease_of_anybody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keeper = Gatekeeper(FailsOnTokensOfA(GateConfig()), lambda: 100.0)
    keeper.handle(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=4096)))
    leases = [await opened(keeper, name) for name in "ab"]
    for lease in leases:
        lease.progress(1)
        lease.progress(5)
    with caplog.at_level(logging.ERROR):
        leases[1].end(EndReason.FINISHED)
    assert "could not be counted" in caplog.text
    assert [lease.id for lease in keeper.gate.ledger] == ["a"]
    leases[0].end(EndReason.FINISHED)
    assert len(keeper.gate.ledger) == 0


async def test_what_is_written_down_waits_for_others_and_is_of_its_moment() -> None:
    """In order, with the scales of each decision; what no request brings comes at once, after all before."""
    keeper = Gatekeeper(Gate(GateConfig()), lambda: 100.0)
    keeper.handle(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=4096)))
    written: list[tuple[Event, int]] = []
    counted: list[Command] = []

    def write(event: Event, commands: list[Command], now: float) -> None:
        del commands, now
        written.append((event, scales_of(keeper.moment()).leases))

    keeper.record(write)
    keeper.count(counted.append, Admit, LeaseEnded)
    for name in "abc":
        await opened(keeper, name)
    assert (written, counted) == ([], [])
    keeper.handle(Ticked())
    assert [leases for _, leases in written] == [1, 2, 3, 3]
    assert [type(event) for event, _ in written] == [Arrived, Arrived, Arrived, Ticked]
    assert len(counted) == 3
    (await opened(keeper, "d")).end(EndReason.FINISHED)
    assert len(counted) == 3
    keeper.settle()
    assert [type(command) for command in counted[3:]] == [Admit, LeaseEnded]
    assert [leases for _, leases in written[4:]] == [4, 3]


async def test_no_more_than_some_wait_to_be_written_and_none_where_somebody_reads_along() -> None:
    keeper = Gatekeeper(Gate(GateConfig()), lambda: 100.0)
    keeper.handle(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=4096)))
    counted: list[Command] = []
    keeper.count(counted.append, Admit)
    for number in range(200):
        (await opened(keeper, f"{number}")).end(EndReason.FINISHED)
        assert number - len(counted) < 64
    keeper.hurry = True
    (await opened(keeper, "z")).end(EndReason.FINISHED)
    assert len(counted) == 201


async def test_who_arrives_does_not_wait_for_what_is_to_be_written() -> None:
    """It waits for the next end, and for an arrival only where so many come that none is near."""
    keeper = Gatekeeper(Gate(GateConfig()), lambda: 100.0)
    keeper.handle(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=4096)))
    counted: list[Command] = []
    keeper.count(counted.append, Admit)
    leases = [await opened(keeper, f"{number}") for number in range(100)]
    assert counted == []
    leases[0].end(EndReason.FINISHED)
    assert len(counted) == 100
    for number in range(100, 227):
        await opened(keeper, f"{number}")
    assert len(counted) == 100
    await opened(keeper, "227")
    assert len(counted) == 228


STREAM = Shape(route="chat", model="tiny", prompts=(16,), asked_output=400, stream=True)
STEPS = st.lists(st.sampled_from(["a", "b", "c", "tick", "page", "look", "end a", "end b"]), max_size=40)


class Twins:
    """Two gates that are told the same: of tokens, one as the data plane tells it, one of each at once."""

    def __init__(self) -> None:
        self.now = 100.0
        self.generated = 0
        self.gates = Gate(GateConfig()), Gate(GateConfig())
        self.keepers = [Gatekeeper(gate, lambda: self.now) for gate in self.gates]
        self.leases: dict[str, list[LeaseHandle]] = {"a": [], "b": [], "c": []}

    async def open(self) -> None:
        for keeper in self.keepers:
            keeper.handle(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=4096)))
            for name, handles in self.leases.items():
                lease = await keeper.admit(name, STREAM)
                assert isinstance(lease, LeaseHandle)
                handles.append(lease)

    def step(self, word: str) -> None:
        self.now += 0.03
        if word in self.leases:
            self._progress(word)
        elif word.startswith("end"):
            for lease in self.leases[word[-1]]:
                lease.end(EndReason.FINISHED)
        elif word != "look":
            tokens = float(self.generated)
            sample = RankSample(rank="0", at=self.now, running=3, generation_tokens_total=tokens)
            event: Event = Ticked() if word == "tick" else Scraped((sample,), self.now)
            told = [keeper.handle(event) for keeper in self.keepers]
            assert told[0] == told[1]

    def _progress(self, name: str) -> None:
        if not self.leases[name][1].ended:
            self.generated += 2
            self.keepers[1].handle(Progressed(name, 2))
        self.leases[name][0].progress(2)

    def compare(self) -> None:
        assert self.keepers[0].gate.status(self.now) == self.gates[1].status(self.now)
        seen = [
            [(each.id, each.first_token_at, each.last_token_at, each.output_tokens) for each in gate.ledger]
            for gate in self.gates
        ]
        assert seen[0] == seen[1]


@given(STEPS)
async def test_tokens_that_are_told_together_leave_the_gate_as_if_told_one_by_one(steps: list[str]) -> None:
    """Whoever looks at the gate, and whatever it decides, finds every token counted."""
    twins = Twins()
    await twins.open()
    for word in steps:
        twins.step(word)
        if word == "look":
            twins.compare()
    twins.compare()
