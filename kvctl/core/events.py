"""What goes into the gate (events) and what comes out (commands). All frozen; all times monotonic seconds.

Every event is handled by ``Gate.handle(event, now) -> list[Command]``; the outside carries commands out.
"""

from typing import TYPE_CHECKING

from kvctl.core.claim import Claim, Shape
from kvctl.core.ledger import EndedLease
from kvctl.core.outcomes import (
    DECISION_OF,
    BudgetReason,
    Decision,
    EndReason,
    EngineState,
    Note,
    Policy,
    Priority,
    RejectReason,
    SourceFault,
)
from kvctl.core.records import record
from kvctl.core.telemetry import EngineInfo, GpuSample, RankSample

if TYPE_CHECKING:
    from kvctl.core.supply import GateConfig  # which needs the commands of this module

# --- events -----------------------------------------------------------------------------------------


@record
class Arrived:
    """A counted request asks to be let in.

    Answered at once by exactly one Admit, Reject or Queued. What was queued is answered later by exactly one
    Admit or Reject, unless ``Abandoned`` says before that nobody waits for it any more.
    """

    request_id: str
    shape: Shape
    client_id: str = ""  # the caller's own id of it, for the decision log
    body_bytes: int = 0  # what is held in memory for it while it waits
    no_place: "Reject | None" = None  # for want of what the gate does not count; meant as its refusals are


@record
class Abandoned:
    """Whoever waited in the queue is gone."""

    request_id: str


@record
class Progressed:
    """Tokens of a streaming answer were seen (``tokens`` more than before, over all its sequences)."""

    request_id: str
    tokens: int


@record
class Ended:
    """A lease's request is over. Counts are the engine's own usage figures where it gave them."""

    request_id: str
    reason: EndReason
    output_tokens: int | None = None
    prompt_tokens: int | None = None


@record
class Scraped:
    """A metrics page came: one sample per rank (at least one). ``asked_at`` is when it was asked for."""

    samples: tuple[RankSample, ...]
    asked_at: float


@record
class ScrapeFailed:
    """A metrics poll brought nothing."""

    fault: SourceFault


@record
class EngineDescribed:
    """``/v1/models`` (or the engine's like) answered: the engine is reachable."""

    info: EngineInfo


@record
class ConnectFailed:
    """The data plane could not connect to the engine."""


@record
class GpusRead:
    """The cards of this engine were read.

    ``named``: whether these are known to be its cards, and no others; None: as the settings say.
    """

    samples: tuple[GpuSample, ...]
    named: bool | None = None


@record
class GpuReadFailed:
    """NVML brought nothing."""

    fault: SourceFault


@record
class CardsFailed:
    """The driver told of an error that ends all work on these cards, by UUID."""

    uuids: tuple[str, ...]


@record
class CapacityPlanned:
    """The planner's figure: KV tokens that a rank has at least; None: it cannot say."""

    tokens: int | None


@record
class KnobsChanged:
    """The values in force of the knobs that on-call may move."""

    margin_ratio: float
    policy: Policy


@record
class Reconfigured:
    """Settings were read again, or a knob was moved: what is in force from now on."""

    config: "GateConfig"


@record
class DrainChanged:
    """Drain began (nothing new is admitted, for this ``reason``) or was called off."""

    draining: bool
    reason: RejectReason = RejectReason.DRAINING


@record
class Ticked:
    """The control loop's beat: budget and forecast are recomputed."""


Event = (
    Arrived
    | Abandoned
    | Progressed
    | Ended
    | Scraped
    | ScrapeFailed
    | EngineDescribed
    | ConnectFailed
    | GpusRead
    | GpuReadFailed
    | CardsFailed
    | CapacityPlanned
    | KnobsChanged
    | Reconfigured
    | DrainChanged
    | Ticked
)

# --- commands ---------------------------------------------------------------------------------------


@record
class Admit:
    """Let it in; its lease is charged already (law 2)."""

    request_id: str
    claim: Claim
    forecast_tokens: float  # forecast peak with it, KV tokens
    alone: bool = False  # admitted because nothing else runs, though larger than the budget
    shadow: RejectReason | None = None  # not enforced: what would have been said
    tenant: str = ""  # as metrics name it; "" where no tenants are told apart
    waited_s: float | None = None  # in the queue; None: it was let in at once
    priority: Priority = Priority.NORMAL
    bounded: bool = False  # ``forecast_tokens`` is the most that it can be: it fits, so nobody looked closer


@record
class Reject:
    """Refuse it. ``retry_after_s`` None on what can never fit."""

    request_id: str
    reason: RejectReason
    needed_tokens: int
    prompt_tokens: int
    headroom_tokens: int | None = None  # None: unknown
    limit_tokens: int | None = None
    largest_output: int | None = None
    retry_after_s: float | None = None
    claim: Claim | None = None  # None: refused before it was weighed
    forecast_tokens: float | None = None  # forecast peak with it, KV tokens
    tenant: str = ""  # as metrics name it; "" where no tenants are told apart
    waited_s: float | None = None  # in the queue; None: it was refused at once
    priority: Priority = Priority.NORMAL

    @property
    def decision(self) -> Decision:
        """The decision that goes with the reason."""
        return DECISION_OF[self.reason]


@record
class Queued:
    """It waits. Nothing is charged for it; an Admit or a Reject follows."""

    request_id: str
    reason: RejectReason  # what stands in its way
    priority: Priority
    starts_in_s: float  # by the forecast


@record
class LeftQueue:
    """A request is out of the queue without an answer: its caller is gone."""

    request_id: str
    priority: Priority
    waited_s: float


@record
class LeaseEnded:
    """A lease was taken off the ledger."""

    record: EndedLease


@record
class BudgetChanged:
    """The budget moved: by more than a hundredth of capacity, or at all where margin or capacity did."""

    before_tokens: int
    after_tokens: int
    reason: BudgetReason
    sentence: str


@record
class StateChanged:
    """The engine's state changed."""

    before: EngineState
    after: EngineState
    sentence: str


@record
class EngineRestarted:
    """Counters fell or the engine's start time moved: it is another process now."""

    rank: str


@record
class Noted:
    """Something that on-call should be able to read in the log once."""

    word: Note
    sentence: str


Command = (
    Admit | Reject | Queued | LeftQueue | LeaseEnded | BudgetChanged | StateChanged | EngineRestarted | Noted
)
