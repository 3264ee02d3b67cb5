"""The demo's play: one load on all lanes at once, the neighbour's visit, and what was observed.

All lanes run side by side in real time on the same arrivals; nothing is accelerated. ``slipped_s`` of a lane
tells how much of its engine's time a busy machine has taken: where that is not small, the figures are the
machine's and not the policy's.
"""

import asyncio
import contextlib
import re
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvctl.cli import demo_stage
from kvctl.cli.demo_stage import GPU_POLL_S, NEIGHBOUR_BYTES, Lane, Stage
from kvctl.core.outcomes import Policy
from kvctl.sim.client import Caller, Outcome
from kvctl.sim.load import NEIGHBOUR, Call

GATE_POLL_S = 0.1
ENGINE_POLL_S = 0.25
SHOW_EVERY_S = 1.0
BUDGET_STEP = 0.01
"""A budget that moved by less than this share is the same budget."""

_SERIES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "preemptions",
    "sim:slipped_seconds_total": "slipped_s",
}
_LINE = re.compile(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """What the simulated engine's page says."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    preemptions: float = 0.0
    slipped_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BudgetEvent:
    """A change of the budget, with kvctl's reason for it."""

    t_s: float
    before: int
    after: int
    reason: str


@dataclass(slots=True)
class LaneRun:
    """What one lane has seen so far."""

    lane: Lane
    outcomes: list[Outcome] = field(default_factory=list)
    engine: EngineReading = field(default_factory=EngineReading)
    gate: dict[str, Any] = field(default_factory=dict)
    budgets: list[int] = field(default_factory=list)
    events: list[BudgetEvent] = field(default_factory=list)
    budget_trace: list[tuple[float, float]] = field(default_factory=list)  # seconds, KV tokens
    peaks: list[tuple[float, float]] = field(default_factory=list)  # seconds, forecast peak in KV tokens
    usage_trace: list[tuple[float, float]] = field(default_factory=list)  # seconds, share of the pool

    @property
    def policy(self) -> Policy:
        """The lane's policy."""
        return self.lane.policy

    @property
    def kv_usage_mean(self) -> float:
        """Mean of the engine's gauge over the run."""
        return statistics.fmean(share for _, share in self.usage_trace) if self.usage_trace else 0.0


@dataclass(slots=True)
class Play:
    """A run in progress or over. Times are seconds since the first arrival was due."""

    seconds: float
    calls: Sequence[Call]
    lanes: list[LaneRun]
    now_s: float = 0.0
    neighbour_came_s: float | None = None
    neighbour_left_s: float | None = None

    @property
    def neighbour_is_there(self) -> bool:
        """Whether somebody else's process holds memory of the card now."""
        return self.neighbour_came_s is not None and self.neighbour_left_s is None


Show = Callable[[Play], None]


async def play(stage: Stage, calls: Sequence[Call], seconds: float, seed: int, show: Show) -> Play:
    """Run the load on every lane for ``seconds``, calling ``show`` once a second; leaves nothing running."""
    the_play = Play(seconds, calls, [LaneRun(lane) for lane in stage.lanes])
    loop = asyncio.get_running_loop()
    start = loop.time()

    def clock() -> float:
        return loop.time() - start

    async with contextlib.AsyncExitStack() as stack:
        jobs: list[Coroutine[Any, Any, None]] = [
            _neighbour(stage, the_play, clock),
            _shower(the_play, show, clock),
        ]
        for run in the_play.lanes:
            session = await stack.enter_async_context(_http_session())
            admin = await stack.enter_async_context(demo_stage.admin_session(run.lane))
            caller = Caller(session, run.lane.url, demo_stage.MODEL, clock, seed)
            jobs += [
                _arrivals(run, calls, caller, clock),
                _watch_engine(run, session, clock),
                _watch_gate(run, admin, clock),
            ]
        tasks = [loop.create_task(job) for job in jobs]
        await _until(seconds - clock(), tasks)
    the_play.now_s = clock()
    return the_play


async def _until(seconds: float, tasks: list[asyncio.Task[None]]) -> None:
    """Let the tasks run for ``seconds``, then cancel what is left. Raises what any of them raised."""
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _http_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def _arrivals(run: LaneRun, calls: Sequence[Call], caller: Caller, clock: Callable[[], float]) -> None:
    """Start every call at its time, whatever became of earlier ones; when cancelled, all of them leave."""
    async with asyncio.TaskGroup() as group:
        for call in calls:
            await asyncio.sleep(max(0.0, call.at_s - clock()))
            outcome = Outcome(call=call)
            run.outcomes.append(outcome)
            group.create_task(caller.make(outcome))


async def _neighbour(stage: Stage, the_play: Play, clock: Callable[[], float]) -> None:
    """Take memory and give it back; stay for two readings of the card even where the run is short."""
    comes, leaves = (share * the_play.seconds for share in NEIGHBOUR)
    leaves = max(leaves, comes + 2 * GPU_POLL_S)
    await asyncio.sleep(comes - clock())
    stage.card.take(NEIGHBOUR_BYTES)
    the_play.neighbour_came_s = clock()
    await asyncio.sleep(leaves - clock())
    stage.card.release(NEIGHBOUR_BYTES)
    the_play.neighbour_left_s = clock()


async def _shower(the_play: Play, show: Show, clock: Callable[[], float]) -> None:
    async for _ in _every(SHOW_EVERY_S):
        the_play.now_s = clock()
        show(the_play)


async def _every(seconds: float) -> AsyncIterator[None]:
    """A beat that does not drift; missed beats are skipped."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        yield
        due = max(due + seconds, loop.time())
        await asyncio.sleep(due - loop.time())


async def _watch_engine(run: LaneRun, session: aiohttp.ClientSession, clock: Callable[[], float]) -> None:
    async for _ in _every(ENGINE_POLL_S):
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{run.lane.engine_url}/metrics") as response:
                run.engine = read_page(await response.text())
                run.usage_trace.append((clock(), run.engine.kv_usage))


def read_page(page: str) -> EngineReading:
    """The figures of a simulated engine's page; what is not there stays 0."""
    found = {_SERIES[name]: float(value) for name, value in _LINE.findall(page) if name in _SERIES}
    return EngineReading(**found)


async def _watch_gate(run: LaneRun, session: aiohttp.ClientSession, clock: Callable[[], float]) -> None:
    async for _ in _every(GATE_POLL_S):
        at = clock()
        gate = await demo_stage.read_gate(session)
        if gate is not None:
            run.gate = gate
            note_budget(run, at)
            run.budget_trace.append((at, float(gate["budget_tokens"])))
            run.peaks.append((at, float(gate["forecast_peak_tokens"])))


def note_budget(run: LaneRun, at: float) -> None:
    """Remember the budget that the gate shows now, and the change if it is one."""
    budget, reason = int(run.gate["budget_tokens"]), str(run.gate["budget_reason"])
    before = run.budgets[-1] if run.budgets else budget
    if abs(budget - before) <= BUDGET_STEP * before:
        budget = before
    else:
        run.events.append(BudgetEvent(round(at, 2), before, budget, reason))
    run.budgets.append(budget)
