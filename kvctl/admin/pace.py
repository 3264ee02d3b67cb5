"""Bounds the share of the event loop that the admin side may take, however many callers ask for whatever.

Law 6: nothing slow on the loop. The data plane and the admin side share one loop. Every step of an admin
handler, from its first to the last byte of its answer, waits for a turn, one at a time, and pays for it with
the CPU time that it took: together they get ``SHARE`` of one CPU. A handler that has much to do awaits in
between (``asyncio.sleep(0)``), and does the next part in its next turn.

Probes, changes and readings wait in separate lines, served in turn: a flood in one leaves the others their
third. Within a line the connection that has had least goes first (start-time fair queueing, Goyal, Vin and
Cheng 1996), so that one who asks once is not behind a hundred who ask without a pause.
"""

import asyncio
import time
from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from typing import Any, ParamSpec, TypeVar

SHARE = 0.05  # of one CPU
BURST_S = 0.002  # CPU seconds that may be taken at once after a rest
QUANTUM_S = 0.005  # CPU seconds for which one answer keeps its place
SHORTEST_S = 0.001  # the resolution of the loop's timers

T = TypeVar("T")
P = ParamSpec("P")


class Line(IntEnum):
    """The three lines."""

    PROBE = 0
    CHANGE = 1
    READING = 2


class Flow:
    """What one connection has had so far in each line: CPU seconds, on that line's virtual clock."""

    __slots__ = ("had",)

    def __init__(self) -> None:
        self.had = [0.0] * len(Line)


class _Queue:
    """Those who wait in one line. ``virtual``: the tag of the one served last."""

    __slots__ = ("virtual", "waiting")

    def __init__(self) -> None:
        self.virtual = 0.0
        self.waiting: list[tuple[float, float, int, Seat, asyncio.Future[None]]] = []


class Seat:
    """One answer's place in a line."""

    __slots__ = ("flow", "granted", "had", "line", "tag", "used")

    def __init__(self, line: Line, flow: Flow, virtual: float) -> None:
        self.line = line
        self.flow = flow
        self.granted = False
        self.settle(virtual)

    def settle(self, virtual: float) -> None:
        """Take the place that is due now; among equals, the one that has had less is first."""
        self.had = self.flow.had[self.line]
        self.tag = max(virtual, self.had)
        self.used = 0.0

    def place(self, virtual: float) -> tuple[float, float]:
        """Its place for the next step: not before those who came when it was served last."""
        self.tag = max(self.tag, virtual)
        return self.tag, self.had

    def pay(self, seconds: float, virtual: float) -> None:
        """A step took ``seconds`` of CPU time."""
        self.used += seconds
        self.flow.had[self.line] = max(self.flow.had[self.line], self.tag) + seconds
        if self.used > QUANTUM_S:
            self.settle(virtual)


class Pace:
    """One for the whole admin side, on one event loop."""

    def __init__(
        self,
        share: float = SHARE,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """``clock`` and ``cpu`` give seconds: of the day, and of this thread's work."""
        self._share = share
        self._clock = clock
        self._cpu = cpu
        self._credit, self._credited_at = BURST_S, clock()
        self._queues = [_Queue() for _ in Line]
        self._last = Line.READING
        self._numbers = count()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._one_thread = asyncio.Lock()

    def seat(self, line: Line, flow: Flow) -> Seat:
        """A place for an answer."""
        return Seat(line, flow, self._queues[line].virtual)

    async def turn(self, seat: Seat) -> None:
        """Wait until it is this seat's turn; afterwards ``spent`` must be called, whatever happens."""
        turn = asyncio.get_running_loop().create_future()
        queue = self._queues[seat.line]
        heappush(queue.waiting, (*seat.place(queue.virtual), next(self._numbers), seat, turn))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if seat.granted:
                self.spent(seat, 0.0)
            raise

    def spent(self, seat: Seat, seconds: float) -> None:
        """The step is over."""
        seat.pay(seconds, self._queues[seat.line].virtual)
        self._credit -= seconds
        if seat.granted:
            seat.granted = self._busy = False
            self._next()

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in a thread, one at a time; its CPU time counts towards the share all the same."""

        def measured() -> tuple[float, T]:
            began = time.thread_time()
            result = function(*args, **kwargs)
            return time.thread_time() - began, result

        async with self._one_thread:
            seconds, result = await asyncio.to_thread(measured)
            self._credit -= seconds
            return result

    def step(self, seat: Seat, make: Callable[[Any], Any], given: object) -> Any:
        """Make one step of a coroutine, and pay for it. Raises what the coroutine raises."""
        began = self._cpu()
        try:
            return make(given)
        finally:
            self.spent(seat, self._cpu() - began)

    def _next(self) -> None:
        """Give the turn to the seat that is due, now or when the account allows."""
        if self._busy or self._timer is not None or not any(each.waiting for each in self._queues):
            return
        if (owed := self._owed()) > 0:
            pause = max(owed / self._share, SHORTEST_S)
            self._timer = asyncio.get_running_loop().call_later(pause, self._due)
            return
        while (found := self._first()) is not None:
            seat, turn = found
            if not turn.done():  # else its waiter has left
                self._busy = seat.granted = True
                turn.set_result(None)
                return

    def _due(self) -> None:
        self._timer = None
        self._next()

    def _owed(self) -> float:
        """CPU seconds that the share has yet to earn back."""
        now = self._clock()
        self._credit = min(BURST_S, self._credit + (now - self._credited_at) * self._share)
        self._credited_at = now
        return -self._credit

    def _first(self) -> tuple[Seat, "asyncio.Future[None]"] | None:
        """Whose turn it is: the first of the next line in which somebody stands."""
        for further in range(1, len(Line) + 1):
            line = Line((self._last + further) % len(Line))
            queue = self._queues[line]
            if queue.waiting:
                self._last = line
                tag, _, _, seat, turn = heappop(queue.waiting)
                queue.virtual = tag
                return seat, turn
        return None
