"""The scheduler in real time: steps take as long as the profile says, tokens go to whoever waits for them.

A step that ends late (this process was not given the CPU) starts the next one early, so that the pace
holds over many steps; lateness past ``FORGIVEN_S`` is given up and counted in ``slipped_s``, so that
results can be judged.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvctl.sim.observed import Observed
from kvctl.sim.scheduler import EngineConfig, Finish, Sampled, Scheduler, Sequence

FORGIVEN_S = 0.1

TokenSink = Callable[[Sequence, Finish | None], None]


@dataclass(slots=True, eq=False)
class _Entry:
    sink: TokenSink
    arrived: float
    last_token: float | None = None


class SimulatedEngine:
    """Runs a Scheduler on the event loop. ``start`` it there, ``close`` it there."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.observed = Observed(config.max_model_len)
        self.started_at = time.time()
        self.slipped_s = 0.0
        self.asleep = False
        self._clock = clock
        self._entries: dict[Sequence, _Entry] = {}
        self._work = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin stepping."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop stepping; sequences in flight get no further token."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def submit(self, sequence: Sequence, sink: TokenSink) -> None:
        """Queue a sequence; ``sink`` is called on the loop with each of its tokens."""
        self._entries[sequence] = _Entry(sink, self._clock())
        self.scheduler.add(sequence)
        self._work.set()

    def abort(self, sequence: Sequence) -> None:
        """The client left: free what the sequence holds. Nothing happens if it has ended."""
        if self._entries.pop(sequence, None) is not None and self.scheduler.abort(sequence):
            self._work.set()

    def pause(self) -> None:
        """Wedge the engine: requests are taken and queued, /health answers, no token moves."""
        self._running.clear()

    def resume(self) -> None:
        """End a pause or a sleep."""
        self.asleep = False
        self._running.set()

    def sleep(self) -> None:
        """As vLLM's sleep: the gauge says so, nothing is served."""
        self.asleep = True
        self._running.clear()

    async def _run(self) -> None:
        due = self._clock()
        while True:
            await self._running.wait()
            plan = self.scheduler.plan()
            if plan is None:
                self._work.clear()
                await self._work.wait()
                due = self._clock()
                continue
            due = self._pace(due) + plan.seconds
            await asyncio.sleep(max(0.0, due - self._clock()))
            await self._running.wait()
            for sampled in self.scheduler.commit(plan):
                self._deliver(sampled)

    def _pace(self, due: float) -> float:
        late = self._clock() - due
        if late <= FORGIVEN_S:
            return due
        self.slipped_s += late
        return due + late

    def _deliver(self, sampled: Sampled) -> None:
        entry = self._entries.get(sampled.sequence)
        if entry is None:
            return
        now = self._clock()
        self.observed.token(
            since=entry.arrived if entry.last_token is None else entry.last_token,
            now=now,
            first=entry.last_token is None,
        )
        entry.last_token = now
        if sampled.finish is not None:
            del self._entries[sampled.sequence]
            self.observed.finished(sampled.sequence)
        entry.sink(sampled.sequence, sampled.finish)
