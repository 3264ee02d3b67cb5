"""The event loop of the tests: its clock stands still while the process does.

A machine may stand still for seconds. Then every deadline of the loop is past at once, though nobody had a
turn to keep it: a client that was about to send is late, an engine that was about to answer is silent. Here
time goes on only as far as the loop had turns in it; deadlines are then about who does not act, whatever the
machine does meanwhile. Other processes, and what reads another clock than the loop's, know nothing of it.
"""

import asyncio
import contextlib
import selectors
import time
from collections.abc import Awaitable, Callable
from selectors import SelectorKey

SLICE_S = 0.02  # the longest that the loop sleeps in one go
TURN_S = 0.001  # what the callbacks between two sleeps count at most
MOST_TRIES = 20  # of a scenario that the machine spoiled


class SteadyClock:
    """Monotonic seconds, of which no more pass than were granted beforehand."""

    def __init__(self) -> None:
        self._now = self._seen = time.monotonic()
        self._granted = TURN_S

    def __call__(self) -> float:
        """The time now."""
        seen = time.monotonic()
        passed = min(seen - self._seen, self._granted)
        self._seen = seen
        self._granted -= passed
        self._now += passed
        return self._now

    def grant(self, seconds: float) -> None:
        """From now on so much may pass, whatever was granted before."""
        self()
        self._granted = seconds


class _Slices(selectors.DefaultSelector):
    """Sleeps in slices, where nothing is to be done; each counts as long as it was meant to be."""

    def __init__(self, clock: SteadyClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        until = None if timeout is None else self._clock() + timeout
        while True:
            left = SLICE_S if until is None else until - self._clock()
            found = self._sleep(max(min(left, SLICE_S), 0.0))
            if found or (until is not None and self._clock() >= until):
                return found

    def _sleep(self, seconds: float) -> list[tuple[SelectorKey, int]]:
        self._clock.grant(TURN_S)
        found: list[tuple[SelectorKey, int]] = super().select(0)
        if not found and seconds:
            self._clock.grant(seconds)
            found = super().select(seconds)
            self._clock.grant(TURN_S)
        return found


class SteadyLoop(asyncio.SelectorEventLoop):
    """``asyncio``'s own loop with a steady clock."""

    def __init__(self) -> None:
        self._steady = SteadyClock()
        super().__init__(_Slices(self._steady))

    def time(self) -> float:
        """Seconds of the steady clock."""
        return self._steady()


async def in_time(scenario: Callable[[], Awaitable[None]], deadline_s: float) -> None:
    """Play ``scenario``; where it fails and the loop stood still for a good part of the deadline that it is
    about, once more. For tests that run on loops whose clock is not steady."""
    for _ in range(MOST_TRIES - 1):
        pauses: list[float] = []
        watching = asyncio.create_task(_note(pauses))
        try:
            return await scenario()
        except Exception:
            if max(pauses, default=0.0) < deadline_s / 4:
                raise
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
    return await scenario()


async def _note(pauses: list[float]) -> None:
    """How long the loop gave nobody a turn, again and again."""
    while True:
        before = time.monotonic()
        try:
            await asyncio.sleep(0.001)
        finally:
            pauses.append(time.monotonic() - before)
