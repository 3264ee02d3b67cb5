"""Refusals in full: the counts beside the reason, and when to come back."""

from math import ceil

from kvctl.core.case import Case, Obstacle
from kvctl.core.claim import NeverFits
from kvctl.core.events import Arrived, Reject
from kvctl.core.outcomes import RejectReason
from kvctl.core.retry import RetryHints

UNAVAILABLE_RETRY_S = 2.0


def never(event: Arrived, proof: NeverFits) -> Reject:
    """The refusal of a request that can never be served."""
    return Reject(
        event.request_id,
        proof.reason,
        needed_tokens=proof.needed_tokens,
        prompt_tokens=proof.prompt_tokens,
        limit_tokens=proof.limit_tokens,
        largest_output=proof.largest_output,
    )


def unavailable(event: Arrived, reason: RejectReason, retry: RetryHints) -> Reject:
    """The refusal while nobody is served."""
    prompt = sum(event.shape.prompts)
    wait = retry.spread(UNAVAILABLE_RETRY_S)
    return Reject(event.request_id, reason, needed_tokens=prompt, prompt_tokens=prompt, retry_after_s=wait)


def later(case: Case, obstacle: Obstacle, wait_s: float | None, peak: float, budget: int) -> Reject:
    """The refusal for now. ``peak`` is the forecast peak of what is in flight without it."""
    return Reject(
        case.event.request_id,
        obstacle.reason,
        needed_tokens=ceil(case.own),
        prompt_tokens=sum(case.event.shape.prompts),
        headroom_tokens=max(int(budget - peak), 0),
        limit_tokens=budget,
        retry_after_s=wait_s,
        claim=case.asked,
        forecast_tokens=case.peak,
    )


def seconds_at_best(obstacle: Obstacle | None, ahead: float, retry: RetryHints, now: float) -> float | None:
    """The same for somebody who only asks: nothing is promised or spread; None: no rate is known."""
    if obstacle is None:
        return 0.0
    if obstacle.seconds is not None:
        return obstacle.seconds
    amount, rate = obstacle.tokens + ahead, retry.rate(now)
    if obstacle.sequences is not None:
        amount, rate = obstacle.sequences, retry.ends_per_s(now)
    return None if rate is None else amount / rate


def seconds_until_gone(obstacle: Obstacle, ahead: float, retry: RetryHints, now: float) -> float:
    """Seconds until it is gone, as told to the caller; ``ahead``: KV tokens of waiting requests go first."""
    if obstacle.seconds is not None:
        return retry.after(obstacle.seconds, 1.0, now)
    if obstacle.sequences is not None:
        return retry.after(obstacle.sequences, retry.ends_per_s(now), now)
    return retry.after(obstacle.tokens + ahead, retry.rate(now), now)
