"""The interface of a source of GPU readings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.faults import CardEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class CardProcess:
    """One process that computes on a card. ``used_bytes`` None: the driver does not say."""

    pid: int
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One poll: samples, or the fault for which there are none. ``seconds``: how long it took.

    ``processes``: by UUID, the processes that compute on a card; a card that is missing does not tell.
    """

    samples: tuple[GpuSample, ...] = ()
    fault: SourceFault | None = None
    detail: str = ""
    seconds: float = 0.0
    processes: Mapping[str, tuple[CardProcess, ...]] = field(default_factory=dict)
    driver: str | None = None


class GpuSource(Protocol):
    """Something that reads cards. ``read`` never raises and never outlives its deadline."""

    async def read(self) -> GpuReading:
        """Read the selected cards once."""
        ...

    async def pause(self, seconds: float) -> tuple[CardEvent, ...]:
        """Wait for ``seconds``; messages of the driver end the pause early, and are returned."""
        ...

    async def close(self) -> None:
        """Release the driver; a later ``read`` opens it again."""
        ...
