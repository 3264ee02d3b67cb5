"""The decision log: one record for each decision of the gate, one for each end; a ring of the last ones.

No prompt text, ever: a record holds counts, words and the caller's ids. That is enough to replay the traffic
(when it came, what it asked, how long its answer was) and to say why a decision fell as it did.
"""

from collections import deque
from typing import Protocol

from kvctl.core.outcomes import Decision, EndReason, EngineState, Limit, Policy, Pressure, RejectReason
from kvctl.core.records import record

LIMIT_OF: dict[RejectReason, Limit] = {
    RejectReason.KV_BUDGET: Limit.KV_BUDGET,
    RejectReason.TOO_LARGE_NOW: Limit.KV_BUDGET,
    RejectReason.PREFILL_BACKLOG: Limit.PREFILL_BACKLOG,
    RejectReason.DECODE_CONCURRENCY: Limit.DECODE_CONCURRENCY,
    RejectReason.SEQUENCE_SLOTS: Limit.SEQUENCE_SLOTS,
}


@record(kw_only=True)
class Scales:
    """What the request was weighed against at that moment. KV tokens and shares of one."""

    state: EngineState
    policy: Policy
    draining: bool
    capacity_tokens: int
    budget_tokens: int
    margin_ratio: float
    pressure_ratio: float
    pressure_term: Pressure | None  # the binding term; None: no pressure
    leases: int


@record(kw_only=True)
class Asked:
    """What came in. ``tenant`` is a digest; ``asked_output`` None: the caller set no limit."""

    lease_id: str
    request_id: str  # the caller's X-Request-Id, else the lease's
    route: str
    model: str
    tenant: str
    prompts: tuple[int, ...]
    n: int
    asked_output: int | None
    exact: bool
    stream: bool

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.prompts)


@record(kw_only=True)
class DecisionRecord:
    """One decision. ``at`` is monotonic seconds, ``waited_s`` the time in the queue before it."""

    at: float
    engine: str
    asked: Asked
    scales: Scales
    decision: Decision
    tenant_name: str = ""  # as metrics name it
    reason: RejectReason | None = None  # of a refusal, also of one that was not enforced
    retry_after_s: float | None = None
    claim_tokens: int | None = None  # None: refused before it was weighed
    allowed_output: int | None = None  # of the longest sequence; None: not weighed
    needed_tokens: int | None = None  # what a refused request needed by itself
    free_tokens: int | None = None  # for lack of room: what was left of the budget without it
    forecast_tokens: float | None = None  # forecast peak with it
    forecast_bounded: bool = False  # that figure is an upper bound: it was let in without a look at the curve
    limit_tokens: int | None = None  # of a request that can never fit
    largest_output: int | None = None
    alone: bool = False
    shadow: bool = False  # let in although the gate says no: it does not enforce
    waited_s: float = 0.0
    starts_in_s: float | None = None  # of a request that began to wait: by the forecast

    @property
    def headroom_tokens(self) -> int | None:
        """What would be left of the budget with it; negative: that much was missing."""
        peak = self.forecast_tokens
        return None if peak is None else self.scales.budget_tokens - round(peak)

    @property
    def binding_limit(self) -> Limit | None:
        """The limit that refused it; None: it was not refused, or for another reason."""
        return None if self.reason is None else LIMIT_OF.get(self.reason)


@record(kw_only=True)
class EndRecord:
    """How an admitted request ended. ``prompt_tokens`` None: the engine did not say."""

    at: float
    engine: str
    lease_id: str
    request_id: str
    end: EndReason
    seconds: float
    first_token_s: float | None
    output_tokens: int
    prompt_tokens: int | None
    held_tokens: int


class Sketch(Protocol):
    """What a decision's record is made from once somebody reads it, which seldom happens."""

    @property
    def lease_id(self) -> str:
        """As of ``Asked``."""

    @property
    def request_id(self) -> str:
        """As of ``Asked``."""

    def record(self) -> DecisionRecord:
        """The record."""


Entry = DecisionRecord | EndRecord
Kept = Sketch | Entry


def made(kept: Kept) -> Entry:
    """The record that was kept, or the one made from its sketch."""
    return kept if isinstance(kept, Entry) else kept.record()


@record
class Story:
    """A decision and, where it is over, its end."""

    decision: DecisionRecord
    end: EndRecord | None = None


class Ring:
    """The last ``size`` decisions, with their ends, found by the lease's id or by the caller's."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: deque[str] = deque()
        self._stories: dict[str, Story | tuple[Sketch, EndRecord | None]] = {}
        self._by_request: dict[str, str] = {}  # of those that the caller named

    def __len__(self) -> int:
        return len(self._order)

    def resize(self, size: int) -> None:
        """Keep ``size`` decisions from now on."""
        self._size = size
        self._shrink()

    def add(self, kept: Kept) -> None:
        """Take a record in. The end of a decision that is forgotten is forgotten too."""
        if isinstance(kept, EndRecord):
            self._over(kept)
        elif isinstance(kept, DecisionRecord):
            self._put(kept.asked.lease_id, kept.asked.request_id, Story(kept))
        else:
            self._put(kept.lease_id, kept.request_id, (kept, None))

    def _over(self, end: EndRecord) -> None:
        found = self._stories.get(end.lease_id)
        if isinstance(found, Story):
            self._stories[end.lease_id] = Story(found.decision, end)
        elif found is not None:
            self._stories[end.lease_id] = found[0], end

    def _put(self, lease_id: str, request_id: str, story: Story | tuple[Sketch, None]) -> None:
        if lease_id not in self._stories:
            self._order.append(lease_id)
        self._stories[lease_id] = story
        if request_id != lease_id:
            self._by_request[request_id] = lease_id  # a retry under the same id: the last one counts
        if len(self._order) > self._size:
            self._shrink()

    def find(self, some_id: str) -> Story | None:
        """The story of a lease id, or of the last request with that X-Request-Id."""
        return self._story(some_id) or self._story(self._by_request.get(some_id, ""))

    def _story(self, lease_id: str) -> Story | None:
        found = self._stories.get(lease_id)
        if found is None or isinstance(found, Story):
            return found
        story = self._stories[lease_id] = Story(found[0].record(), found[1])
        return story

    def ids(self) -> list[str]:
        """The lease ids of all decisions in the ring, the latest first."""
        return list(reversed(self._order))

    def _shrink(self) -> None:
        while len(self._order) > self._size:
            lease_id = self._order.popleft()
            gone = self._stories.pop(lease_id)
            request_id = gone.decision.asked.request_id if isinstance(gone, Story) else gone[0].request_id
            if self._by_request.get(request_id) == lease_id:
                del self._by_request[request_id]
