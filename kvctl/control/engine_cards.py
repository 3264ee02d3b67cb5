"""Which of the watched cards are one engine's, with ``gpus = "auto"``: those that its processes compute on.

Law 3: unknown is not "none". While the cards are not known, every card counts, as with ``gpus = "all"``.
Cards once found stay the engine's while it restarts; so does a card that is lost or tells no processes.
"""

import asyncio
import logging
from collections.abc import Callable

from kvctl import logs
from kvctl.core.events import Event, GpusRead
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.base import GpuReading
from kvctl.gpu.owners import Owners, owners_of

log = logs.get("control.cards")

LOOK_AGAIN_S = 10.0
AUTO = ("auto",)


class EngineCards:
    """The cards of one engine. ``handle`` gets the events of its own cards.

    Args:
        name: The engine's, for the log.
        url: Its base URL.
        by_process: Whether to look for its processes; False: every card that is read is its own.
        handle: Takes the events.
        clock: Monotonic seconds.
        find: The processes behind a URL, in a thread.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        by_process: bool,
        handle: Callable[[Event], object],
        clock: Callable[[], float],
        find: Callable[[str], Owners] = owners_of,
    ) -> None:
        self._name = name
        self._url = url
        self._by_process = by_process
        self._handle = handle
        self._clock = clock
        self._find = find
        self._owners = Owners(why="not looked for yet")
        self._looked_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._told = ""
        self._found: frozenset[str] = frozenset()
        self.samples: tuple[GpuSample, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        """The cards that count as the engine's, as last read."""
        return tuple(sample.uuid for sample in self.samples)

    def take(self, event: Event, reading: GpuReading) -> None:
        """Take an event of the source, and the reading that it came with."""
        if isinstance(event, GpusRead):
            event = self._of_engine(event, reading) if self._by_process else event
            self.samples = event.samples
        self._handle(event)

    async def close(self) -> None:
        """End a search that is under way."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def _of_engine(self, event: GpusRead, reading: GpuReading) -> GpusRead:
        self._look()
        self._settle(reading)
        mine = tuple(sample for sample in event.samples if sample.uuid in self._found)
        return GpusRead(mine, named=True) if mine else GpusRead(event.samples, named=False)

    def _settle(self, reading: GpuReading) -> None:
        """Its cards are those that its processes are on now, and earlier ones that do not tell processes."""
        on = {uuid: {each.pid for each in found} for uuid, found in reading.processes.items()}
        for pids in (self._owners.pids, self._owners.group):
            if seen := {uuid for uuid, there in on.items() if there & pids}:
                self._found = frozenset(seen | {uuid for uuid in self._found if uuid not in on})
                break
        if self._found:
            self._tell(f"is on {', '.join(sorted(self._found))}, by its processes")
        elif self._looked_at > float("-inf") and self._looking is None:
            why = self._owners.why or self._nowhere(reading)
            self._tell(f"may be on any card that is watched: {why}")

    def _nowhere(self, reading: GpuReading) -> str:
        if not any(reading.processes.values()):
            return "NVML shows no process on any card; in a container it shows none of the host's"
        return f"none of its {len(self._owners.pids)} processes is among those that NVML shows"

    def _look(self) -> None:
        if self._looking is None and self._clock() - self._looked_at >= LOOK_AGAIN_S:
            self._looking = asyncio.get_running_loop().create_task(self._search(), name="kvctl-owners")

    async def _search(self) -> None:
        try:
            self._owners = await asyncio.to_thread(self._find, self._url)
        except OSError as error:
            self._owners = Owners(why=f"/proc cannot be read ({error.strerror or error})")
        finally:
            self._looked_at, self._looking = self._clock(), None

    def _tell(self, what: str) -> None:
        if what != self._told:
            self._told = what
            logs.event(log, logging.INFO, "engine_cards", f"engine {self._name} {what}", engine=self._name)
