"""Frozen samples of engine ranks and GPUs.

Law 3: unknown is not zero. A field is a good value or None; ``absent`` then says why, by field name.
Every ``at`` is monotonic seconds. Engine adapters and the NVML adapter build these; the core only reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from kvctl.core.outcomes import Absence

MAX_RANKS = 128
"""Of one engine: each costs a gate of its own, so a page or an answer that tells of more is not believed."""

_NOTHING_ABSENT: Mapping[str, Absence] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthHistogram:
    """Cumulative histogram of output lengths: ``counts[i]`` answers had at most ``bounds[i]`` tokens."""

    bounds: tuple[float, ...]  # ascending, the last may be inf
    counts: tuple[float, ...]  # cumulative, same length

    @property
    def total(self) -> float:
        """Number of answers in the histogram."""
        return self.counts[-1] if self.counts else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """One reading of one scheduler with its own KV pool.

    ``capacity_tokens`` is usable KV tokens (the null block taken off) of this rank alone;
    ``capacity_exact`` is False where it was derived in a way that misleads on some models,
    and then it may justify a 429 but never a 400.
    """

    rank: str
    at: float
    model: str = ""
    kv_usage_ratio: float | None = None  # 0..1 of capacity_tokens
    usage_gauge: str = ""  # what the engine calls it; "": it has none
    running: int | None = None
    waiting: int | None = None
    waiting_for_capacity: int | None = None
    preemptions_total: float | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    prefix_queries_total: float | None = None
    prefix_hits_total: float | None = None
    awake: bool | None = None
    block_size: int | None = None
    capacity_tokens: int | None = None
    capacity_exact: bool = False
    prefix_caching: bool | None = None
    started_at: float | None = None  # the engine's process_start_time_seconds (wall clock), to see restarts
    output_lengths: LengthHistogram | None = None
    unsupported: str | None = None  # a set-up in which the gauges mean something else
    steps_total: float | None = None  # iterations of the engine, each a token to every running sequence
    counts_at_end: bool = False  # the token totals move only when a request ends
    usage_comparable: bool = True  # False: usage counts reservations, or lags; shown, not held against leases
    absent: Mapping[str, Absence] = field(default_factory=lambda: _NOTHING_ABSENT)


_NEVER_FALL = ("generation_tokens_total", "prompt_tokens_total", "preemptions_total", "steps_total")


def is_another_process(before: RankSample, after: RankSample) -> bool:
    """Whether the rank's engine restarted in between: its start time moved, or a running total fell."""
    if None not in (before.started_at, after.started_at) and before.started_at != after.started_at:
        return True
    pairs = ((getattr(before, name), getattr(after, name)) for name in _NEVER_FALL)
    return any(old is not None and new is not None and new < old for old, new in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says of itself apart from metrics (``/v1/models`` and the like). None: it does not say.

    Engines whose metrics page has no pool tell it here: ``rank_capacity_tokens`` of each of ``ranks``.
    """

    engine: str = ""  # the adapter that read it
    models: tuple[str, ...] = ()
    context_tokens: int | None = None  # max_model_len
    version: str | None = None
    rank_capacity_tokens: int | None = None
    capacity_exact: bool = False
    block_size: int | None = None
    ranks: int | None = None
    max_num_seqs: int | None = None  # sequences at once, or requests that it takes at once, of all ranks
    clamps_output: bool | None = None


def together(parts: Sequence[EngineInfo]) -> EngineInfo:
    """One description from several answers: of each field the first that says anything."""
    found: dict[str, Any] = {}
    for field_of in fields(EngineInfo):
        values = [getattr(part, field_of.name) for part in parts]
        found[field_of.name] = next((v for v in values if v not in (None, (), "", False)), values[-1])
    return EngineInfo(**found)


def with_pool(samples: Sequence[RankSample], info: EngineInfo) -> tuple[RankSample, ...]:
    """Samples in which ``info`` tells the pool where the page does not; invented where there is no page."""
    if info.rank_capacity_tokens is None:
        return tuple(samples)
    ranks = range(0 if samples else min(info.ranks or 1, MAX_RANKS))
    invented = [RankSample(rank=str(rank), at=0.0) for rank in ranks]
    return tuple(
        sample
        if sample.capacity_tokens
        else replace(
            sample,
            capacity_tokens=info.rank_capacity_tokens,
            capacity_exact=info.capacity_exact,
            block_size=sample.block_size or info.block_size,
        )
        for sample in samples or invented
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One reading of one card. Bytes; ``free`` is read with the v2 call where it works."""

    uuid: str
    at: float
    index: int | None = None
    name: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] | None = None  # None: unknown; (): none
    ecc_uncorrected_total: int | None = None
    lost: bool = False
    absent: Mapping[str, Absence] = field(default_factory=lambda: _NOTHING_ABSENT)
