"""Throttled cards, as an explanation of answers that come slower than usual.

A throttled card puts no pressure on the budget: the guards measure by themselves how fast the engine is
(prefill backlog, decode concurrency), and a second term for the same thing would count it twice. Power
capping is what a card under load does all day, and is not reported.
"""

from collections.abc import Iterable

from kvctl.core.telemetry import GpuSample

SLOWING = frozenset({"hw_slowdown", "hw_thermal", "sw_thermal", "hw_power_brake", "reliability"})
BEGINS_AFTER = 3  # readings in a row
ENDS_AFTER = 10


class Slowdowns:
    """Which cards are slowed down for long enough to be reported."""

    def __init__(self) -> None:
        self._streak: dict[str, int] = {}  # readings in a row with (positive) or without (negative) a reason
        self._told: dict[str, str] = {}

    @property
    def remark(self) -> str:
        """One clause for the status line; empty: no card is slowed down."""
        return "; ".join(self._told.values())

    def observe(self, samples: Iterable[GpuSample]) -> list[tuple[bool, str]]:
        """News of this reading: (whether a slowdown begins or else ends, the sentence)."""
        news = []
        for sample in samples:
            if sample.throttle_reasons is None:
                continue
            why = [reason for reason in sample.throttle_reasons if reason in SLOWING]
            streak = self._streak.get(sample.uuid, 0)
            streak = self._streak[sample.uuid] = max(streak, 0) + 1 if why else min(streak, 0) - 1
            if why and streak >= BEGINS_AFTER:
                begins = sample.uuid not in self._told
                self._told[sample.uuid] = _clause(sample, why)
                if begins:
                    news.append((True, f"{self._told[sample.uuid]}: answers may come slower"))
            elif -streak >= ENDS_AFTER and self._told.pop(sample.uuid, "") != "":
                news.append((False, f"{_card(sample)} is not slowed down any more"))
        return news


def _clause(sample: GpuSample, why: list[str]) -> str:
    heat = "" if sample.temperature_c is None else f", {sample.temperature_c:.0f} C"
    return f"{_card(sample)} is slowed down ({', '.join(why)}{heat})"


def _card(sample: GpuSample) -> str:
    return f"card {sample.index}" if sample.index is not None else f"card {sample.uuid}"
