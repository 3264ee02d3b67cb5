"""Human sentences for changes: the same text in log line, systemd status and ``kvctl status``."""

from kvctl.core.budget import Budget
from kvctl.core.outcomes import SERVING, BudgetReason, EngineState

_STATE_MEANS = {
    EngineState.STARTING: "the engine has not been seen yet; requests get 503",
    EngineState.UP: "telemetry is fresh",
    EngineState.LATE: "telemetry is late; the ledger alone decides",
    EngineState.STALE: "telemetry is stale; the budget shrinks to the fallback",
    EngineState.NO_TELEMETRY: "the engine answers, but its page says nothing to judge by; a guessed budget",
    EngineState.UNREACHABLE: "the engine cannot be reached; requests get 503",
    EngineState.ASLEEP: "the engine sleeps; requests get 503",
    EngineState.WEDGED: "requests are in flight but nothing moves; requests get 503",
    EngineState.TRIAL: "it did not move for a while; the next request is let in to see whether it does again",
    EngineState.FAULT: "a card of the engine is lost or broken; requests get 503",
}


def state_means(state: EngineState) -> str:
    """What a state of the engine means for callers."""
    return _STATE_MEANS[state]


def state_sentence(before: EngineState, after: EngineState) -> str:
    """One line for a change of state."""
    return f"engine {before} -> {after}: {_STATE_MEANS[after]}"


def budget_sentence(before: Budget, after: Budget, reason: BudgetReason) -> str:
    """One line for a change of budget: from, to, reason, and the figures behind it."""
    return (
        f"budget {before.tokens:,} -> {after.tokens:,} KV tokens ({reason}): capacity {after.capacity:,}, "
        f"margin {after.margin_ratio:.0%}, pressure {after.pressure_ratio:.2f}"
    )


def tick_sentence(budget: Budget, peak: float, leases: int, state: EngineState, *, draining: bool) -> str:
    """The state of things in one line; where nobody is served, that comes before any figure."""
    nobody = "" if state in SERVING else f"{_STATE_MEANS[state]}; "
    term = budget.binding_term
    pressure = "" if term is None else f", pressure {budget.pressure_ratio:.2f} from {term}"
    drain = ", draining" if draining else ""
    return (
        f"{nobody}budget {budget.tokens:,} of {budget.capacity:,} KV tokens "
        f"(margin {budget.margin_ratio:.0%}{pressure}), forecast peak {round(peak):,}, "
        f"{leases} in flight, engine {state}{drain}"
    )
