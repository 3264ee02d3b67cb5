"""One engine's gate, made usable from the event loop.

Law 1 ends here for the data plane: a ``LeaseHandle`` is a context manager that ends its lease exactly
once, with ``cancelled`` if its owner left without a word.
Law 2: ``admit`` hands the event to the gate and reads the verdict without an ``await`` between. One that the
gate lets wait is charged when the gate starts it, and whoever left meanwhile gives it back at once.
"""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from kvctl import logs
from kvctl.core.claim import Claim, Shape
from kvctl.core.events import (
    Abandoned,
    Admit,
    Arrived,
    Command,
    ConnectFailed,
    Ended,
    Event,
    Progressed,
    Reject,
)
from kvctl.core.gate import Gate
from kvctl.core.outcomes import EndReason

log = logs.get("control.gatekeeper")

VERDICTS = (Admit, Reject)
Observer = Callable[[Command], None]
Recorder = Callable[[Event, list[Command], float], None]


class LeaseHandle:
    """An admitted request's hold on the ledger. Use as a context manager; ``end`` it with the right word."""

    __slots__ = ("_done", "_keeper", "claim", "request_id", "waited_s")

    def __init__(
        self, keeper: "Gatekeeper", request_id: str, claim: Claim, waited_s: float | None = None
    ) -> None:
        self._keeper = keeper
        self._done = False
        self.request_id = request_id
        self.claim = claim
        self.waited_s = waited_s  # in the queue; None: it was let in at once

    @property
    def ended(self) -> bool:
        """Whether the lease is off the ledger."""
        return self._done

    def progress(self, tokens: int) -> None:
        """``tokens`` more output tokens were seen. After the end: ignored, the bytes are merely late."""
        if not self._done:
            self._keeper.progressed(self.request_id, tokens)

    def end(
        self, reason: EndReason, *, output_tokens: int | None = None, prompt_tokens: int | None = None
    ) -> None:
        """End the lease. The first word counts; later ones are ignored."""
        if not self._done:
            self._done = True
            self._keeper.handle(Ended(self.request_id, reason, output_tokens, prompt_tokens))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(EndReason.CANCELLED)


class Gatekeeper:
    """Feeds the gate and carries its commands to whoever observes (metrics, logs, events)."""

    def __init__(self, gate: Gate, clock: Callable[[], float], observers: Iterable[Observer] = ()) -> None:
        self.gate = gate
        self._clock = clock
        self._observers: list[tuple[Observer, tuple[type[Command], ...]]] = [(each, ()) for each in observers]
        self._audience: dict[type[Command], list[Observer]] = {}  # made as commands of a kind come
        self._recorders: list[Recorder] = []
        self._waiting: dict[str, asyncio.Future[LeaseHandle | Reject]] = {}

    def record(self, recorder: Recorder) -> None:
        """Show events with their commands and their time to ``recorder`` from now on.

        All but those of progress, which come with each piece of a stream and bring no command.
        """
        self._recorders.append(recorder)

    def observe(self, observer: Observer, *kinds: type[Command]) -> None:
        """Show commands of these kinds (none: of all) to ``observer`` from now on."""
        self._observers.append((observer, kinds))
        self._audience.clear()

    def progressed(self, request_id: str, tokens: int) -> None:
        """More output of a request was seen."""
        commands = self.gate.handle(Progressed(request_id, tokens), self._clock())
        if commands:
            self._tell(commands)

    def handle(self, event: Event) -> list[Command]:
        """Hand one event to the gate; returns its commands after the observers saw them."""
        now = self._clock()
        commands = self.gate.handle(event, now)
        for recorder in self._recorders:
            try:
                recorder(event, commands, now)
            except Exception:
                log.exception("a recorder failed; what the gate decided stands")
        self._tell(commands)
        return commands

    def _tell(self, commands: list[Command]) -> None:
        for command in commands:
            kind = type(command)
            audience = self._audience.get(kind)
            if audience is None:
                audience = [each for each, kinds in self._observers if not kinds or kind in kinds]
                self._audience[kind] = audience
            for observer in audience:
                try:
                    observer(command)
                except Exception:  # a lease is charged already: whoever asked must get it, to end it
                    log.exception("an observer failed; what the gate decided stands")
        if self._waiting:
            self._answer(commands)

    async def admit(
        self, request_id: str, shape: Shape, client_id: str = "", body_bytes: int = 0
    ) -> LeaseHandle | Reject:
        """The verdict on a counted request. ``request_id`` must be unique among open leases.

        Waits while the gate holds the request in its queue, with ``body_bytes`` of memory; cancelled, it is
        out of the queue at once.
        """
        for command in self.handle(Arrived(request_id, shape, client_id, body_bytes)):
            if isinstance(command, VERDICTS) and command.request_id == request_id:
                return self._verdict(command)
        return await self._wait(request_id)

    async def _wait(self, request_id: str) -> LeaseHandle | Reject:
        future: asyncio.Future[LeaseHandle | Reject] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self.handle(Abandoned(request_id))
            elif isinstance(verdict := future.result(), LeaseHandle):
                verdict.end(EndReason.CLIENT_GONE)  # it was let in, and nobody is there to hear of it
            raise
        finally:
            self._waiting.pop(request_id, None)

    def _answer(self, commands: list[Command]) -> None:
        for command in commands:
            if not isinstance(command, VERDICTS):
                continue
            future = self._waiting.pop(command.request_id, None)
            if future is None:
                continue
            verdict = self._verdict(command)
            if not future.done():
                future.set_result(verdict)
            elif isinstance(verdict, LeaseHandle):  # cancelled, and not yet told
                verdict.end(EndReason.CLIENT_GONE)

    def _verdict(self, command: Admit | Reject) -> LeaseHandle | Reject:
        if isinstance(command, Reject):
            return command
        return LeaseHandle(self, command.request_id, command.claim, command.waited_s)

    def connect_failed(self) -> None:
        """The data plane could not reach the engine."""
        self.handle(ConnectFailed())
