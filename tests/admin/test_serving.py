"""Connections of the admin side: none is held for ever, and all together leave descriptors to the rest."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from kvctl.admin import serving
from kvctl.admin.pace import Pace
from kvctl.admin.serving import Served, most_connections
from kvctl.admin.turns import in_turns
from kvctl.proxy import server

PATIENCE_S = 60.0
LARGE = 64_000_000  # bytes: more than any kernel takes
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Desk:
    """An application on a socket of either kind: a word, a large answer, and one that takes until ``go``."""

    def __init__(self, path: Path | None) -> None:
        app = web.Application(middlewares=[in_turns(Pace())])
        app.router.add_get("/word", self._word)
        app.router.add_get("/large", self._large)
        app.router.add_get("/long", self._long)
        self.served = Served(app)
        self.go = asyncio.Event()
        self.asked = 0
        self._callers: list[asyncio.StreamWriter] = []
        self._path = path
        self.socket = socket.socket() if path is None else socket.socket(socket.AF_UNIX)
        self.socket.bind(("127.0.0.1", 0) if path is None else str(path))
        self.socket.listen(128)
        self.socket.setblocking(False)

    async def _word(self, _: web.Request) -> web.Response:
        return web.Response(text="a word")

    async def _large(self, _: web.Request) -> web.Response:
        return web.Response(body=bytes(LARGE))

    async def _long(self, _: web.Request) -> web.Response:
        self.asked += 1
        await self.go.wait()
        return web.Response(text="at last")

    async def connect(self, path: str = "") -> Wire:
        if self._path is None:
            made = await asyncio.open_connection(*self.socket.getsockname(), limit=1024)
        else:
            made = await asyncio.open_unix_connection(self._path, limit=1024)
        self._callers.append(made[1])
        if path:
            made[1].write(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        return made

    @property
    def open(self) -> int:
        return len(self.served._connections)

    async def leave(self) -> None:
        """All callers."""
        for caller in self._callers:
            caller.close()
            with contextlib.suppress(ConnectionError):
                await caller.wait_closed()

    async def until(self, connections: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.open != connections:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)


@pytest.fixture(params=["tcp", "unix"])
async def desk(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Desk]:
    made = Desk(tmp_path / "sock" if request.param == "unix" else None)
    await made.served.start(made.socket)
    async with asyncio.timeout(PATIENCE_S):
        yield made
    await made.leave()
    await made.served.close()
    made.socket.close()


async def answer(wire: Wire) -> bytes:
    """What comes, until the end of the first answer or of the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            while not found.endswith((b"a word", b"at last")) and (data := await wire[0].read(1024)):
                found += data
    return found


async def test_a_caller_that_takes_nothing_is_let_go(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SILENCE_S", 0.2)
    reader, _ = await desk.connect("/large")
    await reader.read(1)
    await desk.until(0)


async def test_a_slow_caller_gets_all_of_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is silent for long, and takes something all the time."""
    monkeypatch.setattr(serving, "SILENCE_S", 0.5)
    reader, _ = await desk.connect("/large")
    size, loop = 0, asyncio.get_running_loop()
    began = loop.time()
    while data := await reader.read(1 << 20):
        size += len(data)
        if loop.time() - began < 1.5:
            await asyncio.sleep(0.001)
    assert size > LARGE


async def test_those_who_say_nothing_make_room(desk: Desk) -> None:
    desk.served.most = 4
    silent = [await desk.connect() for _ in range(4)]
    await desk.until(4)
    spoke = await desk.connect("/word")
    assert b"a word" in await answer(spoke)
    assert await answer(silent[0]) == b""
    silent[1][1].write(b"GET /word HTTP/1.1\r\nHost: a\r\n\r\n")  # it is heard now
    assert b"a word" in await answer(silent[1])
    for _ in range(2):
        assert b"a word" in await answer(await desk.connect("/word"))
    assert [await answer(wire) for wire in silent[2:]] == [b"", b""]
    assert desk.open == 4


async def test_a_crowd_that_comes_at_once_is_cut_to_the_most(desk: Desk) -> None:
    desk.served.most = 4
    crowd = await asyncio.gather(*[desk.connect() for _ in range(60)])
    answers = [asyncio.create_task(answer(wire)) for wire in crowd]
    async with asyncio.timeout(PATIENCE_S):
        while sum(each.done() for each in answers) < 56:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    assert desk.open == 4
    for each in answers:
        each.cancel()


async def test_who_is_being_answered_is_not_cut(desk: Desk) -> None:
    desk.served.most = 3
    busy = [await desk.connect("/long") for _ in range(3)]
    async with asyncio.timeout(PATIENCE_S):
        while desk.asked < 3:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    assert await answer(await desk.connect("/word")) == b""
    desk.go.set()
    assert all([b"at last" in await answer(wire) for wire in busy])
    assert b"a word" in await answer(await desk.connect("/word"))


@pytest.mark.parametrize("descriptors", [256, 1024, 4096, 65_536, 1 << 20])
def test_all_together_leave_descriptors_to_the_rest(descriptors: int) -> None:
    """Two listening sockets of the admin side, and two descriptors for each client of the data port."""
    callers = 2 * most_connections(descriptors) + 2 * server.most_connections(descriptors)
    assert descriptors - callers >= 32
    assert most_connections(-1) == most_connections(1 << 20) == 1024
