"""The first card of this machine, for ``kvctl plan --measure``."""

import asyncio

from kvctl.control.planning import smallest_card
from kvctl.gpu.base import GpuReading
from kvctl.gpu.sources import make_source
from kvctl.plan import Card, PlanError

_TIMEOUT_S = 5.0


def measured_card() -> Card:
    """The smallest card's total memory as the driver says it. Raises PlanError where there is none."""
    reading = asyncio.run(_read())
    card = smallest_card(reading.samples)
    if card is None:
        why = reading.detail or (str(reading.fault) if reading.fault else "no card answered")
        raise PlanError(
            f"--measure: no GPU can be read on this machine ({why}); give --gpu NAME or --gpu GiB"
        )
    return card


async def _read() -> GpuReading:
    source = make_source(["all"], timeout_s=_TIMEOUT_S)
    if source is None:
        return GpuReading()
    try:
        return await source.read()
    finally:
        await source.close()
