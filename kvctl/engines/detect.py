"""Which engine answers, by its metrics page. An unexpected engine has a name, it is no crash."""

from collections.abc import Mapping

from kvctl.engines.base import Engine
from kvctl.engines.vllm import VLLM

AUTO = "auto"

ENGINES: Mapping[str, Engine] = {"vllm": VLLM()}

# First letters of an engine's series; ``_`` stands for ``:`` after a re-export.
_SERIES = {
    "vllm": ("vllm:", "vllm_"),
    "sglang": ("sglang:", "sglang_"),
    "tgi": ("tgi_",),
    "llama.cpp": ("llamacpp:", "llamacpp_"),
    "triton": ("nv_inference_", "nv_trt_llm_"),
    "lmdeploy": ("lmdeploy:", "lmdeploy_"),
}

_MOST_CHARS = 4 * 1024 * 1024


def engine_of(setting: str) -> Engine:
    """The adapter for the setting ``engine``. ``auto`` is vLLM until a page says otherwise.

    Raises KeyError for a name without an adapter.
    """
    return ENGINES["vllm" if setting == AUTO else setting]


def engine_of_page(page: str) -> str | None:
    """Name of the engine whose series are on a metrics page, read or not by kvctl; None: nobody known."""
    head = "\n" + page[:_MOST_CHARS]
    found = [name for name, prefixes in _SERIES.items() if any("\n" + prefix in head for prefix in prefixes)]
    return found[0] if found else None
