"""vLLM: what it calls its gauges, release by release.

Law 3: unknown is not zero. A series that vanished, a renamed gauge, NaN, a share above 1: the field is
None and ``absent`` says why.

Traps that this module knows: both names of a renamed gauge on one page (the new one counts, they are never
added up); ``_`` for ``:`` after a re-export; ``_created`` series (never read); several copies of one rank's
series (multi-process mode, an aggregator between): equal ones are one, contradicting ones are absent and the
set-up is named unsupported; LoRA series, whose values are no counts (never read).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.core.outcomes import Absence, SourceFault
from kvctl.core.telemetry import EngineInfo, RankSample
from kvctl.engines.base import Form, PageError, Route
from kvctl.engines.page import Page, Reading, read_page
from kvctl.engines.series import (
    Series,
    Source,
    agreed,
    by_name,
    field_of,
    label_of,
    length,
    length_histogram,
    name_of,
    of_engine,
    sample_of,
    text,
)
from kvctl.engines.values import count, counter, flag, ratio
from kvctl.engines.vllm_pool import Pool, read_pool
from kvctl.engines.vllm_routes import ROUTES

SOURCES = (
    # gpu_cache_usage_perc until 0.11, kv_cache_usage_perc since about 0.9.2; both in between
    Source("kv_usage_ratio", ("kv_cache_usage_perc", "gpu_cache_usage_perc"), ratio),
    Source("running", ("num_requests_running",), count),
    Source("waiting", ("num_requests_waiting",), count),
    # both since about 0.2x
    Source("waiting_for_capacity", ("num_requests_waiting_by_reason",), count, ("reason", "capacity")),
    Source("awake", ("engine_sleep_state",), flag, ("sleep_state", "awake")),
    Source("preemptions_total", ("num_preemptions_total",), counter),
    Source("prompt_tokens_total", ("prompt_tokens_total",), counter),
    Source("generation_tokens_total", ("generation_tokens_total",), counter),
    # since about 0.9.2; the older gpu_prefix_cache_* counted blocks in some releases, so they are not read
    Source("prefix_queries_total", ("prefix_cache_queries_total",), counter),
    Source("prefix_hits_total", ("prefix_cache_hits_total",), counter),
)

_LENGTHS = "request_generation_tokens_bucket"
_INFO = "cache_config_info"
_EXTERNAL_HITS = "external_prefix_cache_queries_total"  # there without a connector too, and then 0
_STARTED = "process_start_time_seconds"
_PREFIXES = ("vllm:", "vllm_")

_NAMES = (*(name for source in SOURCES for name in source.names), _LENGTHS, _INFO, _EXTERNAL_HITS)
_WANTED = frozenset({_STARTED, *(prefix + name for prefix in _PREFIXES for name in _NAMES)})

# Series that exist only with a KV connector: KV then moves in and out of the pool beside the scheduler.
_CONNECTORS = ("nixl_", "kv_offload", "simple_kv_offload", "mooncake_", "num_requests_kv_fetch_by_stage")
_CONNECTOR_MARKS = (
    *(prefix + name for prefix in _PREFIXES for name in _CONNECTORS),
    "lmcache:",
    "lmcache_",
)

_COPIES = "copies of one rank's series disagree (several processes or an aggregator behind one page)"


class VLLM:
    """The adapter of vLLM, V0 to 0.32."""

    name = "vllm"
    metrics_path = "/metrics"
    info_path = "/v1/models"
    more_info_paths: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ROUTES
    pins_ranks = True
    clamps_output = True  # 0.32 does; older releases refuse, which costs a needless forward and no wrong 400

    def parse_metrics(self, page: str, at: float) -> list[RankSample]:
        """One sample per data-parallel rank. Raises PageError."""
        read = read_page(page, _WANTED, _CONNECTOR_MARKS)
        own = by_name(read.readings, _NAMES, _PREFIXES)
        series = {**own, **by_name(read.readings, (_STARTED,))}
        if not any(own.values()):
            raise PageError(SourceFault.NO_SERIES, "no series of vLLM on the page")
        ranks = _ranks(series)
        return [_sample(rank, len(ranks), series, read, at) for rank in ranks]

    def parse_info(self, answer: Mapping[str, Any]) -> EngineInfo:
        """``/v1/models``: names that may be asked for (adapters too) and the context length."""
        cards = answer.get("data")
        models = [card for card in cards if isinstance(card, Mapping)] if isinstance(cards, list) else []
        contexts = {tokens for card in models if (tokens := length(card.get("max_model_len"))) is not None}
        return EngineInfo(
            engine=self.name,
            models=tuple(name for card in models if (name := text(card.get("id"))) is not None),
            context_tokens=contexts.pop() if len(contexts) == 1 else None,
            clamps_output=self.clamps_output,
        )

    def default_output(self, route: Route) -> int | None:
        """Completions stop after 16 tokens, everything else at the context's end."""
        return 16 if route.form is Form.COMPLETION else None


def _rank_label(reading: Reading) -> str:
    return reading.labels.get("engine", "")


def _ranks(series: Series) -> list[str]:
    """Ranks on the page, ascending. Before V1 there is no label ``engine``: one rank, "0"."""
    labels = {_rank_label(reading) for name in _NAMES for reading in series[name]} - {""}
    return of_engine(sorted(labels, key=lambda label: (not label.isdecimal(), len(label), label))) or ["0"]


def _of_rank(readings: Sequence[Reading], rank: str, ranks: int) -> list[Reading]:
    """Those of ``rank``; what has no rank of its own belongs to a single one."""
    own = [reading for reading in readings if _rank_label(reading) == rank]
    return own or [reading for reading in readings if ranks == 1 and not _rank_label(reading)]


def _sample(rank: str, ranks: int, series: Series, page: Page, at: float) -> RankSample:
    mine = {name: _of_rank(readings, rank, ranks) for name, readings in series.items()}
    infos = mine[_INFO] or [reading for reading in series[_INFO] if not _rank_label(reading)]
    pool = read_pool([info.labels for info in infos if info.value == 1], ranks)
    found: dict[str, Any] = {source.field: field_of(source, mine) for source in SOURCES}
    found |= {
        "block_size": pool.block_size,
        "capacity_tokens": pool.capacity_tokens,
        "prefix_caching": pool.prefix_caching,
        "output_lengths": length_histogram(mine[_LENGTHS]),
        "started_at": agreed(series[_STARTED], counter),
        "usage_gauge": next((name_of(mine[name]) for name in SOURCES[0].names if mine[name]), ""),
    }
    return sample_of(
        rank,
        at,
        found,
        model=label_of(mine, "model_name"),
        capacity_exact=pool.capacity_exact,
        unsupported=_unsupported(pool, page, mine, found),
    )


def _unsupported(pool: Pool, page: Page, mine: Series, found: Mapping[str, object]) -> str | None:
    """Set-ups whose gauges mean something else; kvctl then goes by its ledger."""
    if pool.unsupported is not None:
        return pool.unsupported
    if page.marks or any(reading.value > 0 for reading in mine[_EXTERNAL_HITS]):
        marks = ", ".join(sorted(mark.rstrip(":_") for mark in page.marks))
        return f"KV connector ({marks or _EXTERNAL_HITS})"
    return _COPIES if Absence.NOT_SUPPORTED in found.values() else None
