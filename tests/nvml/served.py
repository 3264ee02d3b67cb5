"""A daemon before the simulated engine, both under a load that never stops, with a driver that fails."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.admin.client import AdminClient
from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.server import SimServer
from tests.ports import free_port
from tests.test_serve import Kvctl, daemon

PATIENCE_S = 60.0
BODY = b'{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":4}'


def engine() -> SimServer:
    config = EngineConfig(
        profile=PROFILES["8b-24g"],
        blocks=3000,
        block_size=16,
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        prefix_caching=False,
    )
    return SimServer(config)


@dataclass
class Load:
    """Requests one after the other: what came back."""

    statuses: list[int] = field(default_factory=list)

    async def run(self, it: Kvctl) -> None:
        while True:
            answer = await it.post(BODY)
            self.statuses.append(int(answer.split(b" ", 2)[1]))
            await asyncio.sleep(0.01)

    def taken(self) -> set[int]:
        """Statuses since the last call."""
        found = set(self.statuses)
        self.statuses.clear()
        return found


@dataclass
class Stage:
    """The daemon, its admin socket, the engine and the load."""

    it: Kvctl
    client: AdminClient
    load: Load
    sim: SimServer

    async def cards(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.client.get, "/v1/gpus")

    async def status(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.client.get, "/v1/status")

    async def reads(self) -> bool:
        """Whether there is a card, and no fault."""
        found = await self.cards()
        return bool(found["gpus"]) and found["gpu_fault"] is None

    async def state(self) -> str:
        return str(next(iter((await self.status())["engines"].values()))["state"])

    async def fault(self) -> str | None:
        found = (await self.cards())["gpu_fault"]
        return None if found is None else str(found)

    async def until(self, ask: Callable[[], Awaitable[object]], wanted: object) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await ask() != wanted:  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.05)

    async def counted(self, series: str) -> None:
        """The metric has come to be on the page."""
        async with asyncio.timeout(PATIENCE_S):
            while series not in await self.it.metrics():  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.05)

    async def served(self, more: int = 5) -> None:
        """So many more requests have been answered."""
        before = len(self.load.statuses)
        async with asyncio.timeout(PATIENCE_S):
            while len(self.load.statuses) < before + more:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.02)

    def audit(self, folder: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


@contextlib.asynccontextmanager
async def stage(folder: Path, **settings: str) -> AsyncIterator[Stage]:
    sim, load = engine(), Load()
    await sim.start(port=free_port())  # which it may leave and take again
    given: dict[str, Any] = {"GPU_INTERVAL": "100ms", "GPU_TIMEOUT": "60s", **settings}
    try:
        async with daemon(folder, sim.url, **given) as it:
            made = Stage(it, AdminClient(folder / "kvctl.sock", 30.0), load, sim)
            await made.until(made.state, "up")
            task = asyncio.create_task(load.run(it))
            try:
                yield made
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
    finally:
        await made.sim.close()
