"""The decision log of one engine: makes records from what goes through its gate, for ring and file.

It observes events together with their commands, since a record needs both: what came in and what was decided.
A request that waits in the queue is decided by a later event, so what came in is kept until then.
"""

import hashlib
from collections.abc import Callable, Iterable

import msgspec

from kvctl.control.gatekeeper import VERDICTS
from kvctl.core.claim import Shape
from kvctl.core.decisions import Asked, DecisionRecord, EndRecord, Kept, Scales
from kvctl.core.events import Admit, Arrived, Command, Event, LeaseEnded, LeftQueue, Queued, Reject
from kvctl.core.outcomes import Decision, EndReason, RejectReason
from kvctl.core.snapshot import Moment, scales_of

Sink = Callable[[Kept], None]


class Admission(msgspec.Struct, frozen=True, gc=False):
    """What the record of an admitted request is made of. Nothing of its prompts but their sizes.

    Requests come by the hundred a second and hardly any record is read: keeping this costs a fraction of one.
    """

    engine: str
    at: float
    waited_s: float
    lease_id: str
    request_id: str
    route: str
    model: str
    tenant: str
    prompts: tuple[int, ...]
    n: int
    asked_output: int | None
    exact: bool
    stream: bool
    moment: Moment
    tenant_name: str
    claim_tokens: int
    outputs: tuple[int, ...]
    shadow: RejectReason | None
    forecast_tokens: float
    bounded: bool
    alone: bool

    def record(self) -> DecisionRecord:
        """The record."""
        asked = Asked(
            lease_id=self.lease_id,
            request_id=self.request_id,
            route=self.route,
            model=self.model,
            tenant=digest(self.tenant),
            prompts=self.prompts,
            n=self.n,
            asked_output=self.asked_output,
            exact=self.exact,
            stream=self.stream,
        )
        return DecisionRecord(
            at=self.at,
            engine=self.engine,
            asked=asked,
            scales=scales_of(self.moment),
            decision=Decision.ADMIT,
            tenant_name=self.tenant_name,
            claim_tokens=self.claim_tokens,
            allowed_output=max(self.outputs, default=0),
            reason=self.shadow,
            forecast_tokens=self.forecast_tokens,
            forecast_bounded=self.bounded,
            alone=self.alone,
            shadow=self.shadow is not None,
            waited_s=self.waited_s,
        )


class DecisionRecorder:
    """Pass it to ``Gatekeeper.record``; ``sinks`` get each record, or what it can be made from.

    ``moment`` returns what the event being shown was weighed against. ``sinks`` may come and go.
    """

    def __init__(self, engine: str, moment: Callable[[], Moment], sinks: Iterable[Sink]) -> None:
        self._engine = engine
        self._moment = moment
        self._sinks = sinks
        self._waiting: dict[str, tuple[Arrived, float]] = {}
        self._names: dict[str, str] = {}  # lease id: the id that the caller gave it, while it runs

    def __call__(self, event: Event, commands: list[Command], now: float) -> None:
        """Take in one event and what the gate said to it."""
        if type(event) is Arrived:
            if len(commands) == 1 and type(verdict := commands[0]) is Admit:  # by far the most
                self._admitted(event, verdict, now, now)
                return
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
        """The request waits: a record of its own; that of its decision follows."""
        event, _ = self._waiting[command.request_id]
        self._tell(_waits(self._engine, event, self._moment(), command, now))

    def _left(self, command: LeftQueue, now: float) -> None:
        """Its caller left before any decision."""
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
            self._admitted(event, command, came_at, now)
        else:
            scales, waited_s = scales_of(self._moment()), now - came_at
            self._tell(_refused(self._engine, asked_of(event), scales, command, now=now, waited_s=waited_s))

    def _admitted(self, event: Arrived, command: Admit, came_at: float, now: float) -> None:
        if event.client_id not in ("", event.request_id):
            self._names[event.request_id] = event.client_id
        self._tell(_admission(self._engine, event, self._moment(), command, now=now, waited_s=now - came_at))

    def _ended(self, command: LeaseEnded) -> None:
        record = command.record
        lease = record.lease
        first = lease.first_token_at
        self._tell(
            EndRecord(
                at=record.at,
                engine=self._engine,
                lease_id=lease.id,
                request_id=self._names.pop(lease.id, lease.id),
                end=record.reason,
                seconds=record.at - lease.admitted_at,
                first_token_s=None if first is None else first - lease.admitted_at,
                output_tokens=record.output_tokens,
                prompt_tokens=record.prompt_tokens,
                held_tokens=record.held_tokens,
            )
        )

    def _tell(self, kept: Kept) -> None:
        for sink in self._sinks:
            sink(kept)


def asked_of(event: Arrived) -> Asked:
    """What came in, in the form in which it may be kept."""
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
    engine: str, event: Arrived, moment: Moment, command: Admit | Reject | Queued, now: float
) -> DecisionRecord:
    """The record of a decision made at arrival, without waiting, weighed against ``moment``."""
    if isinstance(command, Admit):
        return _admission(engine, event, moment, command, now=now, waited_s=0.0).record()
    if isinstance(command, Queued):
        return _waits(engine, event, moment, command, now)
    return _refused(engine, asked_of(event), scales_of(moment), command, now=now, waited_s=0.0)


def _admission(
    engine: str, event: Arrived, moment: Moment, command: Admit, *, now: float, waited_s: float
) -> Admission:
    shape, claim = event.shape, command.claim
    return Admission(
        engine, now, waited_s, event.request_id, event.client_id or event.request_id,
        shape.route, shape.model, shape.tenant, shape.prompts, shape.n,
        shape.asked_output, shape.exact, shape.stream, moment,
        command.tenant, claim.tokens, claim.outputs, command.shadow,
        command.forecast_tokens, command.bounded, command.alone,
    )  # fmt: skip


def _waits(engine: str, event: Arrived, moment: Moment, command: Queued, now: float) -> DecisionRecord:
    return DecisionRecord(
        at=now,
        engine=engine,
        asked=asked_of(event),
        scales=scales_of(moment),
        decision=Decision.QUEUE,
        reason=command.reason,
        starts_in_s=command.starts_in_s,
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
    """A tenant as logs may show it: the same tenant has the same digest, which does not lead back to it."""
    return hashlib.blake2b(tenant.encode(), digest_size=6).hexdigest() if tenant else ""
