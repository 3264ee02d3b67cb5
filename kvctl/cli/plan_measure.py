"""The first card of this machine, for ``kvctl plan --measure``."""

import asyncio

from kvctl.gpu.base import GpuReading
from kvctl.gpu.sources import make_source
from kvctl.plan import GIB, Card, PlanError

_TIMEOUT_S = 5.0


def measured_card() -> Card:
    """The smallest card's total memory as the driver says it. Raises PlanError where there is none."""
    reading = asyncio.run(_read())
    sizes = [(s.total_bytes, s.name) for s in reading.samples if s.total_bytes is not None and not s.lost]
    if not sizes:
        why = reading.detail or (str(reading.fault) if reading.fault else "no card answered")
        raise PlanError(
            f"--measure: no GPU can be read on this machine ({why}); give --gpu NAME or --gpu GiB"
        )
    total, name = min(sizes)
    return Card(name or "this machine's card", total / GIB, seen=True)


async def _read() -> GpuReading:
    source = make_source(["all"], timeout_s=_TIMEOUT_S)
    if source is None:
        return GpuReading()
    try:
        return await source.read()
    finally:
        await source.close()
