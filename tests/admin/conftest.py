"""A real admin server on a real unix socket; only the daemon behind it is a stand-in."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvctl.admin.client import AdminClient
from kvctl.admin.desk import Desk, Tell
from kvctl.admin.listeners import OwnedSocket
from kvctl.admin.pace import Pace
from kvctl.admin.port import DaemonStatus, LastReload, Reloaded
from kvctl.admin.reloading import Reloader
from kvctl.admin.server import AdminApi, AdminServer
from kvctl.control.journal import Journal
from kvctl.core.claim import Shape
from kvctl.core.decisions import DecisionRecord
from kvctl.core.guards import GuardStatus
from kvctl.core.outcomes import (
    Absence,
    BudgetReason,
    CapacitySource,
    EngineState,
    Limit,
    Policy,
    Pressure,
    SourceFault,
)
from kvctl.core.overrides import Knob, Value, bounds
from kvctl.core.status import GateStatus, RankStatus
from kvctl.core.telemetry import GpuSample
from kvctl.settings.loading import load
from kvctl.settings.model import Settings

PATIENCE_S = 60.0
ENGINE = "http://127.0.0.1:8000"
RANK = RankStatus(
    rank="0",
    age_s=0.1,
    capacity_tokens=48_000,
    capacity_exact=True,
    kv_usage_ratio=0.25,
    usage_gauge="vllm:kv_cache_usage_perc",
    running=3,
    waiting=0,
    preemptions_total=None,
    absent={"preemptions_total": Absence.MISSING},
)
GATE = GateStatus(
    at=100.0,
    state=EngineState.UP,
    policy=Policy.FORECAST,
    draining=False,
    capacity_tokens=48_000,
    capacity_known=True,
    capacity_source=CapacitySource.ENGINE,
    budget_tokens=45_600,
    budget_reason=BudgetReason.STEADY,
    margin_ratio=0.05,
    pressure={Pressure.PREEMPTION: 1.0, Pressure.GPU_MEMORY: float("nan")},
    forecast_peak_tokens=12_000.7,
    held_tokens=9_000,
    claimed_tokens=30_000,
    unattributed_tokens=0,
    shared_prefix_tokens=0,
    leases=3,
    context_tokens=None,
    models=("tiny",),
    drain_rate_tokens_per_s=None,
    binding_limit=Limit.KV_BUDGET,
    guards=GuardStatus(
        prefill_backlog_tokens=0,
        prefill_rate_tokens_per_s=None,
        decode_limit=float("inf"),
        decode_pace_s=None,
        slots=float("inf"),
    ),
    telemetry_age_s=0.1,
    ranks=(RANK,),
    sentence="budget 45,600 of 48,000 KV tokens",
)
GPU = GpuSample(uuid="GPU-1", at=99.5, index=0, name="card", absent={"free_bytes": Absence.LOST})


Applied = list[dict[Knob, Value | None]]
DEFAULTS: dict[Knob, Value | None] = {
    Knob.MARGIN: 0.05,
    Knob.POLICY: Policy.FORECAST,
    Knob.ENFORCE: 1.0,
    Knob.CAPACITY_TOKENS: None,
    Knob.MAX_CONTEXT: None,
    Knob.QUEUE_MAX_WAIT: 0.0,
}
NewDesk = Callable[..., Desk]


@dataclass
class Stand:
    """The daemon's part of the port."""

    gate: GateStatus = GATE
    draining: bool = False
    bypass: bool = False
    gpu_fault: SourceFault | None = None
    drained_engines: dict[str, bool] = field(default_factory=dict)
    given: Settings = field(default_factory=lambda: load(None, {"KVCTL_ENGINE_URL": ENGINE}))
    config: Path | None = None  # what a reload reads
    says: dict[str, DecisionRecord] = field(default_factory=dict)
    asked: list[Shape] = field(default_factory=list)
    released: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reloader = Reloader(self.given, self._read, self._adopt)

    def _read(self) -> Settings:
        return load(self.config, {"KVCTL_ENGINE_URL": ENGINE})

    def _adopt(self, settings: Settings) -> None:
        self.given = settings

    def outlook(self, shape: Shape) -> dict[str, DecisionRecord]:
        self.asked.append(shape)
        return self.says

    async def release_cards(self, seconds: float) -> None:
        self.released.append(seconds)

    async def reload(self, *, dry_run: bool = False) -> Reloaded:
        return await (self.reloader.pending() if dry_run else self.reloader.reload())

    def last_reload(self) -> LastReload:
        return self.reloader.last

    def metrics(self) -> tuple[list[bytes], str]:
        return [b"kvctl_leases 3\n"], "text/plain"

    def status(self) -> DaemonStatus:
        return DaemonStatus(
            now=100.0,
            started_at=40.0,
            sentence=self.gate.sentence,
            draining=self.draining,
            bypass=self.bypass,
            engines={ENGINE: replace(self.gate, draining=self.draining)},
            gpus=(GPU,) if self.gpu_fault is None else (),
            gpu_fault=self.gpu_fault,
        )

    def settings(self) -> Settings:
        return self.given

    def drain(self, *, draining: bool, engine: str | None = None) -> None:
        if engine is None:
            self.draining = draining
        else:
            self.drained_engines[engine] = draining


@dataclass
class Clocks:
    mono: float = 50.0
    wall: float = 1_000_000.0

    def advance(self, seconds: float) -> None:
        self.mono += seconds
        self.wall += seconds


@dataclass
class Office:
    """Desk and stand-in daemon together; ``applied`` is what the daemon was told, in order."""

    desk: Desk
    stand: Stand
    clocks: Clocks
    socket: Path
    state_dir: Path
    applied: Applied
    journal: Journal

    async def call(self, method: str, *arguments: Any, **named: Any) -> dict[str, Any]:
        """A call of the real client, off the loop that serves it."""
        answer: dict[str, Any] = await asyncio.to_thread(
            getattr(AdminClient(self.socket, PATIENCE_S), method), *arguments, **named
        )
        return answer


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def new_desk(tmp_path: Path, clocks: Clocks) -> NewDesk:
    def make(applied: Applied, tell: Tell = lambda _kind, _document: None) -> Desk:
        def apply(values: Mapping[Knob, Value | None]) -> None:
            applied.append(dict(values))

        return Desk(
            limits=bounds(0, 0.5),
            ttl_max_s=86400,
            defaults=DEFAULTS,
            state_dir=tmp_path / "state",
            clock=lambda: clocks.mono,
            wall=lambda: clocks.wall,
            apply=apply,
            tell=tell,
        )

    return make


@pytest.fixture
async def office(tmp_path: Path, clocks: Clocks, new_desk: NewDesk) -> AsyncIterator[Office]:
    applied: Applied = []
    journal = Journal(100, lambda: clocks.mono, lambda: clocks.wall)
    desk, stand, path = new_desk(applied, journal.tell), Stand(), tmp_path / "kvctl.sock"
    desk.open()
    server = AdminServer(AdminApi(stand, desk, journal, Pace()), OwnedSocket(path))
    await server.start()
    yield Office(desk, stand, clocks, path, tmp_path / "state", applied, journal)
    await server.close()
    await desk.close()
