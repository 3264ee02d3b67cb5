"""One engine's gate, made usable from the event loop.

Law 1 ends here for the data plane: a ``LeaseHandle`` is a context manager that ends its lease exactly
once, with ``cancelled`` if its owner left without a word.
A stream's first token is told to its gate at once, those that follow together with the others' before
anything else is: whoever asks the gate finds every token counted, and an event of a stream costs an addition.
What is written down of requests (records, counts) is written of several at a time: code that runs often in a
row costs less than between other code. Whoever reads it calls ``settle`` first.
Law 2: ``admit`` hands the event to the gate and reads the verdict without an ``await`` between. One that the
gate lets wait is charged when the gate starts it, and whoever left meanwhile gives it back at once.
"""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar

from kvctl import logs
from kvctl.core.claim import Claim, Shape
from kvctl.core.events import (
    Abandoned,
    Admit,
    Arrived,
    Command,
    ConnectFailed,
    DrainChanged,
    Ended,
    Event,
    LeaseEnded,
    Progressed,
    Reject,
)
from kvctl.core.gate import Gate
from kvctl.core.outcomes import EndReason, RejectReason
from kvctl.core.snapshot import Moment

log = logs.get("control.gatekeeper")

VERDICTS = (Admit, Reject)
_FREQUENT = frozenset({Admit, Reject, LeaseEnded})  # requests bring these; all else is written at once
_WRITTEN_LATE = 64  # events that may wait for being written down
_MOST_LATE = 128  # and at an arrival, whose answer must not wait for them: an end comes before, as a rule
Observer = Callable[[Command], None]
Interest = tuple[Observer, tuple[type[Command], ...]]  # an observer, and what kinds it wants; (): all
Recorder = Callable[[Event, list[Command], float], None]


class LeaseHandle:
    """An admitted request's hold on the ledger. Use as a context manager; ``end`` it with the right word."""

    __slots__ = (
        "_begun", "_done", "_keeper", "claim", "clock", "moved_at", "request_id", "untold", "waited_s",
    )  # fmt: skip

    def __init__(
        self, keeper: "Gatekeeper", request_id: str, claim: Claim, waited_s: float | None = None
    ) -> None:
        self._keeper = keeper
        self.clock = keeper.clock
        self._begun = self._done = False
        self.untold = 0  # tokens that the gate has not heard of
        self.moved_at = 0.0  # when the last of them came
        self.request_id = request_id
        self.claim = claim
        self.waited_s = waited_s  # in the queue; None: it was let in at once

    @property
    def ended(self) -> bool:
        """Whether the lease is off the ledger."""
        return self._done

    def progress(self, tokens: int) -> None:
        """``tokens`` more output tokens were seen. After the end: ignored, the bytes are merely late."""
        if self.untold:  # nearly always; it is not over then: its end tells its gate of them
            self.untold += tokens
            self.moved_at = self.clock()
        elif self._done:
            return
        elif self._begun:
            self.untold = tokens
            self.moved_at = self.clock()
            self._keeper.moved.append(self)
        else:
            self._begun = True
            self._keeper.progressed(self.request_id, tokens)

    def take_untold(self) -> int:
        """The tokens that its gate is now told of."""
        untold, self.untold = self.untold, 0
        return untold

    def end(
        self, reason: EndReason, *, output_tokens: int | None = None, prompt_tokens: int | None = None
    ) -> None:
        """End the lease. The first word counts; later ones are ignored."""
        if not self._done:
            self._done = True
            self._keeper.handle(Ended(self.request_id, reason, output_tokens, prompt_tokens))

    def give_to(self, make: "Callable[[Gatekeeper, str, Claim, float | None], Handle]") -> "Handle":
        """Another handle for the lease, which alone ends it from now on; without one, this one still does."""
        made = make(self._keeper, self.request_id, self.claim, self.waited_s)
        self._done = True
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._done:
            self.end(EndReason.CANCELLED)


Handle = TypeVar("Handle", bound=LeaseHandle)


class Gatekeeper:
    """Feeds the gate and carries its commands to whoever observes (metrics, logs, events).

    Observers hear of a command at once, recorders and those that ``count`` some requests later. ``hurry``:
    those too at once, since somebody reads along.
    """

    def __init__(self, gate: Gate, clock: Callable[[], float], observers: Iterable[Observer] = ()) -> None:
        self._gate = gate
        self.clock = clock
        self.moved: list[LeaseHandle] = []  # with tokens that the gate has not heard of
        self._observers: list[Interest] = [(each, ()) for each in observers]
        self._audience: dict[type[Command], list[Observer]] = {}  # made as commands of a kind come
        self._recorders: list[Recorder] = []
        self._counting: dict[type[Command], list[Observer]] = {}
        self._late: list[tuple[Event, list[Command], float, Moment]] = []
        self._shown: Moment | None = None  # of the event that recorders look at
        self.hurry = self._retired = False
        self._waiting: dict[str, asyncio.Future[LeaseHandle | Reject]] = {}

    @property
    def gate(self) -> Gate:
        """The gate, as everything that came so far leaves it."""
        if self.moved:
            self._catch_up()
        return self._gate

    def _catch_up(self) -> None:
        moved, self.moved = self.moved, []
        moved.sort(key=_moved_at)
        for lease in moved:
            event = Progressed(lease.request_id, lease.take_untold())
            try:
                commands = self._gate.handle(event, lease.moved_at)
            except Exception:  # what comes next may be the end of another's lease: it must be heard
                log.exception("the tokens of a lease could not be counted; it goes on")
                continue
            if commands:
                self._tell(commands)

    def record(self, recorder: Recorder) -> None:
        """Show events with their commands and their time to ``recorder`` from now on.

        All but those of progress, which come with each piece of a stream and bring no command.
        """
        self._recorders.append(recorder)

    def observe(self, observer: Observer, *kinds: type[Command]) -> None:
        """Show commands of these kinds (none: of all) to ``observer`` from now on."""
        self._observers.append((observer, kinds))
        self._audience.clear()

    def count(self, observer: Observer, *kinds: type[Command]) -> None:
        """Show commands of these kinds to ``observer`` from now on, when there are some together."""
        for kind in kinds:
            self._counting.setdefault(kind, []).append(observer)

    def moment(self) -> Moment:
        """What the gate weighed against when the event came that recorders are shown; else now."""
        return self.gate.moment() if self._shown is None else self._shown

    def settle(self) -> None:
        """Write down all that happened."""
        late, self._late = self._late, []
        recorders, counting = self._recorders, self._counting
        for event, commands, now, self._shown in late:
            for recorder in recorders:
                try:
                    recorder(event, commands, now)
                except Exception:
                    log.exception("a recorder failed; what the gate decided stands")
            for command in commands:
                if (audience := counting.get(type(command))) is not None:
                    _show(command, audience)
        self._shown = None

    def retire(self) -> None:
        """Nobody comes in any more, and no tick: leases end here, each is written down as it does.

        Who waits is refused now: without ticks no deadline would pass.
        """
        self._retired = True
        self.handle(DrainChanged(draining=True, reason=RejectReason.RANK_GONE))

    def progressed(self, request_id: str, tokens: int) -> None:
        """More output of a request was seen."""
        commands = self.gate.handle(Progressed(request_id, tokens), self.clock())
        if commands:
            self._tell(commands)

    def handle(self, event: Event) -> list[Command]:
        """Hand one event to the gate; returns its commands after the observers saw them."""
        if self.moved:
            self._catch_up()
        now, gate, late = self.clock(), self._gate, self._late
        commands = gate.handle(event, now)
        late.append((event, commands, now, gate.moment()))
        if len(commands) == 1 and (kind := type(commands[0])) in _FREQUENT:
            if self._waiting or self._audience.get(kind) != []:  # []: nobody hears of it at once
                self._tell(commands)
            most = _MOST_LATE if type(event) is Arrived else _WRITTEN_LATE
            if not (self.hurry or self._retired) and len(late) < most:
                return commands
        elif commands:
            self._tell(commands)
        self.settle()
        return commands

    def _tell(self, commands: list[Command]) -> None:
        for command in commands:
            kind = type(command)
            audience = self._audience.get(kind)
            if audience is None:
                audience = [each for each, kinds in self._observers if not kinds or kind in kinds]
                self._audience[kind] = audience
            if audience:
                _show(command, audience)
        if self._waiting:
            self._answer(commands)

    async def admit(
        self,
        request_id: str,
        shape: Shape,
        client_id: str = "",
        body_bytes: int = 0,
        *,
        no_place: Reject | None = None,
    ) -> LeaseHandle | Reject:
        """The verdict on a counted request. ``request_id`` must be unique among open leases.

        ``no_place``: what it is to hear where it could be let in and refusals are meant.
        Waits while the gate holds the request in its queue, with ``body_bytes`` of memory; cancelled, it is
        out of the queue at once.
        """
        for command in self.handle(Arrived(request_id, shape, client_id, body_bytes, no_place)):
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


def _show(command: Command, audience: Iterable[Observer]) -> None:
    for observer in audience:
        try:
            observer(command)
        except Exception:  # a lease is charged already: whoever asked must get it, to end it
            log.exception("an observer failed; what the gate decided stands")


def _moved_at(lease: LeaseHandle) -> float:
    return lease.moved_at
