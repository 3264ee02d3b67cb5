"""What a decision means for the caller: which limit bound, and what would have had to be different.

Also the look back before a knob is moved: which of the last decisions would have fallen otherwise. It is an
approximation, deliberately on the careful side: each decision is weighed again with the new budget and with
what the look back itself admitted before it (each of those holds its own need for as long as requests held on
average). It does not see retries of refused callers, nor what their absence would have spared.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvctl.core.decisions import DecisionRecord, Scales, Story
from kvctl.core.outcomes import TENANT_LIMITS, Decision, Limit, Policy, RejectReason

USUAL_HOLD_S = 10.0  # used where no request ended in the stretch that is looked at

Advice = Callable[[DecisionRecord], Iterator[str]]


def remedies(record: DecisionRecord) -> list[str]:
    """What would have had to be different for an admission; empty: it was one."""
    if record.reason is None:
        return []
    return list(_ADVICE.get(record.reason, _engine)(record))


def _budget(record: DecisionRecord) -> Iterator[str]:
    peak, scales = record.forecast_tokens, record.scales
    if peak is None:
        return
    yield f"{round(peak) - scales.budget_tokens:,} KV tokens fewer in flight, or a request smaller by that"
    whole = scales.capacity_tokens * scales.pressure_ratio
    if 0 < peak <= whole:
        yield f"a margin of at most {_down(1.0 - peak / whole):g}% (it was {scales.margin_ratio * 100:g}%)"
    if scales.pressure_ratio < 1.0 and peak <= scales.capacity_tokens * (1.0 - scales.margin_ratio):
        yield f"no pressure from {scales.pressure_term} (it cut the budget to {scales.pressure_ratio:.0%})"
    if record.allowed_output is not None and record.asked.asked_output is None:
        yield f"a max_tokens in the request: without one {record.allowed_output:,} were allowed"


def _too_large(record: DecisionRecord) -> Iterator[str]:
    yield "an engine on which nothing else runs: by itself it is larger than the budget"
    whole, own = record.scales.capacity_tokens * record.scales.pressure_ratio, record.needed_tokens or 0
    if 0 < own <= whole:
        margin, was = _down(1.0 - own / whole), record.scales.margin_ratio * 100
        yield f"a margin of at most {margin:g}% (it was {was:g}%), and room beside the others"


def _prefill(record: DecisionRecord) -> Iterator[str]:
    tokens = record.asked.prompt_tokens
    yield f"fewer prompt tokens before it than its first token may wait for, or a prompt under {tokens:,}"
    yield "a longer ttft_target, or an engine that takes prompts in faster"


def _decode(record: DecisionRecord) -> Iterator[str]:  # noqa: ARG001 - one signature
    yield "fewer sequences that decode at once"
    yield "a longer itl_target"


def _slots(record: DecisionRecord) -> Iterator[str]:  # noqa: ARG001 - one signature
    yield "a free sequence slot: one request to end, or a larger --max-num-seqs of the engine"


def _turn(record: DecisionRecord) -> Iterator[str]:  # noqa: ARG001 - one signature
    yield "fewer that wait before it, or a higher priority"
    yield "a longer queue_max_wait, or more room"


def _share(record: DecisionRecord) -> Iterator[str]:
    yield "less in flight of its tenant, or a larger weight of it"
    yield f"more room: the budget was {record.scales.budget_tokens:,} KV tokens"


def _quota(record: DecisionRecord) -> Iterator[str]:
    limit = str(record.reason).removeprefix("tenant_")
    yield f"a larger {limit} of its tenant (settings, [[tenants]]), or less of the tenant's own before it"


def _background(record: DecisionRecord) -> Iterator[str]:  # noqa: ARG001 - one signature
    yield "an end of one that is generated in the background, or the same request without background"
    yield "a larger background_responses"


def _never(record: DecisionRecord) -> Iterator[str]:
    if record.largest_output:
        yield f"max_tokens of at most {record.largest_output:,}"
    else:
        yield f"a shorter prompt: it alone fills the limit of {record.limit_tokens or 0:,} tokens"


def _engine(record: DecisionRecord) -> Iterator[str]:
    if record.scales.draining:
        yield "no drain: kvctl undrain ends it"
    else:
        yield f"an engine that serves: it was {record.scales.state}"


def _rank(record: DecisionRecord) -> Iterator[str]:  # noqa: ARG001 - one signature
    yield "another rank of an engine that serves: the same request, sent again, goes to one"


_ADVICE: dict[RejectReason, Advice] = {
    RejectReason.KV_BUDGET: _budget,
    RejectReason.TOO_LARGE_NOW: _too_large,
    RejectReason.PREFILL_BACKLOG: _prefill,
    RejectReason.DECODE_CONCURRENCY: _decode,
    RejectReason.SEQUENCE_SLOTS: _slots,
    RejectReason.QUEUE_AHEAD: _turn,
    RejectReason.QUEUE_DEADLINE: _turn,
    RejectReason.TENANT_SHARE: _share,
    **dict.fromkeys(TENANT_LIMITS, _quota),
    RejectReason.BACKGROUND_RESPONSES: _background,
    RejectReason.CONTEXT: _never,
    RejectReason.MAX_CONTEXT: _never,
    RejectReason.CAPACITY: _never,
    RejectReason.RANK_GONE: _rank,
}


def _down(share: float) -> float:
    """A share in percent, rounded down to a tenth: what is advised must suffice."""
    return int(share * 1000.0) / 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LookBack:
    """The last decisions, weighed again. ``seconds`` is how far they go back."""

    seconds: float
    decisions: int
    refusals: int  # for lack of KV budget or by another limit
    refusals_admitted: int
    admissions_refused: int


def look_back(stories: Sequence[Story], seconds: float, budget: Callable[[Scales], float | None]) -> LookBack:
    """``stories`` latest first; ``budget`` gives the new budget for a moment's scales, None: no limit."""
    hold = _usual_hold(stories)
    held: deque[tuple[float, float]] = deque()  # (until, tokens) of requests that only the look back admits
    extra, refusals, admitted, refused = 0.0, 0, 0, 0
    for story in reversed(stories):
        record = story.decision
        while held and held[0][0] <= record.at:
            extra -= held.popleft()[1]
        was_refused = record.decision is Decision.REJECT_LATER or record.shadow
        refusals += was_refused
        if record.forecast_tokens is None:
            continue
        room = budget(record.scales)
        fits = room is None or record.forecast_tokens + extra <= room
        if was_refused and fits and (room is None or record.binding_limit is Limit.KV_BUDGET):
            admitted += 1
            own = float(record.needed_tokens or 0)
            extra += own
            held.append((record.at + hold, own))
        elif record.decision is Decision.ADMIT and not fits and not record.alone:
            refused += 1
    return LookBack(
        seconds=seconds,
        decisions=len(stories),
        refusals=refusals,
        refusals_admitted=admitted,
        admissions_refused=refused,
    )


def with_margin(margin_ratio: float) -> Callable[[Scales], float | None]:
    """What the budget of a moment would have been with another margin."""
    return lambda scales: scales.capacity_tokens * (1.0 - margin_ratio) * scales.pressure_ratio


def with_policy(policy: Policy) -> Callable[[Scales], float | None] | None:
    """The same for the policy; None: the records do not tell what another forecast would have said."""
    return (lambda _: None) if policy is Policy.NONE else None


def _usual_hold(stories: Iterable[Story]) -> float:
    held = [story.end.seconds for story in stories if story.end is not None]
    return sum(held) / len(held) if held else USUAL_HOLD_S
