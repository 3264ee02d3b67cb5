"""Background responses before engines that are slow, deaf, guarded or forgetful, byte by byte."""

import asyncio
import json
from collections.abc import Callable

import pytest

from kvctl.control.gatekeeper import LeaseHandle
from kvctl.core.events import Reconfigured
from kvctl.core.outcomes import EndReason
from kvctl.core.queue import QueueConfig
from kvctl.core.supply import GateConfig
from kvctl.proxy import told as told_module
from kvctl.proxy import watching
from kvctl.proxy.seams import ProxyConfig
from kvctl.proxy.told import MOST_BEGINNING, Beginning, Told, read_told
from tests.core.conversation import shape
from tests.proxy.harness import Rig, Script, Wire, eventually, get, plain, post, rig
from tests.proxy.several import Member, crowd

PATH = "/v1/responses"
BODY = b'{"model":"m","input":"hi","background":true}'
SMALL = BODY[:-1] + b',"max_output_tokens":8}'
LOST = plain(b'{"error":{"message":"not found"}}', "404 Not Found")


def told(status: str, **more: object) -> bytes:
    """A response as the engine tells it."""
    document = {"id": "resp_a", "created_at": 5, "background": True, "status": status, "output": []}
    return plain(json.dumps(document | more).encode())


QUEUED = told("queued")
DONE = told("completed", usage={"input_tokens": 3, "output_tokens": 9, "total_tokens": 12})


class Telling:
    """Begins a response, and answers each question with the next of ``answers``, the last again and again."""

    def __init__(self, *answers: bytes, begin: bytes = QUEUED, held: asyncio.Event | None = None) -> None:
        self._answers = list(answers)
        self._begin = begin
        self._held = held
        self.begun = 0
        self.headers: list[dict[bytes, bytes]] = []  # of each question

    async def __call__(self, wire: Wire) -> None:
        while True:
            request = await wire.request()
            if request.line.startswith(b"POST"):
                self.begun += 1
                if self._held is not None:
                    await self._held.wait()
                await wire.send(self._begin)
            else:
                self.headers.append(dict(request.headers))
                left = self._answers
                await wire.send(left.pop(0) if len(left) > 1 else left[0])


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come without long pauses."""
    monkeypatch.setattr(watching, "LOOK_S", 0.02)
    monkeypatch.setattr(watching, "FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(watching, "LOOKS_PER_S", 1000.0)
    monkeypatch.setattr(watching, "BUSY_SHARE", 0)


async def begin(it: Rig, *lines: bytes) -> bytes:
    return await it.post(BODY, PATH, *lines)


async def ended(it: Rig, *reasons: EndReason) -> None:
    await eventually(lambda: len(it.reasons) == len(reasons))
    assert it.reasons == list(reasons)


async def test_the_callers_key_asks_for_it() -> None:
    script = Telling(QUEUED, DONE)
    async with rig(script) as it:
        answer = await begin(it, b"Authorization: Bearer mine")
        assert answer.endswith(QUEUED.partition(b"\r\n\r\n")[2])
        await ended(it, EndReason.FINISHED)
    assert script.headers[0][b"Authorization"] == b"Bearer mine"


async def test_a_caller_that_leaves_before_the_answer_leaves_a_lease() -> None:
    """The engine may have begun: its answer is awaited, and what it generates is looked after."""
    held = asyncio.Event()
    script = Telling(QUEUED, DONE, held=held)
    async with rig(script) as it:
        wire = await it.client()
        await wire.send(post(BODY, PATH))
        await eventually(lambda: script.begun == 1)
        wire.reset()
        await asyncio.sleep(0.1)
        assert len(it.gate.ledger) == 1
        assert not it.reasons
        held.set()
        await ended(it, EndReason.FINISHED)
        assert it.ended[0].record.output_tokens == 9


async def test_servers_that_know_their_own_responses_only() -> None:
    """Some of an engine's servers do not know it: it lives, and its end is found all the same."""
    async with rig(Telling(LOST, QUEUED, *[LOST] * 15, QUEUED, *[LOST] * 15, DONE)) as it:
        await begin(it)
        await ended(it, EndReason.FINISHED)


async def test_one_that_no_server_knows_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    script = Telling(QUEUED, LOST)
    async with rig(script) as it:
        await begin(it)
        await ended(it, EndReason.ENGINE_FORGOT)
    assert len(script.headers) == 1 + watching.MISSES
    assert all(headers[b"Connection"] == b"close" for headers in script.headers[2:])
    assert caplog.text.count("does not know it") == 1


async def test_one_that_no_server_ever_knew_is_judged_by_the_page(caplog: pytest.LogCaptureFixture) -> None:
    """The engine may keep responses in a way that is not understood here."""
    script = Telling(LOST)
    async with rig(script) as it:
        await begin(it)
        await eventually(lambda: "never knew it" in caplog.text)
        await asyncio.sleep(0.1)
        assert len(script.headers) == watching.MISSES
        assert len(it.gate.ledger) == 1
        await it.proxy.drain(0.0)


@pytest.mark.parametrize(
    "useless",
    [
        plain(b"{}"),
        plain(b"not json"),
        plain(b'{"error":"no"}', "401 Unauthorized"),
        plain(b"", "500 Internal Server Error"),
        told("dreaming"),
        b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{",
        b"nonsense\r\n\r\n",
    ],
)
async def test_what_cannot_be_understood_ends_nothing(useless: bytes) -> None:
    async def script(wire: Wire) -> None:
        request = await wire.request()
        if request.line.startswith(b"POST"):
            await wire.send(QUEUED)
            return
        looks.append(request)
        await wire.send(useless if len(looks) < 6 else DONE)

    looks: list[object] = []
    async with rig(script) as it:
        await begin(it)
        await eventually(lambda: len(looks) >= 5)
        await ended(it, EndReason.FINISHED)


@pytest.mark.parametrize(
    ("status", "reason"), [("failed", EndReason.ENGINE_ERROR), ("cancelled", EndReason.CALLER_CANCELLED)]
)
async def test_other_ends(status: str, reason: EndReason) -> None:
    async with rig(Telling(QUEUED, told(status))) as it:
        await begin(it)
        await ended(it, reason)


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed"])
async def test_an_engine_that_ignores_the_wish(status: str) -> None:
    """The answer is whole: it ends the lease as that of any request."""
    whole = told(status, usage={"input_tokens": 3, "output_tokens": 9, "total_tokens": 12})
    async with rig(Telling(LOST, begin=whole)) as it:
        await begin(it)
        expected = {"completed": EndReason.FINISHED, "incomplete": EndReason.CAPPED}
        await ended(it, expected.get(status, EndReason.ENGINE_ERROR))
        assert it.ended[0].record.output_tokens == 9


async def test_a_refusal_ends_it() -> None:
    async with rig(Telling(LOST, begin=plain(b'{"error":{"message":"no"}}', "400 Bad Request"))) as it:
        await begin(it)
        await ended(it, EndReason.ENGINE_REFUSED)


async def test_an_engine_that_is_not_there() -> None:
    """It certainly never got it."""
    async with rig(Telling(DONE), url="http://127.0.0.1:1") as it:
        assert b" 502 " in await begin(it)
        await ended(it, EndReason.ENGINE_ERROR)


async def _breaks(wire: Wire) -> None:
    await wire.request()
    wire.close()


async def _is_silent(wire: Wire) -> None:
    await wire.request()
    await wire.gone()


async def _names_nothing(wire: Wire) -> None:
    await wire.request()
    await wire.send(plain(b'{"status":"queued"}'))


@pytest.mark.parametrize("script", [_breaks, _is_silent, _names_nothing])
async def test_one_that_may_have_begun_and_has_no_name_is_kept(script: Script) -> None:
    """Nothing shows that the engine does not work on it; the end of a drain ends it."""
    async with rig(script, read_timeout=0.2) as it:
        await begin(it)
        await asyncio.sleep(0.2)
        assert len(it.gate.ledger) == 1
        assert it.proxy.in_flight == 1
        await it.proxy.drain(0.0)
        await ended(it, EndReason.SHUTDOWN)


async def test_of_several_engines_its_maker_is_remembered() -> None:
    """Under whatever name; those who ask for it are sent there."""
    named = QUEUED.replace(b"resp_a", b"myname")
    done = DONE.replace(b"resp_a", b"myname")
    first = Member("a", models=("ma",))
    second = Member("b", models=("mb",), answers={PATH: named, f"{PATH}/myname": done})
    async with crowd(first, second) as it:
        body = b'{"model":"mb","input":"hi","background":true}'
        await it.ask(post(body, PATH, b"Connection: close"))
        assert await it.ask(get(f"{PATH}/myname")) != b""
        await eventually(lambda: not it.leases())
    assert not any(request.line.startswith(b"GET /v1/responses") for request in first.got)
    assert sum(request.line.startswith(b"GET /v1/responses") for request in second.got) >= 2


async def test_closing_ends_the_watch() -> None:
    async with rig(Telling(QUEUED)) as it:
        await begin(it)
        await it.proxy.close()
        await ended(it, EndReason.SHUTDOWN)
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not any(name.startswith("kvctl-background") for name in names)


# --- what is read ------------------------------------------------------------------------------------

CREATED = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_a","created_at":5,'
    b'"background":true,"status":"in_progress"}}\n\n'
)


def _heard(feed: Callable[[Beginning], object], *, stream: bool) -> list[Told | None]:
    heard: list[Told | None] = []
    feed(Beginning(heard.append, stream=stream))
    return heard


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("before", [b"", b": comment\n\n", b"data: {}\n\ndata: [1]\n\n"])
def test_the_name_is_in_the_first_event_that_tells_one(size: int, before: bytes) -> None:
    data = before + CREATED + b"data: more"

    def feed(beginning: Beginning) -> None:
        reading: Beginning | None = beginning
        for start in range(0, len(data), size):
            reading = reading.feed(data[start : start + size]) if reading is not None else None
        assert reading is None

    expected = Told("resp_a", status="in_progress", background=True, created_at=5)
    assert _heard(feed, stream=True) == [expected]
    crlf = CREATED.replace(b"\n", b"\r\n")
    assert _heard(lambda beginning: beginning.feed(crlf), stream=True) == [expected]


def test_a_beginning_is_read_so_far_and_no_further() -> None:
    assert _heard(lambda b: b.feed(b"x" * (MOST_BEGINNING + 1)), stream=False) == [None]

    def half(beginning: Beginning) -> None:
        beginning.feed(b"half an eve")
        beginning.end()

    assert _heard(half, stream=True) == [None]


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "a b", "a?b", "é", "a" * 300, "%2e"])
def test_names_that_no_path_can_hold(name: str) -> None:
    assert not Told(name).askable


@pytest.mark.parametrize("document", [b"", b"[]", b'{"id":5}', b'{"status":"queued"}', b"\xff"])
def test_what_is_no_response(document: bytes) -> None:
    assert read_told(document) is None


# --- what nests past all bounds ----------------------------------------------------------------------

DEPTH = 20_000
DEEP = b'{"id":"resp_a","status":"queued","x":' + b"[" * DEPTH + b"]" * DEPTH + b"}"


def test_what_nests_past_all_bounds_is_no_response() -> None:
    assert read_told(DEEP) is None
    assert _heard(lambda beginning: beginning.feed(b"data: " + DEEP + b"\n\n"), stream=True) == []

    def whole(beginning: Beginning) -> None:
        beginning.feed(DEEP)
        beginning.end()

    assert _heard(whole, stream=False) == [None]


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

        assert [told and told.id for told in _heard(feed, stream=True)] == ["resp_a"]


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
