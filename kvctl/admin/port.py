"""What the admin API asks of the daemon. The daemon implements ``AdminPort``; nothing else crosses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvctl.core.outcomes import SourceFault
from kvctl.core.status import GateStatus
from kvctl.core.telemetry import GpuSample
from kvctl.settings.model import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    """The whole daemon at one moment. ``now`` is monotonic, the clock of every ``at`` inside."""

    now: float
    started_at: float
    sentence: str  # the gate's, of the same moment as the numbers
    draining: bool
    engines: Mapping[str, GateStatus]  # by base URL
    gpus: tuple[GpuSample, ...] = ()
    gpu_fault: SourceFault | None = None  # why there is none


class AdminPort(Protocol):
    """The daemon, as the admin API sees it. Every method answers at once and raises nothing."""

    def status(self) -> DaemonStatus:
        """The state of now."""
        ...

    def settings(self) -> Settings:
        """The settings in force, overrides not counted."""
        ...

    def drain(self, *, draining: bool) -> None:
        """Admit nothing new from now on, or admit again. What runs goes on either way."""
        ...


class PublicPort(Protocol):
    """What the TCP listener shows: nothing there changes anything."""

    def metrics(self) -> tuple[bytes, str]:
        """The metrics page and its content type."""
        ...

    def readiness(self) -> tuple[bool, str]:
        """Whether callers are served, and the sentence that says why or why not."""
        ...
