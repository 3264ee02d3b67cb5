"""The NVML session in a process of its own, as its parent sees it.

The process inherits three descriptors (its two pipes, and stderr for what the driver's library prints) and no
setting of kvctl's: no key is in its environment. One that does not answer is killed; one that cannot be
killed, because it hangs inside the kernel, is left, and counted by whoever starts the next.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from kvctl.gpu.base import GpuReading
from kvctl.gpu.wire import LINE_MAX, Answer, Question, answer, written
from kvctl.gpu.worker import Events, WorkerGoneError, arguments

log = logging.getLogger("kvctl.gpu")

START_S = 10.0  # for an interpreter to start on a busy machine
_KEPT_BACK = ("KVCTL_", "NOTIFY_", "LISTEN_", "WATCHDOG_", "CREDENTIALS_")


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The part of kvctl's environment that concerns a driver."""
    return {name: value for name, value in own.items() if not name.startswith(_KEPT_BACK)}


class ProcessWorker:
    """Started with the first question; ``read`` and ``wait`` as ``kvctl.gpu.worker.Worker`` has them."""

    def __init__(self, selectors: Sequence[str]) -> None:
        self._selectors = tuple(selectors)
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()  # set when the process runs, or never will

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self._listening is not None and not self._listening.done()

    @property
    def pid(self) -> int | None:
        """The process id; None: not started."""
        return None if self._process is None else self._process.pid

    async def read(self, timeout_s: float) -> GpuReading:
        """One reading."""
        found = (await self._ask("read", timeout_s)).reading
        if found is None:
            raise WorkerGoneError("an answer without a reading")
        return found

    async def wait(self, wait_ms: int, timeout_s: float) -> Events:
        """Messages of the driver within ``wait_ms``."""
        return (await self._ask("wait", timeout_s, wait_ms)).events

    async def close(self, timeout_s: float) -> None:
        """Release the driver and end the process; after ``timeout_s`` it is killed."""
        if self._process is None:
            return
        try:
            await self._ask("close", timeout_s)
        except (TimeoutError, WorkerGoneError):
            pass
        finally:
            self.leave()
        if self._listening is not None:
            await asyncio.wait([self._listening], timeout=timeout_s)
            self._listening.cancel()  # of what cannot be killed
            await asyncio.gather(self._listening, return_exceptions=True)

    def leave(self) -> None:
        """Kill the process. Its end is awaited in the background."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _ask(self, what: str, timeout_s: float, wait_ms: int = 0) -> Answer:
        """Raises TimeoutError, or WorkerGoneError if it ended. An interpreter's start is timed separately."""
        async with asyncio.timeout(START_S):
            process = self._process or await self._start()
            await self._begun.wait()
        async with asyncio.timeout(timeout_s):
            if process.stdin is None or not self.alive:
                raise WorkerGoneError(self._end())
            number = next(self._numbers)
            future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._pending[number] = future
            try:
                process.stdin.write(written(Question(number=number, what=what, wait_ms=wait_ms)))
                return await future
            finally:
                self._pending.pop(number, None)

    async def _start(self) -> asyncio.subprocess.Process:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments(self._selectors),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment(os.environ),
            limit=LINE_MAX,
        )
        self._listening = asyncio.get_running_loop().create_task(self._listen(process), name="kvctl-nvml")
        return process

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Hand answers to those who asked, until there are no more and the process has ended."""
        try:
            while process.stdout is not None and (line := await process.stdout.readline()):
                self._take(answer(line))
        except ValueError:  # a line that is no answer, or too long for one
            log.warning("the NVML process answered with something else")
            self.leave()
        finally:
            self._begun.set()
            if process.stdin is not None:
                process.stdin.close()
        await process.wait()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerGoneError(self._end()))

    def _take(self, got: Answer) -> None:
        self._begun.set()  # its first line says that it runs, and answers nobody
        for level, text in got.said:
            log.log(level, "%s", text)
        future = self._pending.get(got.number)
        if future is not None and not future.done():
            future.set_result(got)

    def _end(self) -> str:
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "the NVML process has closed its pipe"
        return (
            f"the NVML process was ended by signal {-code}"
            if code < 0
            else f"the NVML process ended ({code})"
        )
