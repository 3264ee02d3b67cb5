"""A whole daemon before a simulated engine that stores responses, and what becomes of its leases."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvctl.core.events import Command, LeaseEnded
from kvctl.core.ledger import EndedLease
from kvctl.core.outcomes import EndReason
from kvctl.proxy.server import Proxy
from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.server import SimServer
from tests.engines.house import Answered, House, house
from tests.ports import free_port

PATH = "/v1/responses"
PATIENCE_S = 120.0
Body = dict[str, Any]


def asked(tokens: int, **more: Any) -> Body:
    """A background response of so many tokens."""
    return {"model": "sim", "input": "hi", "background": True, "sim_output_tokens": tokens} | more


@dataclass
class Afterlife:
    """The daemon, the engine behind it, and the leases that ended."""

    it: House
    engine: SimServer
    ended: list[EndedLease] = field(default_factory=list)

    def see(self, command: Command) -> None:
        if isinstance(command, LeaseEnded):
            self.ended.append(command.record)

    @property
    def reasons(self) -> list[EndReason]:
        return [record.reason for record in self.ended]

    @property
    def proxy(self) -> Proxy:
        return self.it.daemon.proxy

    async def begin(self, tokens: int, **more: Any) -> str:
        """Its name, while it is generated."""
        answer = await self.it.post(PATH, asked(tokens, **more))
        assert answer.status == 200, answer.body
        assert answer.json["status"] == "queued"
        return str(answer.json["id"])

    async def tell(self, name: str) -> Answered:
        return await self.it.get(f"{PATH}/{name}")

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - tests look at what has no event
                await asyncio.sleep(0.01)

    async def empty(self) -> None:
        await self.it.empty()
        assert self.proxy.in_flight == 0


@contextlib.asynccontextmanager
async def afterlife(
    folder: Path, *, keeps: bool = True, blocks: int = 2001, **given: str
) -> AsyncIterator[Afterlife]:
    """Started; at the end nothing may be left on the ledger."""
    config = EngineConfig(profile=PROFILES["tiny-cpu"], blocks=blocks)
    server = SimServer(config, keeps_responses=keeps)
    await server.start(port=free_port())  # which another may take over
    try:
        async with house(folder, server.url, TOKENIZER="engine", **given) as it:
            await it.settled()
            made = Afterlife(it, server)
            it.unit.keeper.observe(made.see, LeaseEnded)
            yield made
            await made.empty()
    finally:
        await server.close()


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[Body]:
    """Of a stream, as they come."""
    async for line in answer.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
