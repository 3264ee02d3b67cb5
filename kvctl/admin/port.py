"""What the admin API asks of the daemon. The daemon implements ``AdminPort``; nothing else crosses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvctl.core.claim import Shape
from kvctl.core.decisions import DecisionRecord
from kvctl.core.outcomes import SourceFault
from kvctl.core.status import GateStatus
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.base import CardProcess
from kvctl.settings.model import Settings
from kvctl.tokens.base import CountingStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class CardDetails:
    """What is known of the cards. ``released_s``: for how long the driver stays released; None: it is not."""

    processes: Mapping[str, tuple[CardProcess, ...]] = field(default_factory=dict)  # by card
    engines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by engine, cards that count as its
    driver: str | None = None
    released_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    """The whole daemon at one moment. ``now`` is monotonic, the clock of every ``at`` inside."""

    now: float
    started_at: float
    sentence: str  # the gate's, of the same moment as the numbers
    draining: bool
    bypass: bool = False  # everything that the engines can serve is let in
    engines: Mapping[str, GateStatus]  # by base URL
    gpus: tuple[GpuSample, ...] = ()
    gpu_fault: SourceFault | None = None  # why there is none
    counting: Mapping[str, CountingStatus] = field(default_factory=dict)  # by engine
    cards: CardDetails = field(default_factory=CardDetails)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A setting that reads otherwise than before; both as an operator would write them."""

    key: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """What a reload did. ``revision`` counts the reloads that changed something, from 1 at the start."""

    revision: int
    applied: tuple[Moved, ...]
    needs_restart: tuple[Moved, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReload:
    """How the settings stand: the revision in force, and why the last reload was refused, if it was."""

    revision: int = 1
    problems: tuple[str, ...] = ()


class AdminPort(Protocol):
    """The daemon, as the admin API sees it. But for what is awaited, all answer at once and raise nothing."""

    def status(self) -> DaemonStatus:
        """The state of now."""
        ...

    def settings(self) -> Settings:
        """The settings in force, overrides not counted."""
        ...

    def drain(self, *, draining: bool, engine: str | None = None) -> None:
        """Admit nothing new from now on, or admit again; ``engine``: to that one. What runs goes on."""
        ...

    async def release_cards(self, seconds: float) -> None:
        """Release the cards' driver for ``seconds``; 0: open it again."""
        ...

    def outlook(self, shape: Shape) -> Mapping[str, DecisionRecord]:
        """What each engine that serves the shape's model would say to it now; nothing is charged."""
        ...

    async def reload(self, *, dry_run: bool = False) -> Reloaded:
        """Read the settings again and put them in force. Raises SettingsError, with the old ones kept.

        ``dry_run``: only say what that would do.
        """
        ...

    def last_reload(self) -> LastReload:
        """How the settings stand."""
        ...

    def metrics(self) -> tuple[Iterable[bytes], str]:
        """The metrics page, in parts that are made as they are asked for, and its content type."""
        ...


class PublicPort(Protocol):
    """What the TCP listener shows: nothing there changes anything."""

    def metrics(self) -> tuple[Iterable[bytes], str]:
        """The metrics page, in parts that are made as they are asked for, and its content type."""
        ...

    def readiness(self) -> tuple[bool, str]:
        """Whether callers are served, and the sentence that says why or why not."""
        ...
