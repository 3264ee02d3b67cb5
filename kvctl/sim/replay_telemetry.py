"""What a metrics page and a card say in a replay."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from kvctl.core.telemetry import GpuSample, LengthHistogram, RankSample
from kvctl.sim.policies_core import MODEL
from kvctl.sim.replay_engine import VirtualEngine
from kvctl.sim.replay_faults import Fault, FaultKind, active
from kvctl.sim.scheduler import EngineConfig

GIB = 1 << 30
TOTAL_BYTES, FREE_BYTES, TAKEN_BYTES = 24 * GIB, 2 * GIB, 3 * GIB // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The numbers of a page; the sample is dated when it is read."""

    kv_usage_ratio: float
    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    lengths: LengthHistogram
    started_at: float


class Telemetry:
    """Makes the pages of one engine, frozen where a fault says so."""

    def __init__(self, config: EngineConfig, faults: Sequence[Fault]) -> None:
        self._capacity = (config.blocks - 1) * config.block_size
        self._block = config.block_size
        self._caching = config.prefix_caching
        self._faults = faults
        self._started_at = 1.0
        self._last: Page | None = None

    def restarted(self, now: float) -> None:
        """The engine is another process."""
        self._started_at = 1.0 + now
        self._last = None

    def page(self, engine: VirtualEngine, now: float) -> Page:
        """What the page says now."""
        if self._last is not None and active(self._faults, FaultKind.FREEZE, now):
            return self._last
        scheduler, lengths = engine.scheduler, engine.lengths
        self._last = Page(
            kv_usage_ratio=scheduler.usage_ratio,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.counters.preemptions,
            prompt_tokens=scheduler.counters.prompt_tokens,
            generation_tokens=scheduler.counters.generation_tokens,
            prefix_queries=scheduler.counters.prefix_queries,
            prefix_hits=scheduler.counters.prefix_hits,
            lengths=LengthHistogram(
                bounds=(*lengths.bounds, inf), counts=tuple(map(float, accumulate(lengths.counts)))
            ),
            started_at=self._started_at,
        )
        return self._last

    def sample(self, page: Page, now: float) -> RankSample:
        """The page as the engine's adapter reads it ``now``."""
        return RankSample(
            rank="0",
            at=now,
            model=MODEL,
            kv_usage_ratio=page.kv_usage_ratio,
            running=page.running,
            waiting=page.waiting,
            waiting_for_capacity=page.waiting,  # for blocks, a slot or a step: not for anything else
            preemptions_total=page.preemptions,
            prompt_tokens_total=page.prompt_tokens,
            generation_tokens_total=page.generation_tokens,
            prefix_queries_total=page.prefix_queries,
            prefix_hits_total=page.prefix_hits,
            awake=True,
            block_size=self._block,
            capacity_tokens=self._capacity,
            capacity_exact=True,
            prefix_caching=self._caching,
            started_at=page.started_at,
            output_lengths=page.lengths,
        )


def card_at(now: float, *, taken: bool) -> GpuSample:
    """The card's memory, with or without the neighbour."""
    free = FREE_BYTES - (TAKEN_BYTES if taken else 0)
    return GpuSample(uuid="GPU-0", at=now, total_bytes=TOTAL_BYTES, free_bytes=free)
