"""Long prompts at a steady rate, from a process of their own: ``python -m tests.bench.longprompts``.

Who builds and writes bodies of half a megabyte must not share a loop with who watches streams. Each line of
standard input is ``PORT RATE COUNT``; a line of JSON answers it: the seconds that each prompt took.
"""

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop

from tests.bench.dataplane.client import connect, request
from tests.bench.dataplane.engine import MODEL

TOKENS, RATE = 100_000, 5.0
WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "from"),
    *("all", "that", "it", "has", "seen", "there"),
)
_LETTERS = sum(map(len, WORDS)) / len(WORDS) + 1  # and the space behind a word


def elsewhere(pid: int = 0) -> bool:
    """Let a process go first, as if it had a machine of its own; False: that is not allowed here.

    What it starts is scheduled as usual.
    """
    policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    try:
        os.sched_setscheduler(pid, policy, os.sched_param(1))
    except PermissionError:
        return False
    return True


class Book:
    """Long texts of simple words, each a token to most tokenizers. No two are cut alike."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._text = " ".join(self._dice.choices(WORDS, k=4 * TOKENS))

    def passage(self) -> str:
        """Some 100,000 words from anywhere: nothing of it is known when it comes."""
        size = int(TOKENS * _LETTERS)
        start = self._dice.randrange(len(self._text) - size)
        return self._text[start : start + size]


def long_prompt(text: str) -> bytes:
    """A request with such a text."""
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8}
    return request("/v1/chat/completions", json.dumps(body).encode())


class Sender:
    """The process that sends."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def send(self, port: int, seconds: float, rate: float = RATE) -> list[float]:
        """``rate`` prompts a second for so long; seconds of each. Raises RuntimeError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{port} {rate} {int(rate * seconds)}\n".encode())
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the sender of long prompts ended")
        return list(map(float, json.loads(line)))


@asynccontextmanager
async def sender() -> AsyncIterator[Sender]:
    """Until the block is left."""
    words = (sys.executable, "-m", "tests.bench.longprompts")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    try:
        yield Sender(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _send(port: int, rate: float, count: int, book: Book) -> list[float]:
    calls = [await connect(port) for _ in range(count)]
    started, tasks = time.perf_counter(), []
    for place, call in enumerate(calls):
        prompt = long_prompt(book.passage())
        await asyncio.sleep(max(started + place / rate - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(call.ask(prompt)))
    taken = await asyncio.gather(*tasks)
    for call in calls:
        call.close()
    return taken


def _main() -> None:
    book = Book(os.getpid())
    for line in sys.stdin:
        port, rate, count = line.split()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            taken = runner.run(_send(int(port), float(rate), int(count), book))
        sys.stdout.write(json.dumps([round(seconds, 4) for seconds in taken]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
