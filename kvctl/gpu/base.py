"""The interface of a source of GPU readings, and the pauses between attempts to get one."""

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


class Backoff:
    """When to try again: 1, 2, 4 ... 60 seconds after a failure, on the clock of the caller's ``now``."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 60.0) -> None:
        self._first = first_s
        self._longest = longest_s
        self._pause = 0.0
        self._due_at = 0.0

    def due(self, now: float) -> bool:
        """Whether the pause after the last failure is over."""
        return not self._pause or now >= self._due_at

    def failed(self, now: float) -> None:
        """It failed at ``now``: pause, longer than the last time."""
        self._pause = min(self._pause * 2, self._longest) if self._pause else self._first
        self._due_at = now + self._pause

    def reset(self) -> None:
        """It works again."""
        self._pause = 0.0
