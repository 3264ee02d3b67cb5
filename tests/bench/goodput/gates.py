"""Policies that the daemon does not have, in its gate's place: the same proxy, scraper and ledger.

``python -m tests.bench.goodput.gates POLICY --capacity N --context N`` is ``kvctl serve`` with that gate.
Settings come from the environment. None of these policies says when to come back, so who is refused is told
what openai-python would do by itself.
"""

import argparse
import asyncio
import os
import random
import signal
from collections.abc import Callable

import uvloop

from kvctl import logs
from kvctl.cli.serve import raise_file_limit
from kvctl.core.events import (
    Admit,
    Arrived,
    Command,
    Event,
    LeaseEnded,
    Progressed,
    Reject,
    Scraped,
    Ticked,
)
from kvctl.core.gate import Gate
from kvctl.core.outcomes import EndReason, RejectReason
from kvctl.core.supply import GateConfig
from kvctl.process import serve
from kvctl.settings.loading import load
from kvctl.sim.client import retry_delay
from kvctl.sim.policies import Concurrency, Door, KvGauge, Offer
from kvctl.sim.policies_core import OracleGate
from kvctl.sim.policies_past_future import PastFuture
from kvctl.sim.replay_policies import Spec, parse_policy
from kvctl.unit import MakeGate
from tests.bench.goodput.callers import read_call_id

_BROKEN = frozenset({EndReason.ENGINE_ERROR, EndReason.CLIENT_GONE, EndReason.CANCELLED})


class DoorGate(Gate):
    """A door decides who comes in, and the gate, which must let all in (policy none), keeps the ledger."""

    def __init__(self, config: GateConfig, door: Door, seed: int) -> None:
        super().__init__(config)
        self._door = door
        self._random = random.Random(seed)

    def handle(self, event: Event, now: float) -> list[Command]:
        """As the gate does, but for arrivals."""
        if isinstance(event, Arrived):
            return self._put_to_door(event, now)
        if isinstance(event, Progressed) and event.request_id in self.ledger:
            self._door.progressed(event.request_id, event.tokens, now)
        elif isinstance(event, Scraped):
            self._door.page(event.samples[0], event.asked_at, now)
        elif isinstance(event, Ticked):
            self._door.tick(now)
        commands = super().handle(event, now)
        for command in commands:
            if isinstance(command, LeaseEnded):
                self._tell_end(command, now)
        return commands

    def _put_to_door(self, event: Arrived, now: float) -> list[Command]:
        shape = event.shape
        tries, output = read_call_id(event.client_id)
        offer = Offer(
            id=event.request_id,
            tenant=shape.tenant,
            prompt=sum(shape.prompts),
            cap=shape.asked_output,
            true_output=output,
        )
        if not self._door.arrived(offer, now).admitted:
            wait_s = retry_delay({}, tries - 1, self._random)
            need = offer.prompt
            return [Reject(event.request_id, RejectReason.KV_BUDGET, need, need, retry_after_s=wait_s)]
        commands = super().handle(event, now)
        if not any(isinstance(command, Admit) for command in commands):
            self._door.ended(event.request_id, 0, now, finished=False, broken=True)
        return commands

    def _tell_end(self, command: LeaseEnded, now: float) -> None:
        record = command.record
        finished, broken = record.reason is EndReason.FINISHED, record.reason in _BROKEN
        self._door.ended(record.lease.id, record.output_tokens, now, finished=finished, broken=broken)


class ClairvoyantGate(OracleGate):
    """Reads from a request's id how long its answer will be."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """As the gate does."""
        if isinstance(event, Arrived):
            self.knows(event.request_id, read_call_id(event.client_id)[1])
        return super().handle(event, now)


def gate_maker(spec: Spec, capacity: int, context: int, seed: int) -> MakeGate:
    """What makes the gates of a daemon under that policy."""
    doors: dict[str, Callable[[], Door]] = {
        "concurrency": lambda: Concurrency(spec.limit or 1),
        "engine-queue": lambda: Concurrency(spec.limit or 1),
        "kv-gauge": KvGauge,
        "past-future": lambda: PastFuture(capacity, context, seed),
    }
    if spec.name in doors:
        return lambda config: DoorGate(config, doors[spec.name](), seed)
    return ClairvoyantGate if spec.name == "clairvoyant" else Gate


async def _serve(make: MakeGate) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(load(None, dict(os.environ), {}), stop=stop, gate=make)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.goodput.gates", description=__doc__)
    parser.add_argument("policy", type=parse_policy)
    parser.add_argument("--capacity", type=int, required=True, help="KV tokens of the engine")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    raise_file_limit()
    handler = logs.start("info", "text")
    try:
        uvloop.run(_serve(gate_maker(asked.policy, asked.capacity, asked.context, asked.seed)))
    finally:
        logs.stop(handler)


if __name__ == "__main__":
    main()
