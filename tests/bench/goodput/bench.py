"""One run, and the runs of a bench."""

import asyncio
import contextlib
import fcntl
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvctl.sim.profiles import Profile
from kvctl.sim.replay import Call, Scene
from kvctl.sim.replay_policies import Spec, find_best, parse_policy, run_policy
from kvctl.sim.replay_setup import caps
from kvctl.sim.trace import Row
from tests.bench.goodput.callers import Crowd, Heard, drive
from tests.bench.goodput.figures import TARGET, Figures, Told, document, told
from tests.bench.goodput.stage import USUAL, Page, Pool, Stage, read_page, virtual_engine, watched
from tests.bench.goodput.workload import arrivals, prompts
from tests.live.daemon import Daemon, eventually
from tests.live.engine import SilentError

OWN = ("none", "static", "forecast")
ALONE = "forecast alone"  # the same gate without knowing what prompts have in common
CAPPED = ("static", "forecast", "past-future", ALONE)  # to the others it is all one what callers ask for
POLICIES = (
    "none",
    "static",
    "forecast",
    "concurrency=best",
    "kv-gauge",
    "engine-queue=best",
    "past-future",
    "clairvoyant",
)
NEIGHBOURS = (0.8, 1.0, 1.25)
MOST_TRIES = 3
HELD_S = 240.0
FEW, STEPS_OF_RATE = 4.0, 1.5  # requests a second, and how they rise in the search for saturation
TOO_FEW_OF, SATURATING_S = 0.8, 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The runs that have their arrivals in common. ``cap`` as in a replay: exact, none or a number."""

    rate: float
    seed: int
    cap: str
    workload: str
    seconds: float
    common: int = 0
    prefixes: bool = False  # prompts of a trace begin alike as its rows did
    pool: Pool = USUAL

    @property
    def rows(self) -> list[Row]:
        """Who comes."""
        room = self.pool.context - self.common
        return arrivals(self.workload, self.rate, self.seconds, self.seed, room, prefixes=self.prefixes)


@dataclass(frozen=True, slots=True)
class Record:
    """A run with what is needed to replay it."""

    group: Group
    policy: str
    rows: Sequence[Row]
    pages: Sequence[Page]
    figures: Figures
    calls: Sequence[Told] = ()


@dataclass(slots=True)
class Turn:
    """The turn on a machine that is shared: a lock that is held for some minutes at a time."""

    path: Path | None = None
    _since: float | None = None
    _file: Any = field(default=None)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """With the lock, which stays held for the next run unless others had to wait long."""
        if self.path is not None and self._since is None:
            self._file = self.path.open("a")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._since = time.monotonic()
        yield
        if self._since is not None and time.monotonic() - self._since > HELD_S:
            self.give_back()
            time.sleep(1.0)

    def give_back(self) -> None:
        """Let others go first."""
        if self._file is not None:
            self._file.close()
        self._since = self._file = None


@dataclass(slots=True)
class Bench:
    """A stage, a folder for the daemons, and the pages of all runs for a calibration."""

    stage: Stage
    folder: Path
    turn: Turn
    kept: Path | None = None  # what has been recorded, after each run
    made: int = 0
    recorded: list[Record] = field(default_factory=list)
    _kept: list[str] = field(default_factory=list)

    def run(self, group: Group, policy: str) -> Figures:
        """One policy under a group's load; once more where the machine was too busy to make the load."""
        for _ in range(MOST_TRIES):
            found = self._run(group, policy)
            if not found["disturbed"]:
                break
        return found

    def _run(self, group: Group, policy: str) -> Figures:
        """Through a daemon of its own."""
        with self.turn.taken():
            spec = None if policy == ALONE else parse_policy(policy)
            wants = spec.limit if spec is not None and spec.name == "engine-queue" else None
            of_engine = self.stage.limit(wants)
            eventually(lambda: _idle(self.stage), 120, "the engine is idle")
            self.made += 1
            folder = self.folder / str(self.made)
            folder.mkdir()
            daemon = self._daemon(folder, policy, spec, group.seed, of_engine=of_engine)
            rows = group.rows
            texts = list(prompts(self.stage.texts, rows, f"{policy} {group} {self.made}", group.common))
            daemon.start()
            try:
                daemon.wait_ready()
                crowd = Crowd(
                    url=daemon.base_url, model=self.stage.model, cap=_cap(group.cap), seed=group.seed
                )
                calls, pages, heard = asyncio.run(_drive(crowd, self.stage.url, rows, texts))
            finally:
                daemon.stop()
            found = document(calls, pages, heard)
            self.recorded.append(Record(group, policy, rows, pages, found, told(calls)))
            if self.kept is not None:
                self._keep(self.recorded[-1], self.kept)
        sys.stderr.write(json.dumps({"policy": policy, "rate": group.rate, "cap": group.cap} | found) + "\n")
        return found

    def _keep(self, record: Record, path: Path) -> None:
        """Write all runs so far."""
        self._kept.append(json.dumps(asdict(record)))
        path.write_text(f"[{','.join(self._kept)}]", encoding="utf-8")

    def _daemon(self, folder: Path, policy: str, spec: Spec | None, seed: int, *, of_engine: bool) -> Daemon:
        settings = {"POLICY": "none", **self.stage.settings}
        daemon = Daemon(self.stage.url, folder, settings)
        if spec is None:
            settings |= {"POLICY": "forecast", "PREFIX_SHARING": "off"}
        elif spec.name in OWN:
            settings["POLICY"] = spec.name
        elif spec.name != "engine-queue" or not of_engine:
            settings["POLICY"] = "forecast" if spec.name == "clairvoyant" else "none"
            pool = self.stage.pool
            known = ("--capacity", str(pool.tokens), "--context", str(pool.context), "--seed", str(seed))
            daemon.program = (sys.executable, "-m", "tests.bench.goodput.gates", policy, *known)
        return daemon

    def run_group(self, group: Group, policies: Sequence[str]) -> Figures:
        """All of them, in an order that the seed decides."""
        shuffled = list(policies)
        random.Random(f"{group.seed} {group.cap}").shuffle(shuffled)
        shuffled.sort(
            key=lambda policy: policy.startswith("engine-queue")
        )  # the engine starts anew for these
        found = {policy: self.run(group, policy) for policy in shuffled}
        return {policy: found[policy] for policy in policies}


async def _drive(
    crowd: Crowd, engine_url: str, rows: Sequence[Row], texts: Sequence[str]
) -> tuple[list[Call], list[Page], Heard]:
    async with watched(engine_url) as pages:
        calls, heard = await drive(crowd, rows, texts)
    return calls, pages, heard


def _idle(stage: Stage) -> bool:
    with contextlib.suppress(SilentError):
        return read_page(stage.url).idle
    return False


def _cap(text: str) -> int | None:
    return None if text == "none" else int(text)


def scene_of(group: Group, profile: Profile) -> Scene:
    """The same load in virtual time."""
    engine = replace(virtual_engine(group.pool), profile=profile, prefix_caching=group.prefixes)
    return Scene(rows=group.rows, engine=engine, cap=caps(group.cap), seed=group.seed)


def resolve(policies: Sequence[str], group: Group, profile: Profile) -> list[str]:
    """``NAME=best`` as the limit that the simulated engine finds best for the load, and two neighbours."""
    found: list[str] = []
    tried: list[int] = []
    for policy in policies:
        name, _, limit = policy.partition("=")
        if limit != "best":
            found.append(policy)
            continue
        if not tried:
            best = find_best(Spec("concurrency"), scene_of(group, profile), TARGET).limit or 1
            tried = sorted({max(round(best * share), 1) for share in NEIGHBOURS})
        found += [f"{name}={limit}" for limit in tried]
    return found


def saturation(group: Group, profile: Profile) -> float:
    """Requests a second that the engine, as simulated, completes when too many come.

    Not far too many: then it would be served who asks for little. The first half fills the engine.
    """
    rate = FEW
    while True:
        scene = scene_of(replace(group, rate=rate, cap="exact", seconds=SATURATING_S), profile)
        ends = [call.ended_at for call in run_policy(Spec("clairvoyant"), scene).calls]
        half = scene.seconds / 2
        served = sum(end is not None and half < end <= scene.seconds for end in ends)
        if served < TOO_FEW_OF * len(ends) / 2:
            return float(served / half)
        rate *= STEPS_OF_RATE
