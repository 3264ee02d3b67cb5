"""What a running vLLM says of its pool: /v1/models, /version and the labels of cache_config_info.

Law 3: unknown is not zero. A label that says "None", or nonsense, is absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvctl.engines.base import PageError
from kvctl.engines.page import read_page
from kvctl.engines.series import json_object
from kvctl.plan import Crosscheck, Flags, Plan, PlanError, crosscheck

_INFO = ("vllm:cache_config_info", "vllm_cache_config_info")


@dataclass(frozen=True, slots=True)
class Reported:
    """What the engine says of itself. ``labels`` are those of its cache_config_info; None = not reported."""

    model: str = ""
    root: str | None = None
    max_model_len: int | None = None
    version: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1

    def folder(self) -> Path | None:
        """The model's folder, where the engine runs on this machine and serves it from one."""
        found = None if self.root is None else Path(self.root)
        return found if found is not None and (found / "config.json").is_file() else None

    @property
    def blocks(self) -> int | None:
        """Blocks of one rank; the label has the sum over the page's ranks."""
        summed = self.number("num_gpu_blocks")
        return None if summed is None else summed // self.ranks

    @property
    def tokens(self) -> int | None:
        """KV tokens of one rank."""
        return self.number("kv_cache_size_tokens")

    def adopt(self, flags: Flags, explicit: frozenset[str], *, pool: bool = True) -> Flags:
        """``flags``, with the engine's own where none is given explicitly; ``pool``: with its blocks too."""
        if {"available_gib", "kv_cache_memory_bytes"} & explicit:
            pool = False
        found: dict[str, Any] = {
            "version": flags.version or self.version,
            "max_model_len": flags.max_model_len or self.max_model_len,
            "block_size": flags.block_size or self.number("block_size"),
            "num_gpu_blocks": flags.num_gpu_blocks or (self.blocks if pool else None),
            "gpu_memory_utilization": flags.gpu_memory_utilization or self._share("gpu_memory_utilization"),
        }
        if flags.kv_dtype == "auto":
            found["kv_dtype"] = self.labels.get("cache_dtype") or "auto"
        if "prefix_caching" not in explicit and "enable_prefix_caching" in self.labels:
            found["prefix_caching"] = self.labels["enable_prefix_caching"] == "True"
        return replace(flags, **found)

    def compare(self, plan: Plan) -> Crosscheck:
        """What the engine reports against what the plan makes of as many blocks, memory aside."""
        return crosscheck(plan, self.tokens, self.blocks)

    def number(self, label: str) -> int | None:
        """A positive integer label; None for "None", nonsense and absence."""
        text = self.labels.get(label, "")
        return int(text) if text.isdecimal() and int(text) > 0 else None

    def _share(self, label: str) -> float | None:
        try:
            share = float(self.labels.get(label, ""))
        except ValueError:
            return None
        return share if 0 < share <= 1 else None


def reported(metrics: str, models: str | None, version: str | None) -> Reported:
    """From the three bodies; ``labels`` are empty where the page has no pool. Raises PlanError."""
    try:
        readings = read_page(metrics, frozenset(_INFO)).readings
    except PageError as error:
        raise PlanError(f"/metrics cannot be read: {error}") from None
    model = _first(json_object(models))
    length, root = model.get("max_model_len"), model.get("root")
    told = json_object(version).get("version")
    return Reported(
        model=str(model.get("id", "")),
        root=root if isinstance(root, str) else None,
        max_model_len=length if isinstance(length, int) and length > 0 else None,
        version=told if isinstance(told, str) else None,
        labels=readings[0].labels if readings else {},
        ranks=max(1, len(readings)),
    )


def _first(document: Mapping[str, Any]) -> Mapping[str, Any]:
    data = document.get("data")
    return data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
