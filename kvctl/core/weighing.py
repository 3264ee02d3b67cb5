"""The forecast peak with a newcomer: bounded where that will do, else read off the curve."""

from kvctl.core.case import Case
from kvctl.core.demand import Demand
from kvctl.core.outcomes import Policy
from kvctl.core.supply import Supply


def bounded(case: Case, demand: Demand, supply: Supply) -> bool:
    """Whether it fits by an upper bound of the peak: then nobody needs to look at curves."""
    asked, key = case.asked, case.key
    peak = demand.most_with(asked, key) + supply.unattributed
    if peak > supply.budget.tokens:
        return False
    case.peak, case.bounded = peak, True
    case.cached = demand.cached(asked, key) if asked.prefixes else 0
    return True


def weigh(case: Case, demand: Demand, supply: Supply, policy: Policy, *, may_wait: bool = False) -> None:
    """Set the peak with it, read off the curve; ``may_wait``: at most the others' peak and its own."""
    case.peak = demand.peak_with(case.asked, case.candidate, policy) + supply.unattributed
    case.bounded, case.cached = False, case.candidate.cached
    if may_wait and case.peak > supply.budget.tokens:
        case.peak = min(case.peak, demand.peak(policy) + supply.unattributed + case.own)
