"""Where NVML is called: in a thread of this process, or in a process of its own. The same questions to both.

Law 6: nothing slow on the loop. Every question has a deadline; a worker that lets it pass is left behind by
whoever asked, and takes itself away when its call returns at last.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from kvctl.gpu.base import GpuReading
from kvctl.gpu.faults import CardEvent
from kvctl.gpu.session import NvmlSession
from kvctl.gpu.thread import CallThread

Events = tuple[CardEvent, ...] | None  # None: the driver tells nothing of itself


class Isolation(StrEnum):
    """Where NVML is called."""

    THREAD = "thread"  # a crash inside NVML ends kvctl with it
    PROCESS = "process"  # a crash ends a process that is started again


class WorkerGoneError(Exception):
    """The worker ended without an answer."""


class Worker(Protocol):
    """One NVML session. Methods raise TimeoutError after ``timeout_s``, and WorkerGoneError."""

    @property
    def alive(self) -> bool:
        """Whether it still takes a thread or a process."""
        ...

    async def read(self, timeout_s: float) -> GpuReading:
        """One reading."""
        ...

    async def wait(self, wait_ms: int, timeout_s: float) -> Events:
        """What the driver tells within ``wait_ms``."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Give the driver back; then it is of no more use."""
        ...

    def leave(self) -> None:
        """It does not answer: nobody asks it again."""
        ...


class ThreadWorker:
    """The session in a thread."""

    def __init__(self, session: NvmlSession) -> None:
        self._thread = CallThread(session, NvmlSession.close, name="kvctl-nvml")

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.alive

    async def read(self, timeout_s: float) -> GpuReading:
        """One reading."""
        return await self._thread.call(NvmlSession.read, timeout_s)

    async def wait(self, wait_ms: int, timeout_s: float) -> Events:
        """What the driver tells within ``wait_ms``."""
        return await self._thread.call(lambda session: session.wait(wait_ms), timeout_s)

    async def close(self, timeout_s: float) -> None:
        """Give the driver back and end the thread."""
        try:
            await self._thread.call(NvmlSession.close, timeout_s)
        finally:
            self._thread.leave()

    def leave(self) -> None:
        """The thread ends once what it is doing has returned."""
        self._thread.leave()


def arguments(selectors: Sequence[str]) -> list[str]:
    """The command line of a worker process, behind the interpreter's own. ``-P``: not from this folder."""
    return ["-P", "-m", "kvctl.gpu.child", *selectors]
