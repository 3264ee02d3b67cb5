"""The engine's reported capacity against the plan's: is the pool what the flags and the config promise?

Pure; what reads the engine stands elsewhere. Law 3: an engine that reports nothing yields "unknown", never
"ok".
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvctl.plan.accounting import VllmAccounting
from kvctl.plan.planner import Plan
from kvctl.plan.vllm import pool_of_blocks


class Verdict(StrEnum):
    """How the two capacities relate."""

    AGREES = "agrees"
    SMALLER = "smaller"
    LARGER = "larger"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Crosscheck:
    """``planned`` and ``reported`` in KV tokens of one rank (None = unknown); ``sentence`` for people."""

    verdict: Verdict
    planned: int | None
    reported: int | None
    sentence: str

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "verdict": str(self.verdict),
            "planned": self.planned,
            "reported": self.reported,
            "sentence": self.sentence,
        }


def crosscheck(
    plan: Plan, reported_tokens: int | None, reported_blocks: int | None = None, tolerance: float = 0.02
) -> Crosscheck:
    """Compare the engine's report with the plan.

    With ``reported_blocks`` the memory's uncertainty drops out: the plan says what so many blocks hold, and
    only ``tolerance`` (relative) is allowed. Without it, anything in the plan's interval agrees.
    """
    if reported_tokens is None:
        return Crosscheck(Verdict.UNKNOWN, plan.pool.kv_tokens_logged, None, "the engine reports no capacity")
    low, planned, high = (pool.kv_tokens_logged for pool in (plan.low, plan.pool, plan.high))
    if reported_blocks is not None and isinstance(plan.accounting, VllmAccounting):
        low = planned = high = pool_of_blocks(
            plan.accounting.layout, plan.setup, reported_blocks
        ).kv_tokens_logged
    if low * (1 - tolerance) <= reported_tokens <= high * (1 + tolerance):
        verdict, word = Verdict.AGREES, "as planned"
    elif reported_tokens < low:
        verdict, word = Verdict.SMALLER, f"{1 - reported_tokens / max(1, low):.0%} less than the plan's least"
    else:
        verdict, word = Verdict.LARGER, f"{reported_tokens / max(1, high) - 1:.0%} more than the plan's most"
    return Crosscheck(
        verdict,
        planned,
        reported_tokens,
        f"the engine reports {reported_tokens:,} KV tokens: {word} ({planned:,})",
    )


def planned_capacity(plan: Plan) -> int:
    """KV tokens to count on where the engine reports none: the low end, less the null block."""
    return max(0, plan.low.kv_tokens - plan.accounting.block)
