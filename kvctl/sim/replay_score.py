"""A replay's figures.

Goodput is calls a second of the arrivals' span that came complete, the first token within ``ttft_s`` of the
first attempt and at most ``itl_s`` per token after it. Refused and broken calls are misses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvctl.sim.replay import Call, Run
from kvctl.sim.score import quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a good answer keeps: seconds to the first token, and per token after it."""

    ttft_s: float = 2.0
    itl_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One policy's figures; None where nothing of the kind happened."""

    goodput_rps: float
    goodput_frac: float
    goodput_tokens_per_s: float
    completed: int
    refused: int
    preemptions: int
    recomputed_frac: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    kv_usage_mean: float
    retry_success_frac: float | None


PRINTED = tuple(name for name in Figures.__slots__ if name != "goodput_tokens_per_s")
"""What a replay's JSON holds of a policy: no more, so that whoever reads it can rely on its form."""


def ttft(call: Call) -> float | None:
    """Seconds from the first attempt to the first token."""
    return None if call.first_at is None else call.first_at - call.row.at_s


def taken_in(call: Call) -> float | None:
    """Seconds from the attempt that got in to the first token."""
    return None if call.first_at is None or call.asked_at is None else call.first_at - call.asked_at


def tpot(call: Call) -> float | None:
    """Seconds per output token after the first, of a complete answer."""
    if call.ended_at is None or call.first_at is None:
        return None
    return (call.ended_at - call.first_at) / max(call.output - 1, 1)


def is_good(call: Call, target: Target) -> bool:
    """Whether a call was served within its targets."""
    first, each = ttft(call), tpot(call)
    return first is not None and each is not None and first <= target.ttft_s and each <= target.itl_s


def figures(run: Run, target: Target) -> Figures:
    """All figures of a run."""
    calls, seconds = run.calls, max(run.calls[-1].row.at_s, 1e-9)
    good = [call for call in calls if is_good(call, target)]
    retries = sum(call.retries for call in calls)
    computed, needed = run.computed_prompt_tokens, run.prompt_tokens - run.cached_prompt_tokens
    return Figures(
        goodput_rps=len(good) / seconds,
        goodput_frac=len(good) / len(calls),
        goodput_tokens_per_s=sum(call.output for call in good) / seconds,
        completed=sum(call.complete for call in calls),
        refused=sum(call.given_up and call.first_at is None for call in calls),
        preemptions=run.preemptions,
        recomputed_frac=1.0 - needed / computed if computed > needed else 0.0,
        ttft_p50_s=_quantile(calls, ttft, 0.5),
        ttft_p99_s=_quantile(calls, ttft, 0.99),
        tpot_p99_s=_quantile(calls, tpot, 0.99),
        kv_usage_mean=sum(run.usages) / len(run.usages) if run.usages else 0.0,
        retry_success_frac=sum(call.retries_admitted for call in calls) / retries if retries else None,
    )


def document(run: Run, target: Target) -> Mapping[str, float | None]:
    """The figures as they are printed in JSON."""
    found = figures(run, target)
    return {name: getattr(found, name) for name in PRINTED}


def recorded_document(run: Run, target: Target) -> Mapping[str, float | None]:
    """The figures of calls that really were made: what only the engine knows is unknown."""
    return {**document(run, target), **dict.fromkeys(("preemptions", "recomputed_frac", "kv_usage_mean"))}


def _quantile(calls: list[Call], of: Callable[[Call], float | None], share: float) -> float | None:
    return quantile([value for call in calls if (value := of(call)) is not None], share)
