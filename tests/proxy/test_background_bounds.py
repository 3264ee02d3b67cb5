"""Background responses have bounds: of depth, of names, of number."""

import asyncio

import pytest

from kvctl.control.gatekeeper import LeaseHandle
from kvctl.core.events import Reconfigured
from kvctl.core.outcomes import EndReason
from kvctl.core.queue import QueueConfig
from kvctl.core.supply import GateConfig
from kvctl.proxy import told as told_module
from kvctl.proxy.seams import ProxyConfig
from kvctl.proxy.told import Beginning, Told, read_told
from tests.core.conversation import shape
from tests.proxy.harness import Rig, eventually, plain, post, rig
from tests.proxy.telling import CREATED, DONE, PATH, QUEUED, SMALL, Telling, begin, ended, heard, hurry


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come without long pauses."""
    hurry(monkeypatch)


# --- what nests past all bounds ----------------------------------------------------------------------

DEPTH = 20_000
DEEP = b'{"id":"resp_a","status":"queued","x":' + b"[" * DEPTH + b"]" * DEPTH + b"}"


def test_what_nests_past_all_bounds_is_no_response() -> None:
    assert read_told(DEEP) is None
    assert heard(lambda beginning: beginning.feed(b"data: " + DEEP + b"\n\n"), stream=True) == []

    def whole(beginning: Beginning) -> None:
        beginning.feed(DEEP)
        beginning.end()

    assert heard(whole, stream=False) == [None]


async def test_a_lease_outlives_no_answer_that_cannot_be_read() -> None:
    """Its end is judged by the page, or comes with the drain; and what is asked for is asked again."""
    async with rig(Telling(DONE, begin=plain(DEEP))) as it:
        assert (await begin(it)).endswith(DEEP)
        assert len(it.gate.ledger) == 1
        await it.proxy.drain(0.0)
        await ended(it, EndReason.SHUTDOWN)
    async with rig(Telling(plain(DEEP), plain(DEEP), DONE)) as it:
        await begin(it)
        await ended(it, EndReason.FINISHED)


# --- names and numbers -------------------------------------------------------------------------------


async def test_a_name_of_any_length_is_not_kept() -> None:
    name = b"n" * 100_000
    begun = QUEUED.partition(b"\r\n\r\n")[2].replace(b"resp_a", name)
    async with rig(Telling(DONE, begin=plain(begun))) as it:
        assert (await begin(it)).endswith(begun)
        assert len(it.gate.ledger) == 1
        assert it.proxy._handler._ways.makers.of(name.decode()) is None
        await it.proxy.drain(0.0)


def test_a_large_beginning_in_small_pieces_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work grows with what comes, and not with its square."""
    searched = [0]

    class Counted:
        def search(self, data: bytearray, start: int) -> None:
            searched[0] += len(data) - start

    monkeypatch.setattr(told_module, "_BORDER", Counted())
    beginning = Beginning(list[Told | None]().append, stream=True)
    for _ in range(1000):
        beginning.feed(b"x" * 1000)
    assert searched[0] < 2 * 1000 * 1000


@pytest.mark.parametrize("border", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_a_border_is_found_wherever_it_is_cut(border: bytes) -> None:
    event = CREATED.rstrip(b"\n").replace(b"\n", border[: len(border) // 2]) + border
    for cut in range(1, len(event)):
        pieces = (b"data: {}" + border, event[:cut], event[cut:])

        def feed(beginning: Beginning, pieces: tuple[bytes, ...] = pieces) -> None:
            reading: Beginning | None = beginning
            for piece in pieces:
                reading = reading.feed(piece) if reading is not None else None

        assert [told and told.id for told in heard(feed, stream=True)] == ["resp_a"]


# --- the most ----------------------------------------------------------------------------------------

ROOM = GateConfig(
    capacity_tokens=80, capacity_force=True, ttft_target_s=None, queue=QueueConfig(max_wait_s=600.0)
)


async def filled(it: Rig) -> list[LeaseHandle]:
    """Leases in whose way all others are; who comes now waits."""
    it.keeper.handle(Reconfigured(ROOM))
    held = [await it.keeper.admit(f"first-{number}", shape(8, 8)) for number in range(4)]
    return [lease for lease in held if isinstance(lease, LeaseHandle)]


async def test_those_that_wait_in_the_gates_queue_have_their_places() -> None:
    """Many may be let in at once that all came while there was room."""
    async with rig(Telling(QUEUED), config=ProxyConfig(background_responses=2)) as it:
        held = await filled(it)
        asked = [asyncio.create_task(it.post(SMALL, PATH)) for _ in range(4)]
        await eventually(lambda: sum(task.done() for task in asked) == 2)
        refused = [task.result() for task in asked if task.done()]
        assert all(b"background_responses" in answer for answer in refused)
        assert (len(held), len(it.gate._room)) == (4, 2)
        for lease in held:
            lease.end(EndReason.FINISHED)
        await asyncio.gather(*asked)
        assert it.proxy.background_responses == 2
        await it.proxy.drain(0.0)


async def test_whoever_leaves_the_queue_gives_its_place_back() -> None:
    async with rig(Telling(QUEUED, DONE), config=ProxyConfig(background_responses=1)) as it:
        held = await filled(it)
        wire = await it.client()
        await wire.send(post(SMALL, PATH))
        await eventually(lambda: len(it.gate._room) == 1)
        wire.reset()
        await eventually(lambda: len(it.gate._room) == 0)
        for lease in held:
            lease.end(EndReason.FINISHED)
        assert b" 200 " in await it.post(SMALL, PATH)
        await eventually(lambda: len(it.reasons) == len(held) + 1)
