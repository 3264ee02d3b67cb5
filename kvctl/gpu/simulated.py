"""A card without a driver, for the demo, for tests and for trying kvctl on a machine without a GPU.

``SimulatedCard`` lives in this process. Given a path it also publishes its state there, and
``FollowedCard`` reads such a file, so that a test or the demo can move memory under a daemon that runs
as a process of its own. The file is JSON: ``{"total_bytes": N, "free_bytes": N, "lost": false}``.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvctl.core.outcomes import Absence, SourceFault
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.base import GpuReading
from kvctl.gpu.faults import CardEvent

NAME = "simulated card"
UUID = "GPU-00000000-0000-0000-0000-000000000000"
_LARGEST_FILE = 4096
_BYTES = ("total_bytes", "free_bytes", "used_bytes", "reserved_bytes")


class CardFull(Exception):  # noqa: N818 - named as the state that it tells
    """More memory was asked of a simulated card than it has free."""


class SimulatedCard:
    """One card whose memory the caller moves. All sizes are bytes.

    Args:
        total_bytes: Size of the card.
        used_bytes: What is taken from the start: the engine's weights and its KV pool.
        uuid: How the card calls itself.
        path: Where to publish the state for a ``FollowedCard``; None: nowhere.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        total_bytes: int,
        used_bytes: int = 0,
        *,
        uuid: str = UUID,
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= used_bytes <= total_bytes or total_bytes == 0:
            raise ValueError(f"a card of {total_bytes} bytes cannot have {used_bytes} in use")
        self.uuid = uuid
        self.total_bytes = total_bytes
        self.used_bytes = used_bytes
        self.lost = False
        self._path = path
        self._clock = clock
        self._publish()

    @property
    def free_bytes(self) -> int:
        """What nobody holds."""
        return self.total_bytes - self.used_bytes

    def take(self, size: int) -> None:
        """Somebody allocates ``size`` bytes. Raises CardFull if they are not free."""
        if not 0 <= size <= self.free_bytes:
            raise CardFull(f"{size} bytes asked, {self.free_bytes} free")
        self.used_bytes += size
        self._publish()

    def release(self, size: int) -> None:
        """Somebody gives ``size`` bytes back. Raises ValueError if so much was not in use."""
        if not 0 <= size <= self.used_bytes:
            raise ValueError(f"{size} bytes given back, {self.used_bytes} in use")
        self.used_bytes -= size
        self._publish()

    def lose(self, *, lost: bool = True) -> None:
        """Fall off the bus, or come back to it."""
        self.lost = lost
        self._publish()

    async def read(self) -> GpuReading:
        """One sample of the card."""
        return GpuReading(samples=(_sample(self.uuid, self._clock(), _state(self)),))

    async def pause(self, seconds: float) -> tuple[CardEvent, ...]:
        """Nothing happens of itself."""
        await asyncio.sleep(seconds)
        return ()

    async def close(self) -> None:
        """Nothing is held."""

    def _publish(self) -> None:
        if self._path is not None:
            write_card_file(self._path, _state(self))


class FollowedCard:
    """Reads the file that a ``SimulatedCard`` of another process, or anybody, writes."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock

    async def read(self) -> GpuReading:
        """The card as the file tells it; a file that cannot be used is a fault, not an exception."""
        started = self._clock()
        try:
            state = _read_card_file(self._path)
        except OSError as error:
            return GpuReading(fault=SourceFault.FAILED, detail=f"{self._path}: {error.strerror or error}")
        except ValueError as error:
            return GpuReading(fault=SourceFault.UNPARSABLE, detail=f"{self._path}: {error}")
        return GpuReading(samples=(_sample(UUID, started, state),), seconds=self._clock() - started)

    async def pause(self, seconds: float) -> tuple[CardEvent, ...]:
        """Nothing happens of itself."""
        await asyncio.sleep(seconds)
        return ()

    async def close(self) -> None:
        """Nothing is held."""


def write_card_file(path: Path, state: dict[str, Any]) -> None:
    """Put a card's state where a ``FollowedCard`` reads it, whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(state))
    fresh.replace(path)


def _state(card: SimulatedCard) -> dict[str, Any]:
    return {"total_bytes": card.total_bytes, "free_bytes": card.free_bytes, "lost": card.lost}


def _read_card_file(path: Path) -> dict[str, Any]:
    """The file's state. Raises OSError, or ValueError for what is not a card."""
    if not path.is_file():  # a pipe would keep the loop waiting
        raise FileNotFoundError(2, "no such file")
    with path.open("rb") as file:
        text = file.read(_LARGEST_FILE + 1)
    if len(text) > _LARGEST_FILE:
        raise ValueError("too large for a simulated card")
    state = json.loads(text)
    if not isinstance(state, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - bad content, not a bad argument
    return state


def _sample(uuid: str, at: float, state: dict[str, Any]) -> GpuSample:
    """A sample of what ``state`` says; what is odd in it is absent (law 3)."""
    if state.get("lost"):
        absent = dict.fromkeys(_BYTES, Absence.LOST)
        return GpuSample(uuid=uuid, at=at, index=0, name=NAME, lost=True, absent=absent)
    total, free = state.get("total_bytes"), state.get("free_bytes")
    if not (isinstance(total, int) and isinstance(free, int) and 0 <= free <= total > 0):
        absent = dict.fromkeys(_BYTES, Absence.OUT_OF_RANGE)
        return GpuSample(uuid=uuid, at=at, index=0, name=NAME, absent=absent)
    return GpuSample(
        uuid=uuid,
        at=at,
        index=0,
        name=NAME,
        total_bytes=total,
        free_bytes=free,
        used_bytes=total - free,
        reserved_bytes=0,
        throttle_reasons=(),
        absent={"temperature_c": Absence.MISSING, "ecc_uncorrected_total": Absence.MISSING},
    )
