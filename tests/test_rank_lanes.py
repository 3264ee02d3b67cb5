"""A data-parallel engine: gates come and go with its ranks, and each sees its own part of the pages."""

import asyncio
import gc
from dataclasses import dataclass, field

import pytest

from kvctl.control.gatekeeper import Gatekeeper, LeaseHandle
from kvctl.control.journal import Journal
from kvctl.core.claim import Shape
from kvctl.core.events import DrainChanged, EngineDescribed, Reject, Scraped
from kvctl.core.gate import Gate
from kvctl.core.outcomes import Decision, EndReason, EngineState, RejectReason
from kvctl.core.pressure import RankTerm
from kvctl.core.queue import QueueConfig
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, RankSample
from kvctl.rank_lanes import RankLanes, whole

SHAPE = Shape(route="chat", model="m", prompts=(100,), asked_output=100)
INFO = EngineInfo(models=("m",), context_tokens=4096)


def sample(rank: str, usage: float = 0.0, **more: object) -> RankSample:
    return RankSample(
        rank=rank,
        at=1.0,
        capacity_tokens=10_000,
        capacity_exact=True,
        kv_usage_ratio=usage,
        running=0,
        waiting=0,
        generation_tokens_total=1.0,
        **more,  # type: ignore[arg-type]
    )


def page(*ranks: str, **more: object) -> Scraped:
    return Scraped(tuple(sample(rank, **more) for rank in ranks), 1.0)  # type: ignore[arg-type]


@dataclass
class Made:
    pins: bool = True
    queue: QueueConfig = field(default_factory=QueueConfig)
    changes: int = 0
    now: float = 1.0
    lanes: RankLanes = field(init=False)

    def __post_init__(self) -> None:
        self.lanes = RankLanes(self.keeper(), self.keeper, lambda: self.pins, self.changed)

    def keeper(self) -> Gatekeeper:
        return Gatekeeper(Gate(GateConfig(queue=self.queue)), lambda: self.now)

    def changed(self) -> None:
        self.changes += 1

    @property
    def ranks(self) -> list[str | None]:
        return [lane.rank for lane in self.lanes.lanes]


def test_one_rank_is_the_engine_and_costs_nothing() -> None:
    made = Made()
    lanes = made.lanes.lanes
    first = lanes[0]
    for _ in range(3):
        made.lanes.handle(page("0"))
    assert made.lanes.lanes is lanes
    assert lanes == [first]
    assert made.changes == 0


def test_the_end_of_a_lease_is_written_down_though_its_rank_is_gone() -> None:
    made, journal = Made(), Journal(10, lambda: made.now, lambda: made.now)
    made.lanes.handle(page("0", "1"))
    journal.watch("e", made.lanes.keepers[1])

    async def exchange() -> None:
        lease = await made.lanes.keepers[1].admit("1", SHAPE, "mine")
        assert isinstance(lease, LeaseHandle)
        made.lanes.handle(page("0"))
        lease.end(EndReason.FINISHED, output_tokens=5)

    asyncio.run(exchange())
    gc.collect()  # nobody holds its gate any more
    story = journal.find("mine")
    assert story is not None
    assert story["ended"]["output_tokens"] == 5


def test_who_waits_for_a_rank_that_goes_is_told_at_once() -> None:
    made = Made(queue=QueueConfig(max_wait_s=60.0))
    made.lanes.handle(page("0", "1"))
    keeper = made.lanes.keepers[1]

    async def wait() -> LeaseHandle | Reject:
        leases: list[LeaseHandle] = []
        while True:
            asked = asyncio.create_task(keeper.admit(str(len(leases)), SHAPE))
            await asyncio.sleep(0)
            if not asked.done():
                break
            lease = asked.result()
            assert isinstance(lease, LeaseHandle)
            leases.append(lease)
        made.lanes.handle(page("0"))
        told = await asyncio.wait_for(asked, 60.0)
        for lease in leases:
            lease.end(EndReason.FINISHED)
        return told

    told = asyncio.run(wait())
    assert isinstance(told, Reject)
    assert (told.decision, told.reason) == (Decision.UNAVAILABLE, RejectReason.RANK_GONE)
    assert told.retry_after_s is not None
    assert len(keeper.gate.ledger) == 0


def test_each_rank_has_its_own_pool_and_what_the_engine_told() -> None:
    made = Made()
    made.lanes.handle(EngineDescribed(INFO))
    made.lanes.handle(DrainChanged(draining=True))
    made.lanes.handle(page("0", "1"))
    assert made.ranks == ["0", "1"]
    gates = [keeper.gate for keeper in made.lanes.keepers]
    assert [gate.models for gate in gates] == [("m",), ("m",)]
    assert [gate.draining for gate in gates] == [True, True]
    assert [gate.status(1.0).capacity_tokens for gate in gates] == [10_000, 10_000]
    assert [gate.state for gate in gates] == [EngineState.UP, EngineState.UP]
    assert made.changes == 1


@pytest.mark.parametrize("more", [{"unsupported": "copies"}, {}])
def test_no_pins_no_split(more: dict[str, object]) -> None:
    made = Made(pins=bool(more))
    made.lanes.handle(page("0", "1", **more))
    assert made.ranks == [None]
    assert made.lanes.keepers[0].gate.status(1.0).capacity_tokens == 20_000


async def test_ranks_that_go_end_their_leases_all_the_same() -> None:
    """Law 1: whoever was admitted by a gate ends there, though the engine has fewer ranks now."""
    made = Made()
    made.lanes.handle(page("0", "1", "2"))
    gone = made.lanes.keepers[2]
    lease = await gone.admit("r", SHAPE)
    assert isinstance(lease, LeaseHandle)
    made.lanes.handle(page("0", "1"))
    assert made.ranks == ["0", "1"]
    lease.end(EndReason.FINISHED, output_tokens=5)
    assert len(gone.gate.ledger) == 0
    made.lanes.handle(page("0"))
    assert made.ranks == [None]


async def test_the_sum_is_shown_with_each_rank_beside_it() -> None:
    made = Made()
    made.lanes.handle(page("0", "1"))
    await made.lanes.keepers[1].admit("r", SHAPE)
    shown = whole([keeper.gate.status(1.0) for keeper in made.lanes.keepers])
    assert (shown.capacity_tokens, shown.leases) == (20_000, 1)
    assert [(rank.rank, rank.leases) for rank in shown.ranks] == [("0", 0), ("1", 1)]
    assert shown.sentence.startswith("2 ranks, ")
    await asyncio.sleep(0)


# --- where they cannot be pinned --------------------------------------------------------------------


def settled(*usage: float) -> float:
    term = RankTerm()
    for _ in range(200):
        term.observe([sample(str(rank), each) for rank, each in enumerate(usage)])
    return term.value


@pytest.mark.parametrize(
    ("usage", "value"),
    [
        ((0.9,), 1.0),
        ((0.5, 0.5), 1.0),
        ((0.6, 0.3), 0.75),
        ((0.9, 0.0), 0.5),  # never below one rank's own budget
        ((0.06, 0.0), 1.0),  # a single request is no imbalance
        ((0.8, 0.4, 0.4, 0.4), 0.625),
    ],
)
def test_the_budget_is_spent_when_the_fullest_rank_is(usage: tuple[float, ...], value: float) -> None:
    assert settled(*usage) == pytest.approx(value, abs=0.001)


def test_a_rank_that_is_not_read_proves_nothing() -> None:
    term = RankTerm()
    term.observe([sample("0", 0.9), RankSample(rank="1", at=1.0)])
    assert term.value == 1.0
