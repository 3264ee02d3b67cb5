"""Several fake engines behind one whole proxy, each with its real gate."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from kvctl.control.gatekeeper import Gatekeeper
from kvctl.core.events import DrainChanged, EngineDescribed
from kvctl.core.gate import Gate
from kvctl.core.outcomes import Policy
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo
from kvctl.engines.base import Engine
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Reader
from kvctl.proxy.pool import Upstream
from kvctl.proxy.seams import Backend, Lane, ProxyConfig
from kvctl.proxy.server import Proxy
from tests.proxy.harness import PATIENCE, PLAIN, FakeEngine, Recorder, Request, Wire, WordCounter, plain


@dataclass
class Member:
    """One engine of the crowd. ``answers`` by path; what is not there gets a whole chat answer."""

    name: str
    models: tuple[str, ...] = ("m",)
    named: tuple[str, ...] = ()  # by the operator
    aliases: Mapping[str, str] = field(default_factory=dict)
    capacity: int = 100_000
    ranks: tuple[str, ...] = ()
    policy: Policy = Policy.FORECAST
    engine: Engine = field(default_factory=VLLM)
    answers: dict[str, bytes] = field(default_factory=dict)
    hold: asyncio.Event | None = None  # generation waits for it
    got: list[Request] = field(default_factory=list)
    fake: FakeEngine = field(init=False)
    backend: Backend = field(init=False)

    def __post_init__(self) -> None:
        self.fake = FakeEngine(self._script)

    @property
    def keepers(self) -> list[Gatekeeper]:
        return [lane.keeper for lane in self.backend.lanes]

    @property
    def gate(self) -> Gate:
        return self.keepers[0].gate

    async def _script(self, wire: Wire) -> None:
        while True:
            request = await wire.request()
            self.got.append(request)
            path = request.line.split()[1].decode()
            if path == "/v1/models":
                data = [{"id": m, "object": "model", "max_model_len": self.capacity} for m in self.models]
                await wire.send(self.answers.get(path) or plain(json.dumps({"data": data}).encode()))
                continue
            if self.hold is not None and "completions" in path:
                await self.hold.wait()
            await wire.send(self.answers.get(path) or plain(PLAIN))

    async def start(self) -> None:
        await self.fake.start()
        loop, engine = asyncio.get_running_loop(), self.engine
        lanes = []
        for rank in self.ranks or (None,):
            gate = Gate(GateConfig(capacity_tokens=self.capacity, capacity_force=True, policy=self.policy))
            keeper = Gatekeeper(gate, loop.time)
            keeper.handle(EngineDescribed(EngineInfo(models=self.models, context_tokens=8192)))
            lanes.append(Lane(keeper, rank))
        self.backend = Backend(
            Upstream(f"http://127.0.0.1:{self.fake.port}"),
            engine,
            Reader(WordCounter(), engine),
            lanes,
            name=self.name,
            models=self.named,
            aliases=self.aliases,
        )


@dataclass
class Crowd:
    """The proxy and its engines."""

    members: dict[str, Member]
    proxy: Proxy
    seen: Recorder

    async def ask(self, data: bytes) -> bytes:
        """Send a request that asks for the connection to be closed; the whole answer."""
        port = self.proxy.addresses[0][1]
        wire = Wire(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 26))
        try:
            await wire.send(data)
            async with asyncio.timeout(PATIENCE):
                return await wire.reader.read()
        finally:
            wire.close()

    def leases(self) -> int:
        return sum(len(keeper.gate.ledger) for each in self.members.values() for keeper in each.keepers)


@contextlib.asynccontextmanager
async def crowd(*members: Member) -> AsyncIterator[Crowd]:
    """Started; every ledger must be zero at the end."""
    for member in members:
        await member.start()
    seen = Recorder()
    proxy = Proxy(
        backends=[member.backend for member in members],
        config=ProxyConfig(),
        metrics=seen,
        ready=lambda: (True, "up"),
        clock=asyncio.get_running_loop().time,
    )
    await proxy.start("127.0.0.1:0")
    built = Crowd({member.name: member for member in members}, proxy, seen)
    try:
        yield built
        assert built.leases() == 0
    finally:
        for member in members:
            for keeper in member.keepers:
                keeper.handle(DrainChanged(draining=True))
        await proxy.close()
        for member in members:
            await member.fake.stop()
