"""The options of ``kvctl replay``, and what of them is to be replayed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvctl.sim.replay import Run, Scene
from kvctl.sim.replay_faults import Fault, parse_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options as given."""

    trace: Path | None = None
    logs: Sequence[Path] = ()
    engine: str | None = None
    policies: Sequence[str] = ()
    profile: str | None = None
    capacity_tokens: int | None = None
    context: int | None = None
    rate: float | None = None
    cap: str | None = None
    margins: str | None = None
    start: int = 0
    requests: int | None = None
    ttft: float = 2.0
    itl: float = 0.1
    retries: int = 2
    faults: Sequence[str] = ()
    prefix_caching: bool | None = None
    shared_prefix: int = 0
    prefix_sharing: str = "auto"
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Staged:
    """What is to be replayed, and what is compared where nothing is said."""

    scene: Scene
    policies: Sequence[str]
    margin: str
    recorded: Run | None = None
    remarks: Sequence[str] = ()


def fault_of(text: str) -> Fault:
    """A fault as the option has it. Raises ValueError with a text for the user."""
    try:
        return parse_fault(text)
    except ValueError as error:
        raise ValueError(f"fault {text!r}: {error}") from None
