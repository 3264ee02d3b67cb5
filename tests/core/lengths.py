"""Output lengths of a known law, for tables of survival."""

from math import exp

from kvctl.core.slots import SLOT_ENDS, SLOT_STARTS


def exponential_hazards(mean_tokens: float) -> list[float]:
    """Hazard of each slot when lengths are exponential with that mean."""
    return [1.0 - exp((a - b) / mean_tokens) for a, b in zip(SLOT_STARTS, SLOT_ENDS, strict=True)]
