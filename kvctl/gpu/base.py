"""The interface of a source of GPU readings."""

from dataclasses import dataclass
from typing import Protocol

from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import GpuSample


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One poll: samples, or the fault for which there are none. ``seconds``: how long it took."""

    samples: tuple[GpuSample, ...] = ()
    fault: SourceFault | None = None
    detail: str = ""
    seconds: float = 0.0


class GpuSource(Protocol):
    """Something that reads cards. ``read`` never raises and never outlives its deadline."""

    async def read(self) -> GpuReading:
        """Read the selected cards once."""
        ...

    async def close(self) -> None:
        """Let go of the driver."""
        ...
