"""The decision log of one engine: from what goes through its gate to records, ring and file.

An observer of events with their commands, since a record needs both: what came in and what was said of it. A
request that waits in the queue is decided by a later event, so what came in is kept until its decision.
"""

import hashlib
from collections.abc import Callable

from kvctl.control.gatekeeper import VERDICTS
from kvctl.core.claim import Shape
from kvctl.core.decisions import Asked, DecisionRecord, EndRecord, Entry, Scales
from kvctl.core.events import Admit, Arrived, Command, Event, LeaseEnded, LeftQueue, Queued, Reject
from kvctl.core.outcomes import Decision, EndReason

Sink = Callable[[Entry], None]


class DecisionRecorder:
    """Give it to ``Gatekeeper.record``; ``sinks`` get each record as it is made."""

    def __init__(self, engine: str, scales: Callable[[], Scales], *sinks: Sink) -> None:
        self._engine = engine
        self._scales = scales
        self._sinks = sinks
        self._waiting: dict[str, tuple[Arrived, float]] = {}
        self._names: dict[str, str] = {}  # lease id: the caller's own id, while it runs

    def __call__(self, event: Event, commands: list[Command], now: float) -> None:
        """One event and what the gate said to it."""
        if type(event) is Arrived:
            self._waiting[event.request_id] = event, now
        for command in commands:
            if isinstance(command, LeaseEnded):
                self._ended(command)
            elif isinstance(command, VERDICTS):
                self._decided(command, now)
            elif isinstance(command, Queued):
                self._queued(command, now)
            elif isinstance(command, LeftQueue):
                self._left(command, now)

    def _queued(self, command: Queued, now: float) -> None:
        """It waits: a record of its own; the one of its decision follows."""
        event, _ = self._waiting[command.request_id]
        base = DecisionRecord(
            at=now,
            engine=self._engine,
            asked=asked_of(event),
            scales=self._scales(),
            decision=Decision.QUEUE,
            reason=command.reason,
            starts_in_s=command.starts_in_s,
        )
        self._tell(base)

    def _left(self, command: LeftQueue, now: float) -> None:
        """Its caller is gone before any decision."""
        event, _ = self._waiting.pop(command.request_id)
        self._tell(
            EndRecord(
                at=now,
                engine=self._engine,
                lease_id=command.request_id,
                request_id=event.client_id or command.request_id,
                end=EndReason.CLIENT_GONE,
                seconds=command.waited_s,
                first_token_s=None,
                output_tokens=0,
                prompt_tokens=None,
                held_tokens=0,
            )
        )

    def _decided(self, command: Admit | Reject, now: float) -> None:
        kept = self._waiting.pop(command.request_id, None)
        if kept is None:
            return
        event, came_at = kept
        if isinstance(command, Admit):
            self._names[command.request_id] = event.client_id
        asked, waited_s = asked_of(event), now - came_at
        self._tell(record_of(self._engine, asked, self._scales(), command, now, waited_s=waited_s))

    def _ended(self, command: LeaseEnded) -> None:
        record = command.record
        lease = record.lease
        first = lease.first_token_at
        self._tell(
            EndRecord(
                at=record.at,
                engine=self._engine,
                lease_id=lease.id,
                request_id=self._names.pop(lease.id, "") or lease.id,
                end=record.reason,
                seconds=record.at - lease.admitted_at,
                first_token_s=None if first is None else first - lease.admitted_at,
                output_tokens=record.output_tokens,
                prompt_tokens=record.prompt_tokens,
                held_tokens=record.held_tokens,
            )
        )

    def _tell(self, entry: Entry) -> None:
        for sink in self._sinks:
            sink(entry)


def asked_of(event: Arrived) -> Asked:
    """What came in, as it may be kept."""
    shape: Shape = event.shape
    return Asked(
        lease_id=event.request_id,
        request_id=event.client_id or event.request_id,
        route=shape.route,
        model=shape.model,
        tenant=digest(shape.tenant),
        prompts=shape.prompts,
        n=shape.n,
        asked_output=shape.asked_output,
        exact=shape.exact,
        stream=shape.stream,
    )


def record_of(
    engine: str, asked: Asked, scales: Scales, command: Admit | Reject, now: float, *, waited_s: float = 0.0
) -> DecisionRecord:
    """The record of a decision on ``asked``, which waited so long for it."""
    if isinstance(command, Reject):
        return _refused(engine, asked, scales, command, now=now, waited_s=waited_s)
    claim = command.claim
    return DecisionRecord(
        at=now,
        engine=engine,
        asked=asked,
        scales=scales,
        decision=Decision.ADMIT,
        tenant_name=command.tenant,
        claim_tokens=claim.tokens,
        allowed_output=max(claim.outputs, default=0),
        reason=command.shadow,
        forecast_tokens=command.forecast_tokens,
        forecast_bounded=command.bounded,
        alone=command.alone,
        shadow=command.shadow is not None,
        waited_s=waited_s,
    )


def _refused(
    engine: str, asked: Asked, scales: Scales, command: Reject, *, now: float, waited_s: float
) -> DecisionRecord:
    claim = command.claim
    return DecisionRecord(
        at=now,
        engine=engine,
        asked=asked,
        scales=scales,
        decision=command.decision,
        tenant_name=command.tenant,
        claim_tokens=None if claim is None else claim.tokens,
        allowed_output=None if claim is None else max(claim.outputs, default=0),
        reason=command.reason,
        retry_after_s=command.retry_after_s,
        needed_tokens=command.needed_tokens,
        free_tokens=command.headroom_tokens,
        forecast_tokens=command.forecast_tokens,
        limit_tokens=command.limit_tokens,
        largest_output=command.largest_output,
        waited_s=waited_s,
    )


def digest(tenant: str) -> str:
    """A tenant as logs may show it: the same one has the same digest, and none leads back."""
    return hashlib.blake2b(tenant.encode(), digest_size=6).hexdigest() if tenant else ""
