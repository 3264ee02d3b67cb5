"""Whoever listens to the gate cannot make it lose a lease."""

import logging

import pytest

from kvctl.control.gatekeeper import Gatekeeper, LeaseHandle
from kvctl.core.claim import Shape
from kvctl.core.events import Command, EngineDescribed, Event
from kvctl.core.gate import Gate
from kvctl.core.outcomes import EndReason
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo

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
    assert len(keeper.gate.ledger) == 0
    assert seen, "the others were told"
    assert "what the gate decided stands" in caplog.text
