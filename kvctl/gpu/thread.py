"""A daemon thread that owns one object and runs its blocking calls, one at a time.

Not the loop's executor: a call that never returns would hold one of its places for ever and block the
interpreter's exit. Such a thread is left to itself; when its call returns at last, it cleans up and ends.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")

_Job = tuple[Callable[[Any], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class CallThread(Generic[S]):
    """Runs calls on ``state``; ``at_end(state)`` is called in the thread before it ends."""

    def __init__(self, state: S, at_end: Callable[[S], None], *, name: str) -> None:
        self.state = state
        self._at_end = at_end
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    async def call(self, function: Callable[[S], T], timeout_s: float) -> T:
        """``function(state)`` in the thread. Raises TimeoutError when it takes longer; it then still runs."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((function, future, loop))
        return await asyncio.wait_for(future, timeout_s)

    def leave(self) -> None:
        """Let the thread end once its current call has returned."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, future, loop = job
            self._deliver(future, loop, self._outcome(function))
        self._at_end(self.state)

    def _outcome(self, function: Callable[[Any], Any]) -> tuple[Any, BaseException | None]:
        try:
            return function(self.state), None
        except Exception as error:  # noqa: BLE001 - belongs to the caller, not to this thread
            return None, error

    @staticmethod
    def _deliver(
        future: "asyncio.Future[Any]",
        loop: asyncio.AbstractEventLoop,
        outcome: tuple[Any, BaseException | None],
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
            loop.call_soon_threadsafe(_settle, future, *outcome)


def _settle(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if future.done():  # nobody waits any more
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
