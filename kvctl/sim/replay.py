"""A trace through a policy and the simulated engine, in virtual time.

No clock and no socket: the future is a heap of (time, order, what happens), and the engine's next step
stands beside it. The policy is told what it would be told in the field and no sooner: pages every 0.2 s that
speak of a moment ago, ticks every 0.2 s, the card every second, the tokens of streams at each tick.

Callers do as openai-python does: two retries, when told or with its own backoff. Time to first token counts
from the first attempt.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvctl.core.claim import Prefix
from kvctl.core.telemetry import EngineInfo
from kvctl.sim.beginnings import block_hashes, prefix
from kvctl.sim.client import retry_delay
from kvctl.sim.policies import Door, Offer, Verdict
from kvctl.sim.policies_core import MODEL
from kvctl.sim.replay_bypass import Bypass
from kvctl.sim.replay_engine import VirtualEngine
from kvctl.sim.replay_faults import Fault, FaultKind, active
from kvctl.sim.replay_telemetry import Page, Telemetry, card_at
from kvctl.sim.scheduler import EngineConfig, Finish, Sampled
from kvctl.sim.scheduler import Sequence as Running
from kvctl.sim.trace import Row

BEAT_S = 0.2
CARD_S = 1.0
SEEN_EVERY_S = 1.0  # a point of the chart
PATIENCE_S = 600.0  # after the last arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All of a run but its policy.

    ``cap`` is what the caller of a row sends as its output limit; ``ttft_s`` and ``itl_s`` are the targets
    that the gate's guards are told.
    """

    rows: Sequence[Row]
    engine: EngineConfig
    cap: Callable[[Row], int | None]
    retries: int = 2
    seed: int = 1
    telemetry_lag_s: float = 0.1
    ttft_s: float = 2.0
    itl_s: float = 0.1
    faults: Sequence[Fault] = ()

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.rows[-1].at_s


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A caller and what became of it."""

    row: Row
    cap: int | None
    tries: int = 0
    retries: int = 0  # tries after a refusal, and how many of them got in
    retries_admitted: int = 0
    id: str = ""
    told: int = 0  # tokens that the policy was told of
    asked_at: float | None = None  # when its last try was made
    first_at: float | None = None
    ended_at: float | None = None
    output: int = 0
    complete: bool = False
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the chart. ``budget`` in KV tokens; None: the policy has none."""

    at_s: float
    usage: float
    waiting: int
    budget: int | None


@dataclass(slots=True, kw_only=True)
class Run:
    """What came of one policy."""

    calls: list[Call]
    usages: list[float] = field(default_factory=list)  # at each page while calls arrived
    points: list[Point] = field(default_factory=list)
    preemptions: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0


def replay(scene: Scene, door: Door, progress: Callable[[int], None] | None = None) -> Run:
    """The whole run; ``progress`` is told how many calls have come, once a second of the run."""
    return _World(scene, door, progress).go()


class _World:
    def __init__(self, scene: Scene, door: Door, progress: Callable[[int], None] | None) -> None:
        self._scene = scene
        self._door = door
        self._progress = progress
        self._now = 0.0
        self._future: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._random = random.Random(scene.seed)  # noqa: S311 - jitter of a reproducible load
        self._engine: VirtualEngine | None = VirtualEngine(scene.engine)
        self._telemetry = Telemetry(scene.engine, scene.faults)
        self._flying: dict[Running, Call] = {}
        self._waiting: dict[str, Call] = {}
        self._run = Run(calls=[Call(row=row, cap=scene.cap(row)) for row in scene.rows])
        self._open = len(scene.rows)
        self._bypass = [
            Bypass(scene.rows, fault, scene.engine, scene.seed)
            for fault in scene.faults
            if fault.kind is FaultKind.BYPASS
        ]

    def go(self) -> Run:
        for call in self._run.calls:
            self._at(call.row.at_s, lambda call=call: self._try(call))  # type: ignore[misc]
        for delay, beat in (
            (-0.3, self._page),
            (-0.2, self._describe),
            (-0.05, self._tick),
            (0.0, self._look),
        ):
            self._at(delay, beat)
        if any(fault.kind is FaultKind.NEIGHBOUR for fault in self._scene.faults):
            self._at(-0.1, self._card)
        for fault in self._scene.faults:
            if fault.kind is FaultKind.RESTART:
                self._at(fault.at_s, self._engine_dies)
                self._at(fault.until_s, self._engine_starts)
        self._play(self._scene.seconds + PATIENCE_S)
        self._remember_counters()
        return self._run

    def _play(self, until: float) -> None:
        future = self._future
        while self._open and self._now < until:
            due = future[0][0]
            engine = self._engine
            if engine is not None and engine.due <= due:
                self._now = engine.due
                for sampled in engine.step_done():
                    if sampled.sequence.output == 1 or sampled.finish is not None:
                        self._token(sampled)
                self._hear()
                continue
            self._now, _, happen = heapq.heappop(future)
            happen()
            self._hear()

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._future, (when, self._order, happen))

    # --- callers ------------------------------------------------------------------------------------

    def _try(self, call: Call) -> None:
        call.tries += 1
        call.id = f"{call.row.number}-{call.tries}"
        call.told, call.asked_at = 0, self._now
        if self._engine is None:
            self._turned_away(call, {}, final=False)
            return
        offer = Offer(
            id=call.id,
            tenant=call.row.tenant,
            prompt=call.row.prompt_tokens,
            cap=call.cap,
            true_output=call.row.output_tokens,
            prefix=self._prefix(call.row),
        )
        self._answered(call, self._door.arrived(offer, self._now))

    def _answered(self, call: Call, verdict: Verdict) -> None:
        if verdict.waits:
            self._waiting[call.id] = call
            return
        if call.tries > 1:
            call.retries += 1
            call.retries_admitted += verdict.admitted
        if verdict.admitted and self._engine is None:  # the gate has not seen yet that it is gone
            self._door.ended(call.id, 0, self._now, finished=False, broken=True)
            self._turned_away(call, {}, final=False)
            return
        if verdict.admitted:
            self._start(call)
            return
        hint = verdict.retry_after_s
        headers = {} if hint is None else {"retry-after-ms": str(hint * 1000.0)}
        self._turned_away(call, headers, final=verdict.final)

    def _hear(self) -> None:
        """What the door decided meanwhile on those that wait."""
        while self._waiting and (decided := self._door.decided()):
            for call_id, verdict in decided:
                self._answered(self._waiting.pop(call_id), verdict)

    def _start(self, call: Call) -> None:
        room = self._scene.engine.max_model_len - call.row.prompt_tokens
        running = Running(
            id=call.id,
            prompt=call.row.prompt_tokens,
            max_output=room if call.cap is None else min(call.cap, room),
            true_output=call.row.output_tokens,
            hashes=self._hashes(call.row),
        )
        self._flying[running] = call
        beside = 0 if self._engine is None else len(self._engine.scheduler.running)
        way_in = self._scene.engine.profile.way_in_seconds(beside)
        if way_in:
            self._at(self._now + way_in, lambda: self._reach(running))
        else:
            self._reach(running)

    def _reach(self, running: Running) -> None:
        if self._engine is not None and running in self._flying:  # it did not die meanwhile
            self._engine.add(running, self._now)

    def _prefix(self, row: Row) -> Prefix:
        return prefix(row) if self._scene.engine.prefix_caching else ()

    def _hashes(self, row: Row) -> tuple[int, ...]:
        engine = self._scene.engine
        return block_hashes(row, engine.block_size) if engine.prefix_caching else ()

    def _turned_away(self, call: Call, headers: dict[str, str], *, final: bool) -> None:
        if final or call.tries > self._scene.retries:
            call.given_up = True
            self._settled()
            return
        self._at(self._now + retry_delay(headers, call.tries - 1, self._random), lambda: self._try(call))

    def _token(self, sampled: Sampled) -> None:
        running = sampled.sequence
        call = self._flying.get(running)
        if call is None:
            for bypass in self._bypass:
                bypass.ended(running)
            return
        if call.first_at is None:
            call.first_at = self._now
        self._tell(running, call)
        if sampled.finish is None:
            return
        del self._flying[running]
        call.ended_at, call.output, call.complete = self._now, running.output, True
        finished = sampled.finish is Finish.STOP
        self._door.ended(call.id, running.output, self._now, finished=finished, broken=False)
        self._settled()

    def _settled(self) -> None:
        self._open -= 1

    def _tell(self, running: Running, call: Call) -> None:
        if self._door.follows_tokens and running.output > call.told:
            self._door.progressed(call.id, running.output - call.told, self._now)
            call.told = running.output

    # --- beats --------------------------------------------------------------------------------------

    def _tell_all(self) -> None:
        if self._engine is None:
            return
        self._engine.look(self._now)
        for running, call in self._flying.items():
            self._tell(running, call)

    def _tick(self) -> None:
        self._tell_all()
        self._door.tick(self._now)
        self._at(self._now + BEAT_S, self._tick)

    def _page(self) -> None:
        """A page is asked for now, and answered after a moment with what was true now."""
        self._at(self._now + BEAT_S, self._page)
        if self._engine is None:
            self._door.page_failed(self._now)
            return
        self._engine.look(self._now)
        scheduler = self._engine.scheduler
        if 0.0 <= self._now <= self._scene.seconds:
            self._run.usages.append(scheduler.usage_ratio)
        for bypass in self._bypass:
            for running in bypass.newcomers(self._now):
                self._engine.add(running, self._now)
        page = self._telemetry.page(self._engine, self._now)
        self._at(self._now + self._scene.telemetry_lag_s, lambda: self._page_came(page))

    def _page_came(self, page: Page) -> None:
        if self._engine is not None:
            self._door.page(self._telemetry.sample(page, self._now), self._now - 0.01, self._now)

    def _describe(self) -> None:
        info = EngineInfo(models=(MODEL,), context_tokens=self._scene.engine.max_model_len)
        self._door.described(info, self._now)

    def _card(self) -> None:
        taken = active(self._scene.faults, FaultKind.NEIGHBOUR, self._now) is not None
        self._door.card(card_at(self._now, taken=taken), self._now)
        self._at(self._now + CARD_S, self._card)

    def _look(self) -> None:
        self._at(self._now + SEEN_EVERY_S, self._look)
        if self._now <= self._scene.seconds:
            usage, waiting = 0.0, 0
            if self._engine is not None:
                self._engine.look(self._now)
                usage = self._engine.scheduler.usage_ratio
                waiting = len(self._engine.scheduler.waiting)
            self._run.points.append(Point(self._now, usage, waiting, self._door.budget(self._now)))
        if self._progress is not None:
            self._progress(len(self._run.calls) - self._open)

    # --- the engine dies ----------------------------------------------------------------------------

    def _engine_dies(self) -> None:
        self._remember_counters()
        self._engine = None
        lost, self._flying = self._flying, {}
        for call in lost.values():
            self._door.ended(call.id, call.told, self._now, finished=False, broken=True)
            if call.first_at is None:
                self._turned_away(call, {}, final=False)
            else:
                call.given_up = True
                self._settled()
        for bypass in self._bypass:
            bypass.lost()

    def _engine_starts(self) -> None:
        self._engine = VirtualEngine(self._scene.engine)
        self._telemetry.restarted(self._now)
        self._describe()

    def _remember_counters(self) -> None:
        if self._engine is None:
            return
        counters = self._engine.scheduler.counters
        self._run.preemptions += counters.preemptions
        self._run.prompt_tokens += counters.prompt_tokens
        self._run.computed_prompt_tokens += counters.computed_prompt_tokens
        self._run.cached_prompt_tokens += counters.prefix_hits
