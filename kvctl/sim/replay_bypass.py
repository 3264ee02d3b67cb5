"""Traffic that reaches the engine past every gate and holds a share of its pool."""

import random
from collections.abc import Iterator, Sequence

from kvctl.sim.replay_faults import Fault
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.scheduler import Sequence as Running
from kvctl.sim.trace import Row


class Bypass:
    """Requests drawn from the same trace, as many as keep the share filled."""

    def __init__(self, rows: Sequence[Row], fault: Fault, engine: EngineConfig, seed: int) -> None:
        self._rows = rows
        self._fault = fault
        self._share = fault.value * (engine.blocks - 1) * engine.block_size
        self._context = engine.max_model_len
        self._random = random.Random(seed)  # noqa: S311 - a reproducible load
        self._running: set[Running] = set()

    def newcomers(self, now: float) -> Iterator[Running]:
        """Those that come in now."""
        if now < self._fault.at_s:
            return
        held = sum(one.tokens for one in self._running)
        while True:
            row = self._random.choice(self._rows)
            held += row.prompt_tokens
            if held > self._share:
                return
            room = self._context - row.prompt_tokens
            running = Running(
                id="past the gate", prompt=row.prompt_tokens, max_output=room, true_output=row.output_tokens
            )
            self._running.add(running)
            yield running

    def ended(self, running: Running) -> None:
        """One of them is over."""
        if running.output >= min(running.true_output, running.max_output):
            self._running.discard(running)

    def lost(self) -> None:
        """The engine died with all of them."""
        self._running.clear()
