"""All leases of responses that are generated in the background, from their admission to their end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from kvctl import logs
from kvctl.control.gatekeeper import LeaseHandle
from kvctl.core.claim import Shape
from kvctl.core.events import Reject
from kvctl.core.outcomes import EndReason, RejectReason
from kvctl.core.retry import RetryHints
from kvctl.engines.base import Api
from kvctl.proxy import errors
from kvctl.proxy.background import BackgroundLease, Course
from kvctl.proxy.bodies import Parsed
from kvctl.proxy.errors import Answer
from kvctl.proxy.limits import BadRequest
from kvctl.proxy.planning import Reading
from kvctl.proxy.routes import Match
from kvctl.proxy.seams import Backend
from kvctl.proxy.watching import EngineWatch

log = logs.get("background")
T = TypeVar("T")

KEPT_WEIGHT = 64 * 1024  # bytes of a conversation's messages, to count exactly what goes on from it
_STORED = "/v1/responses/"
_CANCEL = "/cancel"


class Afterlife:
    """``most``: responses at once, 0: none. ``clock`` gives monotonic seconds.

    ``retry_after_max``: seconds, the longest that callers are told to wait for a place.
    """

    def __init__(self, most: int, clock: Callable[[], float], retry_after_max: float) -> None:
        self._most = most
        self._clock = clock
        self._retry = RetryHints(longest_s=retry_after_max)
        self._leases: set[BackgroundLease] = set()
        self._coming = 0  # requests that may become such
        self._watches: dict[Backend, EngineWatch] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def alone(self) -> int:
        """Those whose request is over."""
        return sum(not lease.attended for lease in self._leases)

    def forbidden(self, api: Api) -> Answer | None:
        """The answer to a request for the background where none is allowed; None: some are."""
        if self._most:
            return None
        message = (
            "background=true is not allowed on this server (its setting background_responses is 0). Nothing "
            "was generated. Send the request without background; stream=true keeps a long answer flowing. "
            "(parameter=background)"
        )
        return errors.bad_request(api, BadRequest(message=message, param="background"))

    def refusal(self, lease_id: str, shape: Shape) -> Reject | None:
        """What a request hears for which there is no place now; None: there is one.

        When to come back is told by the rate at which places became free.
        """
        if len(self._leases) + self._coming < self._most:
            return None
        now, prompt = self._clock(), sum(shape.prompts)
        return Reject(
            lease_id,
            RejectReason.BACKGROUND_RESPONSES,
            needed_tokens=prompt,
            prompt_tokens=prompt,
            retry_after_s=self._retry.after(1.0, self._retry.ends_per_s(now), now),
        )

    async def coming(self, verdict: Awaitable[T]) -> T:
        """The verdict on one that was not refused: while it is waited for, the request has its place here."""
        self._coming += 1
        try:
            return await verdict
        finally:
            self._coming -= 1

    def taken(self, lease: LeaseHandle, reading: Reading, headers: Mapping[str, str]) -> BackgroundLease:
        """The lease of a response that may outlive its request, as it is to be used from now on."""
        course = Course(
            parsed=_lighter(reading.parsed),
            authorization=headers.get("Authorization", "").encode("latin-1", "replace"),
            left=partial(self._left, reading.backend),
            ended=partial(self._ended, reading.backend),
        )
        self._retry.admitted()
        made = lease.give_to(partial(BackgroundLease, course))
        self._leases.add(made)  # what can fail came before: from here on nobody but ``made`` ends the lease
        self.idle.clear()
        return made

    def passed(self, match: Match) -> None:
        """A request of a passed route was answered: a response may have been cancelled by it."""
        path = match.path
        if path.startswith(_STORED) and path.endswith(_CANCEL):
            name = path.removeprefix(_STORED).removesuffix(_CANCEL)
            for watch in self._watches.values():
                watch.look_at(name)

    def let_go(self) -> None:
        """Nobody will watch any more: what is generated goes on, without a lease."""
        if not self._leases:
            return
        sentence = (
            f"still generated in the background: {len(self._leases)}; the engine goes on, and what it holds "
            "for them is seen from now on as unattributed"
        )
        logs.event(log, logging.WARNING, "background_left", sentence)
        for lease in tuple(self._leases):
            lease.over(EndReason.SHUTDOWN)

    async def close(self) -> None:
        """Let go of all, and end the watches."""
        self.let_go()
        for watch in self._watches.values():
            await watch.close()

    def _left(self, backend: Backend, lease: BackgroundLease) -> None:
        watch = self._watches.get(backend)
        if watch is None:
            watch = self._watches[backend] = EngineWatch(backend, self._clock)
        watch.watch(lease)

    def _ended(self, backend: Backend, lease: BackgroundLease) -> None:
        self._leases.discard(lease)
        self._retry.drained(1.0, self._clock())
        watch = self._watches.get(backend)
        if watch is not None:
            watch.forget(lease)
        if not self._leases:
            self.idle.set()


def _lighter(parsed: Parsed) -> Parsed:
    """Without a long conversation: many may be kept, for long."""
    begun = parsed.begun
    if begun is None or begun.weight <= KEPT_WEIGHT:
        return parsed
    return msgspec.structs.replace(parsed, begun=replace(begun, messages=None, weight=0))
