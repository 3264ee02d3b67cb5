"""An order to drain holds when kvctl is restarted or killed; the drain with which it stops does not."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.server import SimServer
from tests.ports import free_port
from tests.proxy.harness import Wire, get
from tests.test_reload import kvctl
from tests.test_serve import MAIN, PATIENCE_S, environment


class Box:
    """One kvctl after another with the same state directory and port, before one engine."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder = folder
        self.log = folder / "log"
        self._engine = engine
        self._port = free_port()

    @contextlib.asynccontextmanager
    async def life(self, end: signal.Signals = signal.SIGTERM) -> AsyncIterator[None]:
        """A process that serves inside, and ends by ``end`` behind."""
        settings = {"LISTEN": f"127.0.0.1:{self._port}", "ADMIN_LISTEN": "127.0.0.1:0", "GPUS": "none"}
        with self.log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", MAIN, "serve"),
                stdout=log,
                stderr=log,
                env=environment(self.folder, self._engine, **settings),
            )
        try:
            await self._listening(process)
            yield
        finally:
            process.send_signal(end)
            await process.wait()

    async def _listening(self, process: asyncio.subprocess.Process) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while "listens on" not in self.log.read_text():
                assert process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.05)

    async def ready(self) -> bytes:
        """The status line of ``/readyz``."""
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self._port))
        try:
            await wire.send(get("/readyz"))
            return (await wire.reader.readline()).strip()
        finally:
            wire.close()

    async def serves(self) -> None:
        """Wait until the engine was heard."""
        async with asyncio.timeout(PATIENCE_S):
            while b" 200 " not in await self.ready():  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.05)


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    server = SimServer(EngineConfig(profile=PROFILES["1.5b-shared"], blocks=1000, block_size=16))
    await server.start()
    yield Box(tmp_path, server.url)
    await server.close()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_drained_box_stays_drained_over_a_restart(box: Box, end: signal.Signals) -> None:
    async with box.life(end):
        await box.serves()
        status, out, _ = await kvctl(box.folder, "drain", "--yes", "--reason", "new driver at 03:00")
        assert (status, out.split(":")[0]) == (0, "draining")
    async with box.life():
        assert "all engines are drained by" in box.log.read_text()
        assert b" 503 " in await box.ready()
        page = " ".join((await kvctl(box.folder, "status"))[1].split())
        assert page.startswith("draining: ")
        assert "new driver at 03:00; holds over restarts, kvctl undrain ends it" in page
        assert "kvctl undrain" in (await kvctl(box.folder, "check"))[1]
        assert (await kvctl(box.folder, "undrain"))[1] == "active: requests are admitted again\n"
        await box.serves()
    async with box.life():
        await box.serves()
        assert "drained by" not in box.log.read_text()
