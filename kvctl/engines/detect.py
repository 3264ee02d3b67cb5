"""Which engine answers, by what its URL says. An unexpected engine has a name and a sentence, it is no crash.

Asked are a few GETs that no engine minds. The most telling answer counts: series on the metrics page that
carry the engine's prefix, then a page of its own with the fields that only it has, then the owner of its
models. Nothing here does IO: ``kvctl.control.probe`` asks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvctl.core.telemetry import EngineInfo, RankSample
from kvctl.engines.base import Engine, Route
from kvctl.engines.llamacpp import LlamaCpp
from kvctl.engines.series import json_object
from kvctl.engines.sglang import SGLang
from kvctl.engines.sim import Sim
from kvctl.engines.tgi import TGI
from kvctl.engines.vllm import VLLM

AUTO = "auto"

ENGINES: Mapping[str, Engine] = {
    engine.name: engine for engine in (VLLM(), TGI(), SGLang(), LlamaCpp(), Sim())
}

PROBED = ("/metrics", "/v1/models", "/info", "/get_server_info", "/props", "/version", "/api/tags")
"""What is asked to find the engine out."""

# First letters of an engine's series; ``_`` stands for ``:`` after a re-export. The first found counts.
_SERIES = {
    "sim": ("sim:", "sim_"),
    "vllm": ("vllm:", "vllm_"),
    "sglang": ("sglang:", "sglang_"),
    "tgi": ("tgi_",),
    "llamacpp": ("llamacpp:", "llamacpp_"),
    "triton": ("nv_inference_", "nv_trt_llm_"),
    "lmdeploy": ("lmdeploy:", "lmdeploy_"),
    "tei": ("te_",),
}
_SHOWN = {
    "vllm": "vLLM",
    "tgi": "TGI",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp's server",
    "sim": "the simulated engine",
    "triton": "Triton Inference Server",
    "lmdeploy": "LMDeploy",
    "tei": "text-embeddings-inference",
    "ollama": "Ollama",
}
_OWNERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llamacpp",
    "kvctl-sim": "sim",
    "library": "ollama",
}

_MOST_CHARS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Seen:
    """What one path answered. ``status`` None: nobody did."""

    status: int | None
    body: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Who answers. ``engine`` None: nobody known; ``answered`` False: nobody at all."""

    engine: str | None
    answered: bool
    sentence: str

    @property
    def supported(self) -> bool:
        """Whether there is an adapter for it."""
        return self.engine in ENGINES


def engine_of_page(page: str) -> str | None:
    """Name of the engine whose series are on a metrics page, read or not by kvctl; None: nobody known."""
    head = "\n" + page[:_MOST_CHARS]
    found = [name for name, prefixes in _SERIES.items() if any("\n" + prefix in head for prefix in prefixes)]
    return found[0] if found else None


def find(seen: Mapping[str, Seen]) -> Finding:
    """Who answers, from what each of ``PROBED`` brought."""
    if all(answer.status is None for answer in seen.values()):
        return Finding(engine=None, answered=False, sentence="nobody answers yet")
    good = {path: answer.body for path, answer in seen.items() if answer.status == 200}
    for path, tell in _TELLERS:
        name = tell(good[path]) if path in good else None
        if name is not None:
            return _found(name, path)
    if any(answer.status == 503 for answer in seen.values()):
        return Finding(engine=None, answered=False, sentence="it answers 503: still loading its model")
    told = ", ".join(f"{path} {answer.status}" for path, answer in seen.items() if answer.status is not None)
    sentence = f"no engine that is known answers ({told}); it is taken for vLLM, and set engine if it is not"
    return Finding(engine=None, answered=True, sentence=sentence)


def _found(name: str, path: str) -> Finding:
    shown = _SHOWN[name]
    if name in ENGINES:
        sentence = f"the engine is {shown} ({path} says so)"
    else:
        sentence = (
            f"the engine is {shown} ({path} says so), which kvctl has no adapter for: only its OpenAI routes "
            "are served, and its metrics and KV cache stay unknown"
        )
    return Finding(engine=name, answered=True, sentence=sentence)


def _by_info(body: str) -> str | None:
    """``/info``: TGI's router, and its sister for embeddings, tell their limits there."""
    found = json_object(body)
    if "max_total_tokens" in found and "model_id" in found:
        return "tgi"
    return "tei" if "model_id" in found and "max_batch_tokens" in found else None


def _by_server_info(body: str) -> str | None:
    found = json_object(body)
    return "sglang" if "model_path" in found and ("tp_size" in found or "internal_states" in found) else None


def _by_props(body: str) -> str | None:
    found = json_object(body)
    return "llamacpp" if "total_slots" in found and "default_generation_settings" in found else None


def _by_models(body: str) -> str | None:
    cards = json_object(body).get("data")
    named = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    owners = [owner for card in named if isinstance(owner := card.get("owned_by"), str)]
    return next((_OWNERS[owner] for owner in owners if owner in _OWNERS), None)


def _by_version(body: str) -> str | None:
    """``/version`` alone is vLLM's way, and other's too: it is asked last."""
    version = json_object(body).get("version")
    if not isinstance(version, str):
        return None
    return "sim" if version.startswith("sim-") else "vllm"


def _by_tags(body: str) -> str | None:
    return "ollama" if isinstance(json_object(body).get("models"), list) else None


_TELLERS: tuple[tuple[str, Callable[[str], str | None]], ...] = (
    ("/metrics", engine_of_page),
    ("/props", _by_props),
    ("/info", _by_info),
    ("/get_server_info", _by_server_info),
    ("/v1/models", _by_models),
    ("/api/tags", _by_tags),
    ("/version", _by_version),
)


class AutoEngine:
    """The adapter of whoever answers: one of ``ENGINES``, exchanged when another kind is found there.

    Who reads ``routes`` keeps the tuple and compares it by identity: another tuple is another engine.
    """

    def __init__(self) -> None:
        self.current: Engine = ENGINES["vllm"]

    def adopt(self, name: str | None) -> bool:
        """Become the adapter called ``name``, vLLM where there is none; whether it is another than before."""
        before, self.current = self.current, ENGINES.get(name or "", ENGINES["vllm"])
        return self.current is not before

    @property
    def name(self) -> str:
        """As all below: the current adapter's."""
        return self.current.name

    @property
    def metrics_path(self) -> str:
        """Where its metrics are."""
        return self.current.metrics_path

    @property
    def info_path(self) -> str:
        """Where it describes itself."""
        return self.current.info_path

    @property
    def more_info_paths(self) -> tuple[str, ...]:
        """And where else."""
        return self.current.more_info_paths

    @property
    def routes(self) -> tuple[Route, ...]:
        """Its routes."""
        return self.current.routes

    @property
    def pins_ranks(self) -> bool:
        """Whether a request can be sent to a rank."""
        return self.current.pins_ranks

    @property
    def clamps_output(self) -> bool:
        """Whether it shortens what is asked to its context."""
        return self.current.clamps_output

    def parse_metrics(self, page: str, at: float) -> list[RankSample]:
        """Samples of its ranks. Raises PageError."""
        return self.current.parse_metrics(page, at)

    def parse_info(self, answer: Mapping[str, Any]) -> EngineInfo:
        """What it says of itself."""
        return self.current.parse_info(answer)

    def default_output(self, route: Route) -> int | None:
        """Its default."""
        return self.current.default_output(route)


def engine_of(setting: str) -> Engine:
    """The adapter for the setting ``engine``; ``auto``: one of its own, vLLM until somebody is found.

    Raises KeyError for a name without an adapter.
    """
    return AutoEngine() if setting == AUTO else ENGINES[setting]


def routes_of(setting: str) -> tuple[Route, ...]:
    """All routes that an engine set so may come to have."""
    if setting != AUTO:
        return ENGINES[setting].routes
    return tuple(route for engine in ENGINES.values() for route in engine.routes)
