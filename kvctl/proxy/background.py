"""The lease of a response that is generated in the background: it outlives the request that began it.

Law 1: one lease, ended once. The handler exchanges its handle for one of this kind. Whatever becomes of the
exchange, the lease ends only with a word that says that the engine is done; otherwise it is handed to the
watch on the engine (``proxy.watching``), which ends it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from kvctl.control.gatekeeper import Gatekeeper, LeaseHandle
from kvctl.core.claim import Claim
from kvctl.core.outcomes import EndReason
from kvctl.core.unseen import EngineWork
from kvctl.proxy.bodies import Parsed
from kvctl.proxy.told import END_OF, LONGEST_ID, Beginning, Told

T = TypeVar("T")

_BY_ITSELF = frozenset({EndReason.FINISHED, EndReason.CAPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a background lease belongs to.

    ``left``: called when the lease is to be watched: the response's name is known, its caller left, or the
    exchange is over. ``ended``: called when the lease has ended.
    """

    parsed: Parsed
    authorization: bytes  # header sent when the engine is asked for the response; b"": none
    left: Callable[["BackgroundLease"], None]
    ended: Callable[["BackgroundLease"], None]


class BackgroundLease(LeaseHandle):
    """A lease that is kept until the engine is done. ``sent``: the engine may have received the request."""

    __slots__ = ("_beginning", "_named", "_over", "_status", "attended", "begun", "course", "sent", "told_id")

    def __init__(
        self, course: Course, keeper: Gatekeeper, request_id: str, claim: Claim, waited_s: float | None
    ) -> None:
        super().__init__(keeper, request_id, claim, waited_s)
        self.course = course
        self.begun: Told | None = None  # as the engine told; None: it cannot be asked for the response
        self.told_id: Callable[[str], None] = lambda _id: None
        self.attended = True  # its exchange goes on
        self.sent = True
        self._named = asyncio.Event()  # or over
        self._over = asyncio.Event()
        self._status = ""  # as the answer told it
        self._beginning = Beginning(self._told, stream=course.parsed.stream)

    def reading(self, told_id: Callable[[str], None]) -> Beginning:
        """What reads the answer on the side; ``told_id`` is called with the response's name."""
        self.told_id = told_id
        return self._beginning

    def work(self) -> EngineWork:
        """What its gate knows of the engine's work."""
        return self._keeper.gate.work()

    def progress(self, tokens: int) -> None:
        """Nothing: a background lease advances by time, whoever reads the answer."""

    def end(
        self, reason: EndReason, *, output_tokens: int | None = None, prompt_tokens: int | None = None
    ) -> None:
        """The exchange ended; so does the lease, if the engine is done. Only the first call counts."""
        if self._done:
            return
        self._beginning.end()
        if self._status and reason in _BY_ITSELF and not self.course.parsed.stream:
            ended = END_OF.get(self._status)
        elif reason is EndReason.ENGINE_ERROR:
            ended = None if self.sent else reason
        else:
            told = reason in _BY_ITSELF and output_tokens is not None
            ended = reason if told or reason is EndReason.ENGINE_REFUSED else None
        if ended is None:
            self.course.left(self)
        else:
            self.over(ended, output_tokens=output_tokens, prompt_tokens=prompt_tokens)

    def over(
        self, reason: EndReason, *, output_tokens: int | None = None, prompt_tokens: int | None = None
    ) -> None:
        """End the lease: the engine is done with the response, as far as can be known."""
        if not self._done:
            super().end(reason, output_tokens=output_tokens, prompt_tokens=prompt_tokens)
            self._named.set()
            self._over.set()
            self.course.ended(self)

    async def carried(self, run: Coroutine[Any, Any, T], *, to_the_end: bool) -> T:
        """Run the exchange. That a client left is kept from the engine until the response has a name.

        ``to_the_end``: and afterwards too.
        """
        task = asyncio.create_task(self._attend(run), name="kvctl-background-answer")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not self._done:
                self.course.left(self)  # its answer may never come, and nobody waits for it any more
            await _let_go(task, self._over if to_the_end else self._named)
            raise

    async def _attend(self, run: Coroutine[Any, Any, T]) -> T:
        try:
            return await run
        finally:
            self.attended = False

    def _told(self, told: Told | None) -> None:
        if told is None:
            return
        if len(told.id) <= LONGEST_ID:
            self.told_id(told.id)
        self._status = told.status
        if told.askable:
            self.begun = told
        if self.course.parsed.stream and self.begun is not None:
            self._named.set()
            self.course.left(self)


def not_sent(lease: LeaseHandle) -> None:
    """Note that the engine certainly never got the request."""
    if isinstance(lease, BackgroundLease):
        lease.sent = False


async def _let_go(task: "asyncio.Task[Any]", free: asyncio.Event) -> None:
    """The client left: its exchange ends by itself, or by us once it is ``free``."""
    waiting = asyncio.create_task(free.wait(), name="kvctl-background-free")
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        task.cancel()
        await asyncio.wait({task, waiting})
        if not task.cancelled():
            task.exception()
