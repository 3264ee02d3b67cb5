"""llama.cpp's server: what it calls its gauges, and what bounds it.

Law 3: unknown is not zero. The page (flag ``--metrics``) has no gauge of the KV cache since mid 2025; an
older one's ``kv_cache_usage_ratio`` is read where it is there. Numbers above a million have six digits. Token
totals move when a request ends (``tokens_predicted_total``); between, ``n_decode_total`` does, with every
call of the model.

The pool. A request runs in one of ``total_slots`` slots (``--parallel``) of ``n_ctx`` tokens each; with all
slots taken the next one waits. ``/props`` tells both numbers, and not how the slots share the memory:

* split: each slot has its own ``n_ctx`` tokens, ``total_slots x n_ctx`` together, and a request can never
  take another's;
* unified (``--kv-unified``, and the default where ``--parallel`` is not given, which makes four slots): all
  slots share one pool of ``n_ctx``, and where it runs out, every request in it fails.

So four slots are taken for the default, with one pool of ``n_ctx``; any other number for split ones. What was
set against that is the operator's to say (``capacity_tokens``, upwards with ``capacity_force``). It is a
guess, and never a proof for a 400: ``n_ctx`` is one, as the context of every request.
"""

from collections.abc import Mapping
from typing import Any

from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import EngineInfo, RankSample
from kvctl.engines.base import PageError, Route
from kvctl.engines.llamacpp_routes import ROUTES
from kvctl.engines.page import read_page
from kvctl.engines.series import Source, by_name, field_of, inside, length, name_of, sample_of, text, wanted
from kvctl.engines.values import count, counter, ratio

SOURCES = (
    Source("kv_usage_ratio", ("kv_cache_usage_ratio",), ratio),
    Source("running", ("requests_processing",), count),
    Source("waiting", ("requests_deferred",), count),
    Source("prompt_tokens_total", ("prompt_tokens_total",), counter),
    Source("generation_tokens_total", ("tokens_predicted_total",), counter),
    Source("steps_total", ("n_decode_total",), counter),
)
_PREFIXES = ("llamacpp:", "llamacpp_")
_NAMES = tuple(name for source in SOURCES for name in source.names)
_WANTED = wanted(_NAMES, _PREFIXES)
AUTO_SLOTS = 4  # made where --parallel is not given, over one shared pool


class LlamaCpp:
    """The adapter of llama.cpp's own server (``llama-server``)."""

    name = "llamacpp"
    metrics_path = "/metrics"
    info_path = "/props"
    more_info_paths: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ROUTES
    pins_ranks = False
    clamps_output = True  # an answer ends where its slot is full, whatever was asked

    def parse_metrics(self, page: str, at: float) -> list[RankSample]:
        """One sample. Raises PageError."""
        series = by_name(read_page(page, _WANTED).readings, _NAMES, _PREFIXES)
        if not any(series.values()):
            raise PageError(SourceFault.NO_SERIES, "no series of llama.cpp on the page")
        found: dict[str, Any] = {source.field: field_of(source, series) for source in SOURCES}
        gauge = name_of(series["kv_cache_usage_ratio"])
        return [sample_of("0", at, found, usage_gauge=gauge, counts_at_end=True)]

    def parse_info(self, answer: Mapping[str, Any]) -> EngineInfo:
        """``/props``: slots and their context."""
        context = length(inside(answer, "default_generation_settings").get("n_ctx"))
        slots = length(answer.get("total_slots"))
        model = text(answer.get("model_alias")) or text(answer.get("model_path"))
        return EngineInfo(
            engine=self.name,
            models=() if model is None else (model,),
            context_tokens=context,
            version=text(answer.get("build_info")),
            rank_capacity_tokens=None if context is None else _pool(context, slots),
            block_size=1,  # a token is a cell
            max_num_seqs=slots,
            clamps_output=self.clamps_output,
        )

    def default_output(self, route: Route) -> int | None:  # noqa: ARG002 - one signature
        """Answers go on to the end of the context."""
        return None


def _pool(context: int, slots: int | None) -> int:
    """KV tokens of all slots; the lesser of what is possible where it cannot be told."""
    return context if slots in (None, AUTO_SLOTS) else context * (slots or 1)
