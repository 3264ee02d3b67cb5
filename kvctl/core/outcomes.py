"""Every decision, reason and state word of kvctl.

Law 9: every number has its reason. Each word below is a metric label, a log field and an API field
at once, so the sets are closed: whoever needs a new word adds it here, with its meaning.
"""

from enum import StrEnum


class Decision(StrEnum):
    """What the gate says of an arriving request."""

    ADMIT = "admit"
    QUEUE = "queue"  # it waits; one of the others follows
    REJECT_LATER = "reject_later"  # 429: does not fit now
    REJECT_NEVER = "reject_never"  # 400: can never fit, proven
    UNAVAILABLE = "unavailable"  # 503: the engine cannot be judged or serves nobody


class RejectReason(StrEnum):
    """Why a request was not admitted. ``DECISION_OF`` tells the decision that goes with each."""

    # reject_never
    CONTEXT = "context"  # prompt, or the output asked for, is beyond the engine's context length
    MAX_CONTEXT = "max_context"  # beyond the operator's own context cap
    CAPACITY = "capacity"  # beyond the whole KV pool of one rank
    # reject_later
    KV_BUDGET = "kv_budget"  # forecast (or claims, policy static) would pass the budget
    TOO_LARGE_NOW = "too_large_now"  # larger than the budget by itself: runs only alone
    PREFILL_BACKLOG = "prefill_backlog"  # prompts admitted before it take longer than its first token may
    DECODE_CONCURRENCY = "decode_concurrency"  # one more sequence would slow down every answer's tokens
    SEQUENCE_SLOTS = "sequence_slots"  # the engine runs as many sequences as it has slots for
    QUEUE_AHEAD = "queue_ahead"  # it would fit, and would delay one that waits before it
    QUEUE_DEADLINE = "queue_deadline"  # it waited, and its start did not come in time
    TENANT_SHARE = "tenant_share"  # it would fit, and the room is owed to tenants below their share
    TENANT_TOKENS_IN_FLIGHT = "tenant_tokens_in_flight"  # the tenant's own limits
    TENANT_REQUESTS_PER_MINUTE = "tenant_requests_per_minute"
    TENANT_TOKENS_PER_MINUTE = "tenant_tokens_per_minute"
    BACKGROUND_RESPONSES = "background_responses"  # as many are generated in the background as may be
    # unavailable
    ENGINE_STARTING = "engine_starting"  # the engine was never seen since kvctl started
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_ASLEEP = "engine_asleep"
    ENGINE_WEDGED = "engine_wedged"  # requests in flight, no token and no counter moves
    GPU_FAULT = "gpu_fault"
    RANK_GONE = "rank_gone"  # it waited for a data-parallel rank that the engine no longer has
    DRAINING = "draining"  # kvctl itself is going down or was drained by on-call


DECISION_OF: dict[RejectReason, Decision] = {
    RejectReason.CONTEXT: Decision.REJECT_NEVER,
    RejectReason.MAX_CONTEXT: Decision.REJECT_NEVER,
    RejectReason.CAPACITY: Decision.REJECT_NEVER,
    RejectReason.KV_BUDGET: Decision.REJECT_LATER,
    RejectReason.TOO_LARGE_NOW: Decision.REJECT_LATER,
    RejectReason.PREFILL_BACKLOG: Decision.REJECT_LATER,
    RejectReason.DECODE_CONCURRENCY: Decision.REJECT_LATER,
    RejectReason.SEQUENCE_SLOTS: Decision.REJECT_LATER,
    RejectReason.QUEUE_AHEAD: Decision.REJECT_LATER,
    RejectReason.QUEUE_DEADLINE: Decision.REJECT_LATER,
    RejectReason.TENANT_SHARE: Decision.REJECT_LATER,
    RejectReason.TENANT_TOKENS_IN_FLIGHT: Decision.REJECT_LATER,
    RejectReason.TENANT_REQUESTS_PER_MINUTE: Decision.REJECT_LATER,
    RejectReason.TENANT_TOKENS_PER_MINUTE: Decision.REJECT_LATER,
    RejectReason.BACKGROUND_RESPONSES: Decision.REJECT_LATER,
    RejectReason.ENGINE_STARTING: Decision.UNAVAILABLE,
    RejectReason.ENGINE_UNREACHABLE: Decision.UNAVAILABLE,
    RejectReason.ENGINE_ASLEEP: Decision.UNAVAILABLE,
    RejectReason.ENGINE_WEDGED: Decision.UNAVAILABLE,
    RejectReason.GPU_FAULT: Decision.UNAVAILABLE,
    RejectReason.RANK_GONE: Decision.UNAVAILABLE,
    RejectReason.DRAINING: Decision.UNAVAILABLE,
}


TENANT_LIMITS = frozenset(
    {
        RejectReason.TENANT_TOKENS_IN_FLIGHT,
        RejectReason.TENANT_REQUESTS_PER_MINUTE,
        RejectReason.TENANT_TOKENS_PER_MINUTE,
    }
)
"""A quota of the caller's own, whatever room there is: always 429, never queued."""


class Priority(StrEnum):
    """Who of those that wait is next. The first is the most urgent."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class MetricsView(StrEnum):
    """Whose view /metrics on the data port gives."""

    ENGINE = "engine"  # the engine's page as it is
    GATE = "gate"  # with usage and waiting as the gate sees them


class LargeRequests(StrEnum):
    """What becomes of requests that fit only a nearly drained engine."""

    REFUSE = "refuse"  # 429 unless they would run alone
    RESERVE = "reserve"  # they wait, and the gate drains for them, for a share of the time


class EndReason(StrEnum):
    """How a lease ended. Only ``FINISHED`` says anything about how long answers naturally are."""

    FINISHED = "finished"  # the engine ended the answer by itself (stop)
    CAPPED = "capped"  # the answer reached its limit (finish_reason length)
    CLIENT_GONE = "client_gone"
    CLIENT_STALLED = "client_stalled"  # the client stopped reading for client_write_timeout
    ENGINE_ERROR = "engine_error"  # the upstream connection broke, or an error event came
    ENGINE_REFUSED = "engine_refused"  # the engine answered 4xx/5xx
    TIMEOUT = "timeout"  # a configured upstream timeout
    CANCELLED = "cancelled"  # the handler ended without a word: a defect, never lost all the same
    SHUTDOWN = "shutdown"  # cut by the end of a drain
    # Of responses that are generated in the background, which outlive their request:
    CALLER_CANCELLED = "caller_cancelled"  # cancelled at the engine
    ENGINE_FORGOT = "engine_forgot"  # the engine does not know it: it was restarted
    ENGINE_IDLE = "engine_idle"  # its end was never told, and the engine holds no request
    OVERDUE = "overdue"  # its end was never told, and it would have come long ago


AFTERWARDS = frozenset(
    {EndReason.CALLER_CANCELLED, EndReason.ENGINE_FORGOT, EndReason.ENGINE_IDLE, EndReason.OVERDUE}
)
"""Of a lease that outlived its request: no request ends so."""


class EngineState(StrEnum):
    """What the gate believes of an engine. ``SERVING`` holds those that admit."""

    STARTING = "starting"  # never seen
    UP = "up"  # telemetry fresh
    LATE = "late"  # telemetry a few polls old: hold, ledger only
    STALE = "stale"  # telemetry older than stale_after: the budget shrinks to the fallback
    NO_TELEMETRY = "no_telemetry"  # reachable, but its page has nothing to judge by: a guessed budget
    UNREACHABLE = "unreachable"
    ASLEEP = "asleep"
    WEDGED = "wedged"
    TRIAL = "trial"  # was wedged or silent for a while: the next request finds out whether it moves again
    FAULT = "fault"  # its card is lost or broken


SERVING = frozenset(
    {EngineState.UP, EngineState.LATE, EngineState.STALE, EngineState.NO_TELEMETRY, EngineState.TRIAL}
)


UNAVAILABLE_OF: dict[EngineState, RejectReason] = {
    EngineState.STARTING: RejectReason.ENGINE_STARTING,
    EngineState.UNREACHABLE: RejectReason.ENGINE_UNREACHABLE,
    EngineState.ASLEEP: RejectReason.ENGINE_ASLEEP,
    EngineState.WEDGED: RejectReason.ENGINE_WEDGED,
    EngineState.FAULT: RejectReason.GPU_FAULT,
}


class Pressure(StrEnum):
    """The terms whose least value is the pressure on the budget."""

    PREEMPTION = "preemption"
    GPU_MEMORY = "gpu_memory"
    TELEMETRY = "telemetry"
    RANKS = "ranks"  # ranks that requests cannot be pinned to fill unevenly


class BudgetReason(StrEnum):
    """Why the budget has the value that it has, or changed to it."""

    STEADY = "steady"
    CAPACITY = "capacity"  # the engine reports another pool
    MARGIN = "margin"  # on-call moved the margin, or an override ended
    PREEMPTION = "preemption"
    GPU_MEMORY = "gpu_memory"
    TELEMETRY = "telemetry"
    RANKS = "ranks"
    RECOVERY = "recovery"  # a pressure term rose again


class CapacitySource(StrEnum):
    """Who says how large the pool is. What the last two say is a guess, and proves no 400."""

    ENGINE = "engine"
    OPERATOR = "operator"  # the setting capacity_tokens
    PLAN = "plan"  # the planner's low end, from the model's config
    FALLBACK = "fallback"  # the setting fallback_budget_tokens


class Policy(StrEnum):
    """How a request is weighed against the budget."""

    FORECAST = "forecast"
    STATIC = "static"  # sum of worst-case claims
    NONE = "none"  # everything that can be served is admitted: for comparison only


class ChoiceReason(StrEnum):
    """Why a request went to one of several gates (engines, or ranks of one)."""

    ONLY = "only"  # no other serves the model
    HEADROOM = "headroom"  # the most headroom
    PREFIX = "prefix"  # its pool holds the prompt's prefix
    PREFIX_BEHIND = "prefix_behind"  # the pool that holds the prefix is too far behind in headroom
    NEAREST = "nearest"  # none admits: the one whose refusal is the truest
    MAKER = "maker"  # it holds what the request goes on from (a stored response)
    MOVED = "moved"  # the one chosen before could not be reached


class Limit(StrEnum):
    """What bounds how much is in flight. The one that binds is named in status and metrics."""

    KV_BUDGET = "kv_budget"
    PREFILL_BACKLOG = "prefill_backlog"
    DECODE_CONCURRENCY = "decode_concurrency"
    SEQUENCE_SLOTS = "sequence_slots"


class Note(StrEnum):
    """What on-call should be able to read in the log once, and nothing counts."""

    CAPACITY = "capacity"  # the pool's size, when it is first known or another than before
    UNSUPPORTED = "unsupported"  # a set-up whose gauges mean something else
    ENGINE_DESCRIBED = "engine_described"  # its models or context are others than before
    PREEMPTION_IGNORED = "preemption_ignored"  # preemptions at low pool usage
    SHARING_DOUBTED = "sharing_doubted"  # the gauge shows that common prefixes are not kept once


class Absence(StrEnum):
    """Why a reading has no value. Law 3: unknown is not zero."""

    MISSING = "missing"  # the source does not have it
    UNPARSABLE = "unparsable"
    NOT_FINITE = "not_finite"
    OUT_OF_RANGE = "out_of_range"
    NOT_SUPPORTED = "not_supported"
    NO_PERMISSION = "no_permission"
    LOST = "lost"  # the device fell off the bus
    FAILED = "failed"  # any other error of the source


class SourceFault(StrEnum):
    """Why a poll of a source brought nothing."""

    REFUSED = "refused"  # connection refused or reset: the only fast sign of "down"
    TIMEOUT = "timeout"
    HTTP_STATUS = "http_status"
    TOO_LARGE = "too_large"
    UNPARSABLE = "unparsable"
    NO_SERIES = "no_series"  # a good page without one series of the engine
    LIBRARY_MISSING = "library_missing"  # NVML: no library or no driver on this machine
    DRIVER_MISMATCH = "driver_mismatch"
    NO_PERMISSION = "no_permission"
    NO_DEVICE = "no_device"
    HUNG = "hung"  # NVML: the call never returned
    CRASHED = "crashed"  # NVML: the process that called it died
    RELEASED = "released"  # NVML: let go because on-call asked for it
    FAILED = "failed"


class ProxyFault(StrEnum):
    """What went wrong on the data plane, outside the gate."""

    MALFORMED_HTTP = "malformed_http"
    HEADERS_TOO_LARGE = "headers_too_large"
    HEADER_TIMEOUT = "header_timeout"
    TOO_MANY_CONNECTIONS = "too_many_connections"  # no descriptors for another client
    BODY_TOO_LARGE = "body_too_large"
    BODY_MEMORY = "body_memory"  # max_body_bytes_total is spent
    BODY_TIMEOUT = "body_timeout"
    CONNECT_FAILED = "connect_failed"
    UPSTREAM_RETRIED = "upstream_retried"  # the keep-alive race, met and mended
    UPSTREAM_BROKE = "upstream_broke"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    CLIENT_GONE = "client_gone"
    CLIENT_STALLED = "client_stalled"
    DEFECT = "defect"  # an exception of kvctl's own
