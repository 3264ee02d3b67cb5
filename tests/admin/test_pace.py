"""The admin side's share of the loop: who gets a turn, when, and what it costs."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count, pairwise
from typing import Any

import pytest
from aiohttp import web

from kvctl.admin.answers import OfNow
from kvctl.admin.pace import BURST_S, Flow, Line, Pace
from kvctl.admin.serving import Served
from kvctl.admin.turns import InTurns, in_turns
from tests.admin.conftest import Office


class Meter:
    """A CPU clock that moves by what a step says that it took."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def paced(share: float = 1.0) -> tuple[Pace, Meter]:
    """A pace without the credit of a rest, and its meter."""
    meter = Meter()
    pace = Pace(share, cpu=meter)
    pace.spent(pace.seat(Line.READING, Flow()), BURST_S)
    return pace, meter


async def steps(number: int, work: Callable[[], None]) -> None:
    for _ in range(number):
        work()
        await asyncio.sleep(0)


async def served(times: int = 1) -> None:
    """Let the loop go round."""
    for _ in range(times):
        await asyncio.sleep(0)


# --- the share ------------------------------------------------------------------------------------------


async def test_whatever_is_asked_takes_its_share_and_no_more() -> None:
    pace, meter = paced(share=0.1)
    began = time.perf_counter()
    asking = [
        InTurns(pace, pace.seat(Line.READING, Flow()), steps(5, lambda: meter.work(0.0002)))
        for _ in range(10)
    ]
    await asyncio.gather(*(each for each in asking))
    assert meter.now == pytest.approx(0.01)
    assert (
        time.perf_counter() - began >= (0.01 - 0.0002) / 0.1
    )  # but for the last step, which nobody waits for


async def test_after_a_rest_an_answer_has_its_turns_one_after_the_other() -> None:
    pace = Pace(1e-9)  # the account would never be balanced again
    meter_free = pace.seat(Line.READING, Flow())
    await InTurns(pace, meter_free, steps(20, lambda: None))


async def test_between_two_steps_the_loop_goes_round() -> None:
    pace, order = Pace(), []

    async def other() -> None:
        for _ in range(50):
            order.append("other")
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    await InTurns(pace, pace.seat(Line.READING, Flow()), steps(5, lambda: order.append("step")))
    await beside
    at = [place for place, each in enumerate(order) if each == "step"]
    assert all(later - earlier > 1 for earlier, later in pairwise(at))


async def test_what_a_thread_works_out_is_paid_for_too() -> None:
    pace, _ = paced()
    assert await pace.in_thread(lambda number: number + 1, 1) == 2
    with pytest.raises(ValueError, match="odd"):
        await pace.in_thread(_raises, ValueError("odd"))


def _raises(error: Exception) -> None:
    raise error


# --- the lines ------------------------------------------------------------------------------------------


@asynccontextmanager
async def flood(pace: Pace, meter: Meter, line: Line, number: int, told: list[str]) -> AsyncIterator[None]:
    """``number`` connections that ask again at once, each step a tenth of a millisecond."""

    async def asks(flow: Flow) -> None:
        def work() -> None:
            meter.work(0.0001)
            told.append(line.name)

        while True:
            await InTurns(pace, pace.seat(line, flow), steps(2, work))

    asking = [asyncio.create_task(asks(Flow())) for _ in range(number)]
    while len(told) < 4 * number:  # noqa: ASYNC110 - all have been there once or twice
        await asyncio.sleep(0)
    try:
        yield
    finally:
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.parametrize("line", Line)
@pytest.mark.parametrize("crowd", Line)
async def test_who_asks_once_is_not_behind_a_hundred_who_ask_without_a_pause(line: Line, crowd: Line) -> None:
    pace, meter = paced()
    told: list[str] = []
    async with flood(pace, meter, crowd, 100, told):
        before = len(told)
        await InTurns(pace, pace.seat(line, Flow()), steps(2, lambda: meter.work(0.0001)))
        assert len(told) - before < 20


async def test_a_connection_that_rested_has_saved_nothing_up() -> None:
    """Else who comes back after an hour would keep all others out for as long."""
    pace, meter = paced()
    told: list[str] = []
    old = Flow()
    await InTurns(pace, pace.seat(Line.READING, old), steps(1, lambda: None))
    async with flood(pace, meter, Line.READING, 10, told):
        for _ in range(20):
            before = len(told)
            await InTurns(pace, pace.seat(Line.READING, old), steps(1, lambda: meter.work(0.0001)))
        assert len(told) - before >= 4


async def test_a_long_answer_does_not_keep_the_others_waiting_for_all_of_it() -> None:
    pace, meter = paced()
    order: list[str] = []

    def work(name: str, seconds: float) -> Callable[[], None]:
        def does() -> None:
            order.append(name)
            meter.work(seconds)

        return does

    long = InTurns(pace, pace.seat(Line.READING, Flow()), steps(50, work("long", 0.0005)))
    short = InTurns(pace, pace.seat(Line.READING, Flow()), steps(1, work("short", 0.0005)))
    await asyncio.gather(_awaited(long), _awaited(short))
    assert order.index("short") < 15


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


async def test_a_flood_of_changes_leaves_readings_their_turns() -> None:
    pace, meter = paced()
    told: list[str] = []
    async with flood(pace, meter, Line.CHANGE, 20, told), flood(pace, meter, Line.READING, 20, told):
        before = len(told)
        while len(told) < before + 100:  # noqa: ASYNC110 - counted by the steps
            await asyncio.sleep(0)
        both = told[before:]
    assert 40 < both.count("READING") < 60


# --- who leaves -----------------------------------------------------------------------------------------


async def test_who_leaves_gives_the_turn_on() -> None:
    """Before it was given, in the very moment that it was given, and in the middle of the answer."""
    pace, meter = paced()

    async def ask() -> str:
        meter.work(0.0001)
        await asyncio.sleep(0)
        return "answered"

    async def asks() -> None:
        await InTurns(pace, pace.seat(Line.READING, Flow()), ask())

    for rounds in range(40):
        leaving = [asyncio.create_task(asks()) for _ in range(3)]
        await served(rounds)
        for each in leaving:
            each.cancel()
    async with asyncio.timeout(60):
        assert await InTurns(pace, pace.seat(Line.READING, Flow()), ask()) == "answered"


async def test_errors_and_clean_up_go_through() -> None:
    pace, cleaned = Pace(), []
    failing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failing.set_exception(OSError("gone"))

    async def handles() -> str:
        try:
            await asyncio.shield(failing)
        except OSError as error:
            return str(error)
        return ""

    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("none")

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    def seated(work: Any) -> Any:
        return InTurns(pace, pace.seat(Line.READING, Flow()), work)

    assert await seated(handles()) == "gone"
    with pytest.raises(LookupError, match="none"):
        await seated(fails())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await seated(waits())
    assert cleaned == [True]
    assert await seated(handles()) == "gone"


# --- applications ---------------------------------------------------------------------------------------


async def test_every_route_goes_in_turns(office: Office) -> None:
    """Also those that nobody wrote yet: the middleware is the outermost of all."""
    del office
    pace, made = Pace(), []
    numbers = count()
    spent = pace.spent

    def counted(seat: Any, seconds: float) -> None:
        made.append(next(numbers))
        spent(seat, seconds)

    pace.spent = counted  # type: ignore[method-assign]
    app = web.Application(middlewares=[in_turns(pace)])

    async def later(_: web.Request) -> web.Response:
        await asyncio.sleep(0)
        return web.Response(text="of a later version")

    app.router.add_get("/later", later)
    async with _listening(app) as port:
        assert (await _get(port, "/later")).endswith(b"of a later version")
        assert len(made) == 2
        assert b" 404 " in await _get(port, "/nowhere")
        assert len(made) == 3


async def test_nothing_is_made_for_who_left_while_waiting() -> None:
    pace, asked = Pace(), []
    app = web.Application(middlewares=[in_turns(pace)])

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text="ok")

    app.router.add_get("/{any}", handler)
    async with _listening(app) as port:
        seat = pace.seat(Line.READING, Flow())
        await pace.turn(seat)  # nobody else has one meanwhile
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /left HTTP/1.1\r\nHost: k\r\n\r\n")
        await writer.drain()
        waiting = asyncio.create_task(_get(port, "/stayed"))
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await asyncio.sleep(0.05)
        pace.spent(seat, 0.0)
        assert b"ok" in await waiting
    assert asked[-1] == "/stayed"


@asynccontextmanager
async def _listening(app: web.Application) -> AsyncIterator[int]:
    import socket  # noqa: PLC0415 - of this helper alone

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    running = Served(app)
    await running.start(listener)
    try:
        yield listener.getsockname()[1]
    finally:
        await running.close()


async def _get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: k\r\nConnection: close\r\n\r\n".encode())
    try:
        return await reader.read()
    finally:
        writer.close()


# --- what is shared -------------------------------------------------------------------------------------


async def test_a_state_is_read_once_for_all_who_asked_before() -> None:
    numbers = count()
    states: OfNow[int] = OfNow(lambda: next(numbers))
    made: list[int] = []

    def form(state: int) -> bytes:
        made.append(state)
        return b"%d" % state

    asked = time.perf_counter()
    assert {await states.body("one", form, asked) for _ in range(5)} == {b"0"}
    assert await states.body("other", form, asked) == b"0"
    assert made == [0, 0]
    assert await states.body("one", form, time.perf_counter()) == b"1"
    assert await states.body("one", form, asked) == b"1"
    late = [states.body("one", form, time.perf_counter()) for _ in range(3)]
    assert set(await asyncio.gather(*late)) <= {b"2", b"3", b"4"}


async def test_whoever_changed_something_reads_it_back(office: Office) -> None:
    for number in range(5, 15):
        await office.call("put", "/v1/overrides/margin", {"value": f"{number}%", "reason": "r"})
        shown = await office.call("get", "/v1/status")
        assert shown["overrides"]["active"]["margin"]["value"] == pytest.approx(number / 100)
