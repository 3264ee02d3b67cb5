"""A running vLLM as the model of a plan: /v1/models, /version and the pool in /metrics."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvctl.engines.base import PageError
from kvctl.engines.page import read_page
from kvctl.plan import Flags, Plan, PlanError
from kvctl.plan.crosscheck import as_document, crosscheck

_TIMEOUT_S = 5.0
_MAX_BYTES = 16 << 20
_INFO = ("vllm:cache_config_info", "vllm_cache_config_info")


@dataclass(frozen=True, slots=True)
class Live:
    """What the engine says of itself. ``labels`` are those of its cache_config_info; None = not reported."""

    url: str
    model: str
    root: str | None
    max_model_len: int | None
    version: str | None
    labels: Mapping[str, str]
    ranks: int

    def folder(self) -> Path | None:
        """The model's folder, where the engine runs on this machine and serves it from one."""
        found = None if self.root is None else Path(self.root)
        return found if found is not None and (found / "config.json").is_file() else None

    def number(self, label: str) -> int | None:
        """A positive integer label; None for "None", nonsense and absence (law 3)."""
        text = self.labels.get(label, "")
        return int(text) if text.isdecimal() and int(text) > 0 else None

    def adopt(self, flags: Flags, explicit: frozenset[str]) -> Flags:
        """``flags`` with the engine's own where the person gave none."""
        blocks = self.number("num_gpu_blocks")
        found: dict[str, Any] = {
            "version": flags.version or self.version,
            "max_model_len": flags.max_model_len or self.max_model_len,
            "block_size": flags.block_size or self.number("block_size"),
            "num_gpu_blocks": flags.num_gpu_blocks or (None if blocks is None else blocks // self.ranks),
        }
        if flags.kv_dtype == "auto":
            found["kv_dtype"] = self.labels.get("cache_dtype") or "auto"
        if "prefix_caching" not in explicit and "enable_prefix_caching" in self.labels:
            found["prefix_caching"] = self.labels["enable_prefix_caching"] == "True"
        if "available_gib" in explicit or "kv_cache_memory_bytes" in explicit:
            found["num_gpu_blocks"] = flags.num_gpu_blocks
        return replace(flags, **found)

    def compare(self, plan: Plan) -> dict[str, Any]:
        """The cross-check of the plan with the pool that the engine reports."""
        blocks = self.number("num_gpu_blocks")
        reported = self.number("kv_cache_size_tokens")
        return as_document(crosscheck(plan, reported, None if blocks is None else blocks // self.ranks))


def read_live(url: str) -> Live:
    """Ask the engine at ``url`` (http or https, no path needed). Raises PlanError where it is no vLLM."""
    base = url.rstrip("/").removesuffix("/v1")
    if urlsplit(base).scheme not in ("http", "https"):
        raise PlanError(f"--like {url}: an http or https address is wanted")
    models, metrics, version = (_get(base + path) for path in ("/v1/models", "/metrics", "/version"))
    if metrics is None:
        raise PlanError(f"--like {url}: no /metrics there")
    sets = _labels(url, metrics)
    model = _first(_object(models))
    length = model.get("max_model_len")
    return Live(
        url=base,
        model=str(model.get("id", "")),
        root=model["root"] if isinstance(model.get("root"), str) else None,
        max_model_len=length if isinstance(length, int) and length > 0 else None,
        version=_version(_object(version)),
        labels=sets[0],
        ranks=len(sets),
    )


def _labels(url: str, metrics: str) -> list[dict[str, str]]:
    try:
        readings = read_page(metrics, frozenset(_INFO)).readings
    except PageError as error:
        raise PlanError(f"--like {url}: /metrics cannot be read: {error}") from None
    if not readings:
        raise PlanError(f"--like {url}: /metrics has no vllm:cache_config_info; is it a vLLM?")
    return [reading.labels for reading in readings]


def _first(document: Mapping[str, Any]) -> Mapping[str, Any]:
    data = document.get("data")
    return data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}


def _version(document: Mapping[str, Any]) -> str | None:
    found = document.get("version")
    return found if isinstance(found, str) else None


def _object(text: str | None) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _get(url: str) -> str | None:
    """The body of a 200, None for any other status. Raises PlanError where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the scheme is checked
            return str(answer.read(_MAX_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        raise PlanError(f"--like: no answer from {url}: {error}") from None
