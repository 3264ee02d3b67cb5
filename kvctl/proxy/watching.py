"""Watches what each engine generates in the background, and ends each lease when its response is over.

The engine is asked for each response by its name, one at a time and off every caller's path: soon after it
began, then once a second, more seldom where asking takes long or many are watched. A response that cannot be
asked for, or that seems to wait for ever, is judged by the engine's metrics page (``core.unseen``). A watch
is a task that lives while it has anything to watch; all are cancelled and awaited on ``close``.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvctl import logs
from kvctl.core.outcomes import EndReason
from kvctl.core.unseen import Unseen
from kvctl.proxy.asking import ask
from kvctl.proxy.background import BackgroundLease
from kvctl.proxy.dialects import Findings, take_usage
from kvctl.proxy.jsonbody import LARGE
from kvctl.proxy.response import Headers
from kvctl.proxy.seams import Backend
from kvctl.proxy.told import END_OF, LIVES, Told, read_told

log = logs.get("background")

FIRST_LOOK_S = 0.2
LOOK_S = 1.0
SLOWER = 1.5  # from one look to the next
BUSY_SHARE = 20  # a look may take a twentieth of the time between two
LONGEST_S = 30.0  # between two looks
LOOKS_PER_S = 10.0  # at one engine
ASK_TIMEOUT_S = 5.0
MOST_BYTES = 32 * 1024 * 1024  # of a response
MISSES = 20  # in a row: each of several API servers of one engine may know only its own responses

_PATH = b"/v1/responses/"
_NEVER_TOLD = {
    EndReason.ENGINE_FORGOT: "the engine does not know it any more",
    EndReason.ENGINE_IDLE: "the engine never told its end, and holds no request",
    EndReason.OVERDUE: "the engine never told its end, which would have come long ago at its pace",
}


@dataclass(slots=True, eq=False, kw_only=True)
class _Watched:
    """One response. ``next_at`` and ``pause`` in seconds; ``misses``: looks in a row that did not find it."""

    lease: BackgroundLease
    unseen: Unseen
    headers: Headers
    next_at: float
    name: str = ""  # it told none that can be asked for
    pause: float = FIRST_LOOK_S
    misses: int = 0
    found: bool = False  # the engine knew it


class EngineWatch:
    """The watch on one engine. ``clock`` gives monotonic seconds."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._clock = clock
        self._watched: dict[BackgroundLease, _Watched] = {}
        self._by_name: dict[str, list[_Watched]] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def watch(self, lease: BackgroundLease) -> None:
        """Look after a lease from now on; one whose name was not known may have told it since."""
        now, known = self._clock(), self._watched.get(lease)
        if known is not None:
            self._name(known, now)
            return
        entry = _Watched(
            lease=lease,
            unseen=Unseen(now, max(lease.claim.outputs), turns=lease.course.parsed.turns),
            headers=self._headers(lease),
            next_at=now + FIRST_LOOK_S,
        )
        self._watched[lease] = entry
        self._name(entry, now)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"kvctl-background-{self._backend.name}")
        self._news.set()

    def forget(self, lease: BackgroundLease) -> None:
        """The lease has ended."""
        entry = self._watched.pop(lease, None)
        if entry is None:
            return
        if entry.name:
            same = self._by_name[entry.name]
            same.remove(entry)
            if not same:
                del self._by_name[entry.name]
        self._news.set()

    def look_at(self, name: str) -> None:
        """Something was done to the response of that name: look at once."""
        for entry in self._by_name.get(name, ()):
            entry.next_at, entry.pause = self._clock(), FIRST_LOOK_S
            self._news.set()

    async def close(self) -> None:
        """Watch no more; leases that are left stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _headers(self, lease: BackgroundLease) -> Headers:
        """With kvctl's own key for the engine if it has one, else with the caller's."""
        own = self._backend.authorization
        key = own.encode("latin-1", "replace") if own is not None else lease.course.authorization
        plain = [(b"Accept", b"application/json"), (b"Accept-Encoding", b"identity")]
        return [*plain, (b"Authorization", key)] if key else plain

    def _name(self, entry: _Watched, now: float) -> None:
        """Take in the response's name, once known; two of one name cannot be told apart by asking."""
        if entry.name or entry.lease.begun is None:
            return
        entry.name, entry.next_at, entry.pause = entry.lease.begun.id, now + FIRST_LOOK_S, FIRST_LOOK_S
        self._news.set()
        same = self._by_name.setdefault(entry.name, [])
        same.append(entry)
        for each in same if len(same) > 1 else ():
            self._doubt(each, "its name was given twice")

    def _doubt(self, entry: _Watched, why: str) -> None:
        """Ask for it no more: the engine's answer is not, or may not be, about this response."""
        if entry.lease.begun is not None:
            request = entry.lease.request_id
            sentence = f"background response of request {request}: {why}; the engine's page judges its end"
            logs.event(log, logging.WARNING, "background_doubted", sentence)
            entry.lease.begun = None

    # --- the looks ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._watched:
            entry = min(self._watched.values(), key=lambda each: each.next_at)
            left = entry.next_at - self._clock()
            if left > 0:
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._news.wait()
                continue
            await self._look(entry)

    async def _look(self, entry: _Watched) -> None:
        began = self._clock()
        try:
            await self._judge(entry, began)
        except Exception:
            log.exception("a background response could not be looked at")
        took = self._clock() - began
        entry.pause = min(entry.pause * SLOWER, LOOK_S)
        crowd = len(self._watched) / LOOKS_PER_S
        entry.next_at = began + took + min(max(entry.pause, crowd, took * BUSY_SHARE), LONGEST_S)

    async def _judge(self, entry: _Watched, now: float) -> None:
        lease, unseen = entry.lease, entry.unseen
        must_be = unseen.look(lease.work(), now)
        status, document = (0, b"") if lease.begun is None else await self._ask(entry, lease.begun)
        if lease.ended:
            return
        if lease.begun is None:
            must_be = EndReason.ENGINE_FORGOT if unseen.restarted else must_be
        elif status == 404:
            must_be = self._missed(entry) or must_be
        elif status == 200 and await self._told(entry, document):
            return
        if must_be is not None:
            self._given_up(lease, must_be)

    def _missed(self, entry: _Watched) -> EndReason | None:
        """The engine does not know it. If it never did, it may keep responses in some way unknown here."""
        entry.misses += 1
        if entry.unseen.restarted or (entry.found and entry.misses >= MISSES):
            return EndReason.ENGINE_FORGOT
        if entry.misses >= MISSES:
            self._doubt(entry, "the engine never knew it")
        return None

    async def _told(self, entry: _Watched, document: bytes) -> bool:
        """Read what the engine says of it; returns whether it is over."""
        lease, begun = entry.lease, entry.lease.begun
        entry.misses = 0
        small = len(document) <= LARGE
        told = read_told(document) if small else await asyncio.to_thread(read_told, document)
        if told is None or begun is None:
            return False
        entry.found = True
        if told.status not in LIVES and not told.is_same(begun):
            self._doubt(entry, "the engine tells of another one of its name")
            return False
        if (reason := END_OF.get(told.status)) is None:
            return False
        found, parsed, reader = Findings(), lease.course.parsed, self._backend.reader
        if told.usage is not None:
            take_usage(found, told.usage)
        lease.over(reason, output_tokens=found.output_tokens, prompt_tokens=found.prompt_tokens)
        if reason in (EndReason.FINISHED, EndReason.CAPPED):
            reader.learn(parsed, found.prompt_tokens)
            await reader.remember(parsed, document)
        return True

    async def _ask(self, entry: _Watched, begun: Told) -> tuple[int, bytes]:
        """Status and body; status 0: nothing usable came. After a miss another API server is asked next."""
        headers = [*entry.headers, (b"Connection", b"close")] if entry.misses else entry.headers
        target = _PATH + begun.id.encode()
        return await ask(
            self._backend.upstream, target, headers, most_bytes=MOST_BYTES, timeout_s=ASK_TIMEOUT_S
        )

    def _given_up(self, lease: BackgroundLease, reason: EndReason) -> None:
        sentence = (
            f"the lease of a background response (request {lease.request_id}) is ended: {_NEVER_TOLD[reason]}"
        )
        logs.event(log, logging.WARNING, "background_ended", sentence, reason=reason)
        lease.over(reason)
