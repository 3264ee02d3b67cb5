"""gpus = "auto": an engine's cards by its processes, and everything while those cannot be told."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from kvctl.control.engine_cards import LOOK_AGAIN_S, EngineCards
from kvctl.core.events import CardsFailed, Event, GpuReadFailed, GpusRead
from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.base import CardProcess, GpuReading
from kvctl.gpu.owners import Owners

CARDS = tuple(GpuSample(uuid=f"GPU-{i}", at=0.0, index=i) for i in range(4))


@dataclass
class Machine:
    """Who computes where, and whom the engine's port leads to."""

    found: Owners | OSError = field(default_factory=lambda: Owners(pids=frozenset({10, 11})))
    on: dict[str, tuple[int, ...]] = field(default_factory=dict)
    now: float = 100.0
    looked: int = 0
    told: list[Event] = field(default_factory=list)

    def find(self, url: str) -> Owners:
        assert url == "http://127.0.0.1:8000"
        self.looked += 1
        if isinstance(self.found, OSError):
            raise self.found
        return self.found

    def cards(self, *, by_process: bool = True) -> EngineCards:
        return EngineCards(
            "llama",
            "http://127.0.0.1:8000",
            by_process=by_process,
            handle=self.told.append,
            clock=lambda: self.now,
            find=self.find,
        )

    async def read(self, cards: EngineCards, *samples: GpuSample) -> GpusRead:
        """The second of two readings: by then the search that the first began has ended."""
        found = samples or CARDS
        processes = {u: tuple(CardProcess(pid=pid) for pid in pids) for u, pids in self.on.items()}
        for _ in range(2):
            cards.take(GpusRead(found), GpuReading(samples=found, processes=processes))
            if cards._looking is not None:
                await cards._looking
                await asyncio.sleep(0)
        event = self.told[-1]
        assert isinstance(event, GpusRead)
        return event


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="kvctl.control")
    return lambda: [record.getMessage() for record in caplog.records]


async def test_its_own_cards_and_no_others(said: Callable[[], list[str]]) -> None:
    """D09: whatever CUDA calls them, the cards are those that the engine's processes compute on."""
    machine = Machine(on={"GPU-0": (7,), "GPU-1": (11, 7), "GPU-2": (10,), "GPU-3": ()})
    cards = machine.cards()
    event = await machine.read(cards)
    assert [sample.uuid for sample in event.samples] == ["GPU-1", "GPU-2"]
    assert event.named
    assert cards.uuids == ("GPU-1", "GPU-2")
    await machine.read(cards)
    assert said() == ["engine llama is on GPU-1, GPU-2, by its processes"]
    cards.take(CardsFailed(("GPU-0",)), GpuReading())
    assert machine.told[-1] == CardsFailed(("GPU-0",))
    await cards.close()


async def test_its_control_group_where_the_server_itself_is_on_none() -> None:
    machine = Machine(Owners(pids=frozenset({10}), group=frozenset({10, 12})), on={"GPU-3": (12,)})
    assert [sample.uuid for sample in (await machine.read(machine.cards())).samples] == ["GPU-3"]


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (Machine(Owners(why="no process that kvctl may see listens on port 8000")), "listens on port 8000"),
        (Machine(on={"GPU-0": ()}), "in a container it shows none"),
        (Machine(on={"GPU-0": (4_000_000,)}), "none of its 2 processes is among those that NVML shows"),
        (Machine(PermissionError(13, "denied")), "/proc cannot be read (denied)"),
    ],
)
async def test_what_cannot_be_told_counts_every_card(
    machine: Machine, why: str, said: Callable[[], list[str]]
) -> None:
    event = await machine.read(machine.cards())
    assert event == GpusRead(CARDS, named=False)
    (line,) = said()
    assert line.startswith("engine llama may be on any card that is watched: ")
    assert why in line


async def test_it_keeps_its_cards_while_it_restarts_and_when_they_are_lost() -> None:
    machine = Machine(on={"GPU-1": (10,), "GPU-2": (11,), "GPU-0": ()})
    cards = machine.cards()
    await machine.read(cards)
    machine.on = {"GPU-0": (), "GPU-1": (), "GPU-2": ()}
    assert len((await machine.read(cards)).samples) == 2, "it is down"
    machine.on = {"GPU-0": (), "GPU-2": (11,)}  # a lost card tells no processes
    lost = replace(CARDS[1], lost=True)
    event = await machine.read(cards, CARDS[0], lost, CARDS[2])
    assert [sample.uuid for sample in event.samples] == ["GPU-1", "GPU-2"]
    machine.on = {"GPU-0": (10,), "GPU-1": (), "GPU-2": ()}
    assert [sample.uuid for sample in (await machine.read(cards)).samples] == ["GPU-0"], "it has moved"


async def test_it_is_looked_for_again_now_and_then() -> None:
    machine = Machine()
    cards = machine.cards()
    await machine.read(cards)
    await machine.read(cards)
    assert machine.looked == 1
    machine.now += LOOK_AGAIN_S
    await machine.read(cards)
    assert machine.looked == 2
    await cards.close()


async def test_where_cards_are_named_nothing_is_looked_for() -> None:
    machine = Machine()
    cards = machine.cards(by_process=False)
    event = await machine.read(cards)
    assert event == GpusRead(CARDS)
    assert machine.looked == 0
    cards.take(GpuReadFailed(SourceFault.HUNG), GpuReading())
    assert machine.told[-1] == GpuReadFailed(SourceFault.HUNG)
    assert cards.uuids == tuple(card.uuid for card in CARDS)
