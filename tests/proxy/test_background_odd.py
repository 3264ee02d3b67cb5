"""Background responses before engines that are slow, deaf, guarded or forgetful, byte by byte."""

import asyncio
from dataclasses import replace

import pytest

from kvctl.core.events import Scraped
from kvctl.core.outcomes import EndReason
from kvctl.proxy import watching
from kvctl.proxy.told import MOST_BEGINNING, Beginning, Told, read_told
from tests.core.conversation import PAGE
from tests.proxy.harness import Script, Wire, eventually, get, plain, post, rig
from tests.proxy.several import Member, crowd
from tests.proxy.telling import (
    BODY,
    CREATED,
    DONE,
    LOST,
    PATH,
    QUEUED,
    Telling,
    begin,
    ended,
    heard,
    hurry,
    told,
)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come without long pauses."""
    hurry(monkeypatch)


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


@pytest.mark.parametrize("drains", [False, True])
async def test_a_caller_that_leaves_before_an_answer_that_never_comes(*, drains: bool) -> None:
    """Its lease is watched from then on: an engine that is another process ends it, and the wait with it."""
    script = Telling(QUEUED, held=asyncio.Event())
    async with rig(script, drains=drains) as it:
        it.keeper.handle(Scraped((PAGE,), 0.0))
        wire = await it.client()
        await wire.send(post(BODY, PATH))
        await eventually(lambda: script.begun == 1)
        wire.reset()
        await asyncio.sleep(0.1)
        assert len(it.gate.ledger) == 1
        it.keeper.handle(Scraped((replace(PAGE, started_at=2000.0),), 0.0))
        await ended(it, EndReason.ENGINE_FORGOT)


async def test_of_two_of_one_name_none_is_believed_whoever_left() -> None:
    """One told its name after its caller had left, the other before."""
    held = asyncio.Event()
    script = Telling(QUEUED, held=held)
    async with rig(script) as it:
        wires = [await it.client() for _ in range(2)]
        for wire in wires:
            await wire.send(post(BODY, PATH))
        await eventually(lambda: script.begun == 2)
        wires[0].reset()
        await asyncio.sleep(0.05)
        held.set()
        await wires[1].reader.readuntil(b"queued")
        watch = next(iter(it.proxy._handler.afterlife._watches.values()))
        await eventually(lambda: {entry.name for entry in watch._watched.values()} == {"resp_a"})
        await eventually(lambda: len(watch._by_name["resp_a"]) == 2)
        assert all(entry.lease.begun is None for entry in watch._watched.values())
        wires[1].close()
        await it.proxy.drain(0.0)


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
    assert heard(feed, stream=True) == [expected]
    crlf = CREATED.replace(b"\n", b"\r\n")
    assert heard(lambda beginning: beginning.feed(crlf), stream=True) == [expected]


def test_a_beginning_is_read_so_far_and_no_further() -> None:
    assert heard(lambda b: b.feed(b"x" * (MOST_BEGINNING + 1)), stream=False) == [None]

    def half(beginning: Beginning) -> None:
        beginning.feed(b"half an eve")
        beginning.end()

    assert heard(half, stream=True) == [None]


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "a b", "a?b", "é", "a" * 300, "%2e"])
def test_names_that_no_path_can_hold(name: str) -> None:
    assert not Told(name).askable


@pytest.mark.parametrize("document", [b"", b"[]", b'{"id":5}', b'{"status":"queued"}', b"\xff"])
def test_what_is_no_response(document: bytes) -> None:
    assert read_told(document) is None
