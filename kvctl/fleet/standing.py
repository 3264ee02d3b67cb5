"""How much room this box has, in one figure that any load balancer can weigh.

Headroom over the engines that serve, as a share of their budgets: 1 is an idle box, 0 a full one. A box that
drains or serves nobody has none.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvctl.core.outcomes import SERVING
from kvctl.core.status import GateStatus

LEAST_RATE = 0.01  # of requests: a report of 0 would be thrown away whole by its reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """This box at one moment. ``usage_ratio`` None: no engine tells its pool's usage.

    ``forecast_ratio`` is the forecast peak over the budget, the measure by which the gate refuses: above 1
    after a fall of the budget. ``reason`` says in a word why it does not serve.
    """

    serving: bool
    draining: bool
    reason: str
    headroom_tokens: int
    budget_tokens: int
    forecast_ratio: float
    usage_ratio: float | None
    running: int
    waiting: int

    @property
    def headroom_ratio(self) -> float:
        """Headroom as a share of the budget, 0..1."""
        if not self.serving or self.draining or self.budget_tokens <= 0:
            return 0.0
        return min(max(self.headroom_tokens / self.budget_tokens, 0.0), 1.0)


def standing_of(gates: Iterable[GateStatus]) -> Standing:
    """The standing of a box with these engines."""
    gates = tuple(gates)
    serving = [gate for gate in gates if gate.state in SERVING and not gate.draining]
    drained = bool(gates) and all(gate.draining for gate in gates)
    budget = sum(gate.budget_tokens for gate in serving)
    peak = sum(gate.forecast_peak_tokens for gate in serving)
    usages = [
        (rank.kv_usage_ratio, rank.capacity_tokens or 1)
        for gate in serving
        for rank in gate.ranks
        if rank.kv_usage_ratio is not None
    ]
    pool = sum(tokens for _, tokens in usages)
    return Standing(
        serving=bool(serving),
        draining=drained,
        reason=str(gates[0].state) if gates and not serving else "",
        headroom_tokens=max(int(budget - peak), 0),
        budget_tokens=budget,
        forecast_ratio=peak / budget if budget > 0 else 1.0,
        usage_ratio=sum(ratio * tokens for ratio, tokens in usages) / pool if usages else None,
        running=sum(gate.leases for gate in serving),
        waiting=sum(sum(gate.queue.waiting.values()) for gate in serving if gate.queue is not None),
    )
