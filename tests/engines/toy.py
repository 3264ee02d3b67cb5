"""A whole engine adapter, as somebody would add one: this module is all there is to it."""

from collections.abc import Mapping
from typing import Any

from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import EngineInfo, RankSample
from kvctl.engines.base import Form, PageError, Route, Treatment
from kvctl.engines.page import read_page
from kvctl.engines.series import Source, by_name, field_of, length, sample_of, text, wanted
from kvctl.engines.values import count, counter, ratio

SOURCES = (
    Source("kv_usage_ratio", ("pool_used_ratio",), ratio),
    Source("running", ("active",), count),
    Source("waiting", ("queued",), count),
    Source("generation_tokens_total", ("tokens_out_total",), counter),
    Source("capacity_tokens", ("pool_tokens",), count),
)
NAMES = tuple(name for source in SOURCES for name in source.names)


class Toy:
    """The adapter of an engine that does not exist."""

    name = "toy"
    metrics_path = "/stats"
    info_path = "/about"
    more_info_paths: tuple[str, ...] = ()
    clamps_output = True
    routes: tuple[Route, ...] = (
        Route(
            method="POST",
            path="/complete",
            name="complete",
            treatment=Treatment.GENERATE,
            form=Form.PLAIN_GENERATE,
        ),
        Route(method="GET", path="/stats", name="stats", treatment=Treatment.PASS),
    )

    def parse_metrics(self, page: str, at: float) -> list[RankSample]:
        """One sample."""
        series = by_name(read_page(page, wanted(NAMES, ("toy_",))).readings, NAMES, ("toy_",))
        if not any(series.values()):
            raise PageError(SourceFault.NO_SERIES, "no series of the toy on the page")
        return [sample_of("0", at, {source.field: field_of(source, series) for source in SOURCES})]

    def parse_info(self, answer: Mapping[str, Any]) -> EngineInfo:
        """``/about``."""
        model = text(answer.get("model"))
        return EngineInfo(
            engine=self.name,
            models=() if model is None else (model,),
            context_tokens=length(answer.get("longest")),
        )

    def default_output(self, route: Route) -> int | None:  # noqa: ARG002 - one signature
        """64 tokens."""
        return 64
