"""TGI (text-generation-inference) 1 to 3: what it calls its gauges.

Law 3: unknown is not zero. Series appear with their first value: an idle engine's page lacks most of them,
and that of an older release is empty until the first request.

What its gauges mean. ``tgi_batch_current_max_tokens`` is not what the batch holds but what it has *reserved*:
of each request its input and the lesser of ``max_new_tokens`` and 1,024 beyond it, in chunks that roll on as
the answer grows. TGI takes a request in only where that fits ``tgi_batch_max_total_tokens``, so it never
preempts; it lets requests wait. The ratio of both is shown as usage and never compared with what leases
hold. Token totals are sums of histograms that move when a request ends; between, only the count of forward
passes does.
"""

from collections.abc import Mapping
from typing import Any

from kvctl.core.outcomes import Absence, SourceFault
from kvctl.core.telemetry import EngineInfo, RankSample
from kvctl.engines.base import PageError, Route
from kvctl.engines.page import read_page
from kvctl.engines.series import (
    Series,
    Source,
    by_name,
    field_of,
    length,
    length_histogram,
    name_of,
    sample_of,
    text,
    wanted,
)
from kvctl.engines.tgi_routes import ROUTES
from kvctl.engines.values import count, counter, ratio

SOURCES = (
    Source("running", ("tgi_batch_current_size",), count),
    Source("waiting", ("tgi_queue_size",), count),
    Source("prompt_tokens_total", ("tgi_request_input_length_sum",), counter),
    Source("generation_tokens_total", ("tgi_request_generated_tokens_sum",), counter),
    # the histogram's count where the counter is not there
    Source(
        "steps_total",
        ("tgi_batch_inference_count", "tgi_batch_inference_duration_count"),
        counter,
        ("method", "decode"),
    ),
    Source("capacity_tokens", ("tgi_batch_max_total_tokens",), count),  # since about 2.2
)
_RESERVED = Source("kv_usage_ratio", ("tgi_batch_current_max_tokens",), counter)
_LENGTHS = "tgi_request_generated_tokens_bucket"
_MARK = ("tgi_",)
_NAMES = (*(name for source in (*SOURCES, _RESERVED) for name in source.names), _LENGTHS)
DEFAULT_OUTPUT = 100


class TGI:
    """The adapter of TGI."""

    name = "tgi"
    metrics_path = "/metrics"
    info_path = "/info"
    more_info_paths: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ROUTES
    pins_ranks = False
    clamps_output = False  # 422 where input and max_new_tokens together pass max_total_tokens

    def parse_metrics(self, page: str, at: float) -> list[RankSample]:
        """One sample: TGI's shards are one scheduler. Raises PageError."""
        read = read_page(page, wanted(_NAMES, ("",)), _MARK)
        if not read.readings and not read.marks:
            raise PageError(SourceFault.NO_SERIES, "no series of TGI on the page")
        series = by_name(read.readings, _NAMES)
        found: dict[str, Any] = {source.field: field_of(source, series) for source in SOURCES}
        found["kv_usage_ratio"] = _reserved_share(series, found["capacity_tokens"])
        found["output_lengths"] = length_histogram(series[_LENGTHS])
        gauge = name_of(series[_RESERVED.names[0]])
        return [sample_of("0", at, found, usage_gauge=gauge, counts_at_end=True, usage_comparable=False)]

    def parse_info(self, answer: Mapping[str, Any]) -> EngineInfo:
        """``/info``: model, limits, and up to 2.1 the capacity, which the metrics page told only later.

        ``max_concurrent_requests`` bounds all requests, those that wait inside included: with one more TGI
        answers 429.
        """
        model = text(answer.get("model_id"))
        return EngineInfo(
            engine=self.name,
            models=() if model is None else (model,),
            context_tokens=length(answer.get("max_total_tokens")),
            version=text(answer.get("version")),
            rank_capacity_tokens=length(answer.get("max_batch_total_tokens")),
            max_num_seqs=length(answer.get("max_concurrent_requests")),
            clamps_output=self.clamps_output,
        )

    def default_output(self, route: Route) -> int | None:
        """100 on its own routes and for completions; a chat goes on to the end of the context."""
        return None if route.name == "chat" else DEFAULT_OUTPUT


def _reserved_share(series: Series, capacity: int | Absence) -> float | Absence:
    """Reserved tokens as a share of the capacity that the same page tells."""
    reserved = field_of(_RESERVED, series)
    if isinstance(reserved, Absence):
        return reserved
    if isinstance(capacity, Absence) or not capacity:
        return Absence.MISSING
    return ratio(reserved / capacity)
