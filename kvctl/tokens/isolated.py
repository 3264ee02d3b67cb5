"""The model's own tokenizer and template, in a process of their own.

Law 8: degraded is a state. Native code that crashes on a text takes that process with it, not the daemon:
what it was counting is bounded by bytes, and a new process takes over. A process that is not done long after
the deadline is killed and replaced likewise.

Nothing of the tokenizer is loaded here, so memory is used once, and whatever holds the GIL there does not
stall the loop here. A hand-over costs about a fifth of a millisecond.
"""

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from kvctl.tokens.begin import own_key
from kvctl.tokens.files import TokenizerError
from kvctl.tokens.repeated import CHAT_KEYS
from kvctl.tokens.source import OwnTokenizer, Tally, Uncountable, Why
from kvctl.tokens.worker import COUNTS, FAILED, LENGTH, as_counts, message, read_message

START_TIMEOUT_S = 120.0
AGAIN_S = 1.0  # between the end of a process and the start of the next
PATIENCE = 4  # deadlines after which a count that is not done ends the process
WAITING_PER_WORKER = 32
WAITING_BYTES = 256 * 1024 * 1024


class Child:
    """One process, ready to count."""

    def __init__(self, folder: Path, max_chars: int, workers: int, *, turned: bool = False) -> None:
        """Starts it and waits until its files are loaded. Raises TokenizerError.

        ``turned``: they are loaded the other way.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "kvctl.tokens.worker", str(folder)]
        command += [str(max_chars), str(workers)]
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        self.channel = ours
        ours.settimeout(START_TIMEOUT_S)
        try:
            ours.sendall(message((own_key(), turned)))
            with ours.makefile("rb") as reader:
                _, (word, told), _ = read_message(reader.read)
        except (EOFError, OSError) as error:
            self.end()
            raise TokenizerError(f"the process that counts tokens did not start ({error!r})") from error
        if word != COUNTS:
            self.end()
            raise TokenizerError(told)
        ours.setblocking(False)
        self.described: tuple[int | None, list[str]] = told

    def end(self) -> None:
        """Kill it, whatever it is doing."""
        self.channel.close()
        self.process.kill()
        self.process.wait()


class IsolatedCounter(OwnTokenizer):
    """A source of exact counts from a model's files, read by another process.

    ``workers``: its threads. ``timeout_s``: how long a caller waits for a count, queueing included.
    """

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 2,
        timeout_s: float = 5.0,
        max_chars: int = 16 * 1024 * 1024,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        """Blocks while the files are loaded. Raises TokenizerError."""
        self._start = (folder, max_chars, workers)
        self._child: Child | None = Child(*self._start)
        super().__init__(*self._child.described)
        self._timeout_s = timeout_s
        self._most_waiting = workers * WAITING_PER_WORKER
        self._most_bytes = waiting_bytes
        self._held = 0
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._tally, self._keeps = Tally(), True
        self._starting: asyncio.Future[Child] | None = None
        self._turned = False
        self._listening = asyncio.Event()
        self.crashes = 0

    async def text(self, model: str, prompts: Sequence[str], *, add_special_tokens: bool) -> tuple[int, ...]:
        """Tokens of each prompt. Raises Uncountable."""
        del model
        view = (self.context(), self.begins())
        return await self._count("texts", (list(prompts), add_special_tokens, view), sum(map(len, prompts)))

    async def chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> int:
        """Prompt tokens of a chat body. Raises Uncountable."""
        del model
        shown = {key: body[key] for key in CHAT_KEYS if key in body}
        (count,) = await self._count("chat", (shown, (self.context(), self.begins())), body_bytes)
        return count

    async def other_way(self) -> bool:
        """Load the tokenizer as other versions of the engine's libraries do, or back again."""
        try:
            (turned,) = await self._count("other_way", (), 0)
        except Uncountable:
            return False
        self._turned ^= bool(turned)
        return bool(turned)

    @property
    def tally(self) -> Tally:
        """The work of the segment cache so far, in the current process."""
        return self._tally

    @property
    def keeps(self) -> bool:
        """Whether counts of segments are cached."""
        return self._keeps

    async def close(self) -> None:
        """End the process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._starting is not None:
            with contextlib.suppress(TokenizerError, OSError):
                self._child = await self._starting
        if self._child is not None:
            await asyncio.to_thread(self._child.end)

    # --- one question -------------------------------------------------------------------------------

    async def _count(self, kind: str, given: tuple[Any, ...], size: int) -> tuple[int, ...]:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._attend(), name="kvctl-tokens")
        if self._writer is None and (self._child is None or not await self._ready()):
            raise Uncountable(Why.BUSY, "the process that counts is starting")
        if len(self._asked) >= self._most_waiting or (self._asked and self._held + size > self._most_bytes):
            raise Uncountable(Why.BUSY)
        word, found = await self._ask(kind, given, size)
        if word == COUNTS:
            return as_counts(found)
        raise Uncountable(Why(found[0]), found[1])

    async def _ready(self) -> bool:
        """Wait for a process that was just started; returns whether it can be asked."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._listening.wait(), self._timeout_s)
        return self._writer is not None

    async def _ask(self, kind: str, given: tuple[Any, ...], size: int) -> tuple[str, Any]:
        loop = asyncio.get_running_loop()
        number, future = next(self._numbers), cast("asyncio.Future[tuple[str, Any]]", loop.create_future())
        try:
            sent = message((number, kind, given))
        except ValueError as error:
            raise Uncountable(Why.SHAPE, str(error)) from error
        assert self._writer is not None  # noqa: S101 - looked at by the caller, without a pause since
        self._writer.write(sent)
        self._asked[number] = future
        self._held += size
        self.waiting = len(self._asked)
        overdue = loop.call_later(self._timeout_s * PATIENCE, self._overdue, number)
        future.add_done_callback(lambda _: self._answered(number, size, overdue))
        done, _ = await asyncio.wait((future,), timeout=self._timeout_s)
        if not done:
            raise Uncountable(Why.TIMEOUT)
        return future.result()

    def _answered(self, number: int, size: int, overdue: asyncio.TimerHandle) -> None:
        overdue.cancel()
        self._asked.pop(number, None)
        self._held -= size
        self.waiting = len(self._asked)

    def _overdue(self, number: int) -> None:
        if number in self._asked and self._child is not None:
            self._child.process.kill()  # the end of its socket triggers the rest

    # --- the process --------------------------------------------------------------------------------

    async def _attend(self) -> None:
        """Read answers; when the process ends, start another."""
        while True:
            if self._child is not None:
                await self._listen(self._child)
            await asyncio.sleep(AGAIN_S)
            starting = asyncio.to_thread(Child, *self._start, turned=self._turned)
            self._starting = asyncio.ensure_future(starting)
            with contextlib.suppress(TokenizerError, OSError):
                self._child = await asyncio.shield(self._starting)
            self._starting = None

    async def _listen(self, child: Child) -> None:
        reader, self._writer = await asyncio.open_connection(sock=child.channel)
        self._listening.set()
        try:
            while True:
                size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
                self._heard(LENGTH.pack(size) + await reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError):
            self._lost(child)
        finally:
            self._listening.clear()
            self._writer.close()
            self._writer = None

    def _heard(self, data: bytes) -> None:
        parts = iter((data[: LENGTH.size], data[LENGTH.size :]))
        number, found, (self._keeps, *tally) = read_message(lambda _: next(parts))
        self._tally = Tally(*tally)
        future = self._asked.get(number)
        if future is not None and not future.done():
            future.set_result(found)

    def _lost(self, child: Child) -> None:
        child.end()
        self._child = None
        self.crashes += 1
        asked = len(self._asked)
        sentence = (
            f"the process that counts tokens ended ({child.process.returncode}) over {asked} counts; "
            "they are bounded by bytes, and another is started"
        )
        self.lost(sentence)
        for future in list(self._asked.values()):
            if not future.done():
                future.set_result((FAILED, (Why.CRASHED.value, "the process that counts ended")))
