from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.server import SimServer

MakeServer = Callable[..., Awaitable[SimServer]]


@pytest.fixture
async def make_server() -> AsyncIterator[MakeServer]:
    """Starts simulated engines, 32,000 tokens unless told otherwise, and closes them."""
    servers: list[SimServer] = []

    async def make(*, blocks: int = 2001, block_size: int = 16, max_model_len: int = 8192) -> SimServer:
        config = EngineConfig(
            profile=PROFILES["tiny-cpu"], blocks=blocks, block_size=block_size, max_model_len=max_model_len
        )
        server = SimServer(config)
        servers.append(server)
        await server.start()
        return server

    yield make
    for server in servers:
        await server.close()
