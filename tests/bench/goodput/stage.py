"""The engine of a bench, real or simulated, and what its page says while a load runs."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig
from tests.bench.goodput.workload import RealTexts, SimTexts, Texts
from tests.live.daemon import eventually
from tests.live.engine import Engine, SilentError, http_get
from tests.live.model import NAME
from tests.ports import free_port

LOOK_S = 0.5
PROFILE = "tiny-cpu"


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV pool of an engine, one block of which is the null block, and its context."""

    blocks: int
    block: int
    context: int

    @property
    def tokens(self) -> int:
        """That it can hold."""
        return (self.blocks - 1) * self.block


USUAL = Pool(1000, 32, 8192)
LONG = Pool(4001, 32, 32_768)  # 128,000 tokens
POOLS = {"usual": USUAL, "long": LONG}


def virtual_engine(pool: Pool = USUAL) -> EngineConfig:
    """What stands for either engine in a replay."""
    return EngineConfig(
        profile=PROFILES[PROFILE],
        blocks=pool.blocks,
        block_size=pool.block,
        max_model_len=pool.context,
        max_num_batched_tokens=2048,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some numbers of an engine's page. ``steps`` None: it does not count them."""

    at: float  # monotonic
    usage: float
    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int | None
    first_tokens: int = 0  # counted, with the seconds to them since the engine had the request
    to_first_s: float = 0.0
    queued_s: float = 0.0  # and of these: until it was first scheduled
    prefill_s: float = 0.0  # and from then on

    @property
    def idle(self) -> bool:
        return self.running + self.waiting == 0


def read_page(url: str) -> Page:
    """The page now. Raises SilentError where nobody answers."""
    at, text = time.monotonic(), http_get(f"{url}/metrics")[1]
    if not text:
        raise SilentError("the engine does not answer")
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name, value = line.split("{", 1)[0].split(" ", 1)[0], line.rsplit(" ", 1)[1]
            sums[name] = sums.get(name, 0.0) + float(value)
    steps = sums.get("vllm:iteration_tokens_total_count")
    return Page(
        at=at,
        usage=sums["vllm:kv_cache_usage_perc"],
        running=round(sums["vllm:num_requests_running"]),
        waiting=round(sums["vllm:num_requests_waiting"]),
        preemptions=round(sums["vllm:num_preemptions_total"]),
        prompt_tokens=round(sums["vllm:prompt_tokens_total"]),
        generation_tokens=round(sums["vllm:generation_tokens_total"]),
        steps=None if steps is None else round(steps),
        first_tokens=round(sums.get("vllm:time_to_first_token_seconds_count", 0.0)),
        to_first_s=sums.get("vllm:time_to_first_token_seconds_sum", 0.0),
        queued_s=sums.get("vllm:request_queue_time_seconds_sum", 0.0),
        prefill_s=sums.get("vllm:request_prefill_time_seconds_sum", 0.0),
    )


class Stage(Protocol):
    """An engine that runs until it is closed. ``queue`` is its own limit of requests."""

    model: str
    pool: Pool
    queue: int | None
    counts_steps: bool  # on its page

    @property
    def url(self) -> str:
        """Where it listens."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What the daemon is told beside the policy."""

    @property
    def texts(self) -> Texts:
        """Makes prompts for it."""

    def limit(self, queue: int | None) -> bool:
        """Start it again with that limit, if it has another; False: it knows no such limit."""

    def close(self) -> None:
        """End it."""


class CpuStage:
    """vLLM on the CPU."""

    model = NAME
    counts_steps = True

    def __init__(self, pool: Pool = USUAL) -> None:
        self.pool = pool
        self.queue: int | None = None
        self._engine = self._started()

    def _started(self) -> Engine:
        flags = () if self.queue is None else ("--max-num-queued-reqs", str(self.queue))
        pool = self.pool
        engine = Engine(
            num_gpu_blocks=pool.blocks, block_size=pool.block, max_model_len=pool.context, flags=flags
        )
        engine.start()
        engine.wait_ready(400)
        return engine

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._engine.base_url

    @property
    def settings(self) -> Mapping[str, str]:
        """The tokenizer."""
        return {"TOKENIZER": str(self._engine.model)}

    @property
    def texts(self) -> Texts:
        """For its tokenizer."""
        return RealTexts(self._engine.model)

    def limit(self, queue: int | None) -> bool:
        """Start it again where it has another limit."""
        if queue != self.queue:
            self.close()
            self.queue = queue
            self._engine = self._started()
        return True

    def close(self) -> None:
        """Kill it."""
        self._engine.kill()


@dataclass(slots=True)
class SimStage:
    """The simulated engine as a server."""

    pool: Pool = USUAL
    model: str = "sim"
    queue: int | None = None
    counts_steps: bool = False
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        options = {
            "--port": self.port,
            "--model": self.model,
            "--profile": PROFILE,
            "--blocks": self.pool.blocks,
            "--block-size": self.pool.block,
            "--max-model-len": self.pool.context,
        }
        words = [str(part) for option in options.items() for part in option]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvctl.sim", *words, "--with-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        eventually(lambda: http_get(f"{self.url}/health")[0] == 200, 20, "the simulated engine answers")

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def settings(self) -> Mapping[str, str]:
        """None: the engine counts its tokens."""
        return {}

    @property
    def texts(self) -> Texts:
        """For its tokenizer."""
        return SimTexts()

    def limit(self, queue: int | None) -> bool:
        """It has no such limit."""
        return queue is None

    def close(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


STAGES = {"cpu": CpuStage, "sim": SimStage}


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[list[Page]]:
    """The engine's pages as they come, every half second."""
    pages = [await asyncio.to_thread(read_page, url)]

    async def look() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(SilentError):
                pages.append(await asyncio.to_thread(read_page, url))

    task = asyncio.create_task(look())
    try:
        yield pages
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        pages.append(await asyncio.to_thread(read_page, url))
