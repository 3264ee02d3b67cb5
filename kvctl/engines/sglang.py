"""SGLang 0.4 to 0.5: what it calls its gauges, and what only its own description tells.

Law 3: unknown is not zero. Metrics are off unless the engine has ``--enable-metrics``; then ``/metrics`` is
404, the state is "no telemetry", and ``/get_server_info`` still tells the pool.

Traps that this module knows: ``_`` for ``:`` after a re-export; one series per tensor-parallel rank
(``tp_rank``), of which the least speaks for all, since they hold shares of the same tokens; one scheduler and
pool per ``dp_rank``; a ``priority`` label that splits the queue (the total is the one without); token totals
that know no rank, split by ``is_streaming``, and move only when a request ends. ``token_usage`` is rounded to
hundredths. Gauges are written with each prefill and each 40th decode step, and stand still on an engine that
went idle, so usage is shown and never compared with what leases hold.

A retraction is what elsewhere is called a preemption: the request loses its KV and is computed again.
"""

from collections.abc import Mapping
from typing import Any

from kvctl.core.outcomes import Absence, SourceFault
from kvctl.core.telemetry import MAX_RANKS, EngineInfo, RankSample
from kvctl.engines.base import PageError, Route
from kvctl.engines.page import Page, Reading, read_page
from kvctl.engines.series import (
    Series,
    Source,
    by_name,
    field_of,
    inside,
    label_of,
    length,
    length_histogram,
    name_of,
    of_engine,
    sample_of,
    text,
    wanted,
)
from kvctl.engines.sglang_routes import ROUTES
from kvctl.engines.values import count, counter, ratio

# Of each scheduler.
SOURCES = (
    Source("running", ("num_running_reqs",), count),
    Source("waiting", ("num_queue_reqs",), count),
    Source("capacity_tokens", ("max_total_num_tokens",), count),
    Source("preemptions_total", ("num_retracted_requests_total",), counter),
)
# Of the engine as a whole: on the first rank's sample.
_SHARED = (
    Source("prompt_tokens_total", ("prompt_tokens_total",), counter, summed=True),
    Source("prefix_queries_total", ("prompt_tokens_total",), counter, summed=True),
    Source("prefix_hits_total", ("cached_tokens_total",), counter, summed=True),
)
_AT_END = Source("generation_tokens_total", ("generation_tokens_total",), counter, summed=True)
_REALTIME = Source("generation_tokens_total", ("realtime_tokens_total",), counter, ("mode", "decode"))
_SHARE = Source("kv_usage_ratio", ("token_usage",), ratio)
_USED = Source("kv_usage_ratio", ("num_used_tokens",), counter)
_OTHER_POOLS = ("swa_token_usage", "mamba_usage")
_LENGTHS = "generation_tokens_histogram_bucket"

_ALL = (*SOURCES, *_SHARED, _AT_END, _REALTIME, _SHARE, _USED)
_NAMES = (*dict.fromkeys(name for source in _ALL for name in source.names), *_OTHER_POOLS, _LENGTHS)
_PREFIXES = ("sglang:", "sglang_")
_WANTED = wanted(_NAMES, _PREFIXES)
_SHARDS = ("pp_rank", "tp_rank", "moe_ep_rank")
_DEFAULTS = {"generate": 128, "completions": 16}


class SGLang:
    """The adapter of SGLang."""

    name = "sglang"
    metrics_path = "/metrics"
    info_path = "/get_server_info"
    more_info_paths: tuple[str, ...] = ("/v1/models",)  # the context length is told only there
    routes: tuple[Route, ...] = ROUTES
    pins_ranks = False
    clamps_output = True  # most releases refuse, some clamp: that costs a needless forward and no wrong 400

    def parse_metrics(self, page: str, at: float) -> list[RankSample]:
        """One sample per data-parallel rank. Raises PageError."""
        read: Page = read_page(page, _WANTED, _PREFIXES)
        series = by_name(read.readings, _NAMES, _PREFIXES)
        if not any(series.values()):
            raise PageError(SourceFault.NO_SERIES, "no series of SGLang on the page")
        labels = {r.labels.get("dp_rank", "") for readings in series.values() for r in readings} - {""}
        ranks = of_engine(sorted(labels, key=lambda rank: (len(rank), rank))) or ["0"]
        return [_sample(rank, rank == ranks[0], series, at) for rank in ranks]

    def parse_info(self, answer: Mapping[str, Any]) -> EngineInfo:
        """``/get_server_info`` (its arguments, with what its schedulers found) or ``/v1/models``."""
        if "data" in answer:
            return self._models(answer)
        states = answer.get("internal_states")
        state = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
        pool = length(answer.get("max_total_num_tokens"))
        name = text(answer.get("served_model_name")) or text(answer.get("model_path"))
        ranks = length(answer.get("dp_size")) or 1
        ranks = ranks if ranks <= MAX_RANKS else 1  # no engine has so many: that is no number of ranks
        each = length(state.get("effective_max_running_requests_per_dp"))
        return EngineInfo(
            engine=self.name,
            models=() if name is None else (name,),
            context_tokens=None if _truncates(answer) else length(answer.get("context_length")),
            version=text(answer.get("version")),
            rank_capacity_tokens=pool or length(inside(state, "memory_usage").get("token_capacity")),
            block_size=length(answer.get("page_size")) or 1,
            ranks=ranks,
            max_num_seqs=length(answer.get("max_running_requests")) if each is None else each * ranks,
            clamps_output=self.clamps_output,
        )

    def _models(self, answer: Mapping[str, Any]) -> EngineInfo:
        cards = answer["data"] if isinstance(answer["data"], list) else []
        cards = [card for card in cards if isinstance(card, Mapping)]
        contexts = {length(card.get("max_model_len")) for card in cards}
        return EngineInfo(
            engine=self.name,
            models=tuple(name for card in cards if (name := text(card.get("id"))) is not None),
            context_tokens=contexts.pop() if len(contexts) == 1 else None,
        )

    def default_output(self, route: Route) -> int | None:
        """128 on /generate, 16 for completions, else the rest of the context."""
        return _DEFAULTS.get(route.name)


def _truncates(answer: Mapping[str, Any]) -> bool:
    """With this flag a prompt beyond the context is cut instead of refused: no length proves anything."""
    return answer.get("allow_auto_truncate") is True


def _sample(rank: str, first: bool, series: Series, at: float) -> RankSample:
    mine = {name: _of_scheduler(rank, readings) for name, readings in series.items()}
    found: dict[str, Any] = {source.field: field_of(source, mine) for source in SOURCES}
    for source in _SHARED:
        found[source.field] = field_of(source, series) if first else Absence.MISSING
    made = field_of(_REALTIME, mine)
    at_end = isinstance(made, Absence)
    if at_end:
        made = field_of(_AT_END, series) if first else Absence.MISSING
    found["generation_tokens_total"] = made
    found["kv_usage_ratio"] = _usage(mine, found["capacity_tokens"])
    found["output_lengths"] = length_histogram(series[_LENGTHS]) if first else Absence.MISSING
    return sample_of(
        rank,
        at,
        found,
        model=label_of(mine, "model_name"),
        unsupported=_unsupported(mine),
        usage_gauge=name_of(mine["token_usage"]),
        counts_at_end=at_end,
        usage_comparable=False,
    )


def _of_scheduler(rank: str, readings: Any) -> list[Reading]:
    """The readings of one data-parallel rank, as its least shard tells them."""
    mine = [r for r in readings if r.labels.get("dp_rank", rank) == rank and not r.labels.get("priority")]
    least = min((_shard(reading) for reading in mine), default=())
    return [reading for reading in mine if _shard(reading) == least]


def _shard(reading: Reading) -> tuple[tuple[int, str], ...]:
    return tuple((len(label), label) for label in (reading.labels.get(name, "") for name in _SHARDS))


def _usage(mine: Series, capacity: int | Absence) -> float | Absence:
    """Of one plain pool exactly, by its tokens; of several pools the fullest one's share, as it is told."""
    used, share = field_of(_USED, mine), field_of(_SHARE, mine)
    several = any(reading.value > 0 for name in _OTHER_POOLS for reading in mine[name])
    if several or isinstance(used, Absence) or isinstance(capacity, Absence) or not capacity:
        return share
    exact = ratio(used / capacity)
    return share if isinstance(exact, Absence) else exact


def _unsupported(mine: Series) -> str | None:
    """Set-ups in which one pool is not where a request lives."""
    kind = label_of(mine, "engine_type")
    return f"prefill/decode split ({kind})" if kind in ("prefill", "decode") else None
