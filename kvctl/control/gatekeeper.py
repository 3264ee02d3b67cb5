"""One engine's gate, made usable from the event loop.

Law 1 ends here for the data plane: a ``LeaseHandle`` is a context manager that ends its lease exactly
once, with ``cancelled`` if its owner left without a word.
Law 2: ``admit`` hands the event to the gate and reads the verdict without an ``await`` between.
"""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from kvctl.core.claim import Claim, Shape
from kvctl.core.events import (
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

Observer = Callable[[Command], None]


class LeaseHandle:
    """An admitted request's hold on the ledger. Use as a context manager; ``end`` it with the right word."""

    __slots__ = ("_done", "_keeper", "claim", "request_id")

    def __init__(self, keeper: "Gatekeeper", request_id: str, claim: Claim) -> None:
        self._keeper = keeper
        self._done = False
        self.request_id = request_id
        self.claim = claim

    @property
    def ended(self) -> bool:
        """Whether the lease is off the ledger."""
        return self._done

    def progress(self, tokens: int) -> None:
        """``tokens`` more output tokens were seen. After the end: ignored, the bytes are merely late."""
        if not self._done:
            self._keeper.handle(Progressed(self.request_id, tokens))

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
        self._observers = list(observers)

    def observe(self, observer: Observer) -> None:
        """Show every command to ``observer`` from now on."""
        self._observers.append(observer)

    def handle(self, event: Event) -> list[Command]:
        """Hand one event to the gate; returns its commands after the observers saw them."""
        commands = self.gate.handle(event, self._clock())
        for command in commands:
            for observer in self._observers:
                observer(command)
        return commands

    async def admit(self, request_id: str, shape: Shape) -> LeaseHandle | Reject:
        """The verdict on a counted request. ``request_id`` must be unique among open leases."""
        for command in self.handle(Arrived(request_id, shape)):
            if isinstance(command, Admit):
                return LeaseHandle(self, request_id, command.claim)
            if isinstance(command, Reject):
                return command
        raise AssertionError("the gate answers every arrival")

    def connect_failed(self) -> None:
        """The data plane could not reach the engine."""
        self.handle(ConnectFailed())
