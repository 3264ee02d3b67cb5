"""The simulated engine: vLLM's page and models, and ``POST /generate`` with lengths instead of text.

The plain form, ``{"prompt_tokens": 900, "max_new_tokens": 200}``, is what small stand-ins of an engine speak
in load tests and classrooms: it needs no tokenizer, so its counts are exact.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvctl.core.telemetry import EngineInfo, RankSample
from kvctl.engines.base import Form, Route
from kvctl.engines.route_table import generating, passed
from kvctl.engines.vllm import VLLM

_GENERATE = (
    ("/generate", "generate", Form.PLAIN_GENERATE),
    ("/v1/chat/completions", "chat", Form.CHAT),
    ("/v1/completions", "completions", Form.COMPLETION),
    ("/v1/responses", "responses", Form.RESPONSES),
)
_PASS = (
    ("GET", "/v1/models", "models"),
    ("GET", "/version", "version"),
    ("GET", "/health", "health"),
    ("GET", "/ping", "ping"),
    ("GET", "/metrics", "metrics"),
    ("POST", "/tokenize", "tokenize"),
    ("POST", "/detokenize", "detokenize"),
    ("GET", "/v1/responses/*", "responses_stored"),
    ("POST", "/v1/responses/*", "responses_stored"),  # /cancel
)
DEFAULT_OUTPUT = 512


class Sim:
    """The adapter of ``python -m kvctl.sim`` and of engines that speak its plain form."""

    name = "sim"
    metrics_path = "/metrics"
    info_path = "/v1/models"
    more_info_paths: tuple[str, ...] = ()
    routes: tuple[Route, ...] = (*generating(_GENERATE), *passed(_PASS))
    pins_ranks = True
    clamps_output = True

    def __init__(self) -> None:
        self._vllm = VLLM()

    def parse_metrics(self, page: str, at: float) -> list[RankSample]:
        """As vLLM's. Raises PageError."""
        return self._vllm.parse_metrics(page, at)

    def parse_info(self, answer: Mapping[str, Any]) -> EngineInfo:
        """As vLLM's ``/v1/models``."""
        return replace(self._vllm.parse_info(answer), engine=self.name)

    def default_output(self, route: Route) -> int | None:
        """512 in the plain form, else as vLLM."""
        return DEFAULT_OUTPUT if route.name == "generate" else self._vllm.default_output(route)
