"""The size of the weights on one rank, where no safetensors index says it: parameters x bits, by kind.

Quantised checkpoints leave some matrices alone: embeddings, output head, routers and towers always; attention
or shared experts where the config's list of exceptions says so, and for MXFP4 everything but the experts.
Where a config has no such list, the interval spans both.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvctl.plan.errors import PlanError
from kvctl.plan.shapes import Kept, Model, Weights

_MAX_INDEX_BYTES = 64 * 1024 * 1024
_PLAIN = frozenset({"", "bfloat16", "float16", "bf16", "fp16", "half", "float32"})

# Bits per quantised weight (low, likely, high), scales and zero points of the usual groups included.
_EIGHT, _INT4, _FLOAT4 = (8.0, 8.02, 8.1), (4.125, 4.16, 4.3), (4.5, 4.5, 4.53)
_BITS: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {
        **dict.fromkeys(("fp8", "modelopt", "fbgemm_fp8", "w8a8", "int8", "gptq-int8"),
                        _EIGHT),
        "mxfp8": (8.25, 8.25, 8.3), "mxfp4": (4.25, 4.25, 4.25),
        **dict.fromkeys(("nvfp4", "modelopt_fp4", "bitsandbytes", "bnb-4bit"), _FLOAT4),
        **dict.fromkeys(("awq", "gptq", "awq-int4", "int4", "gptq-int4", "w4a16", "pack-quantized",
                         "int4(compressed-tensors)", "auto-round", "auto_round"), _INT4),
    }
)  # fmt: skip
_OFTEN_PARTIAL = (
    "nvfp4",
    "modelopt_fp4",
    "modelopt",
    "fbgemm_fp8",
)  # attention is left unquantised more often than not

# Logged size over the arithmetic's: norms, biases, alignment; more for what kernels repack.
_DOUBT_PLAIN, _DOUBT_EIGHT = (0.992, 1.0, 1.012), (0.988, 1.0, 1.015)
_DOUBT_FOUR = (0.985, 1.0, 1.025)
_TOWERS = 0.045  # share that a tower of unknown size adds at most

_EXCEPTIONS = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "exclude")
_LAYER = re.compile(r"layers\\?\.(\d+)\b")
_ROUTER = re.compile(r"(?:\.gate|router|shared_expert_gate|gate_weight)\W*$")
_MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("mixers", re.compile(r"attn|attention|mixer|mamba|conv")),
    ("feed", re.compile(r"shared_expert")),
    ("experts", re.compile(r"(?<!shared_)experts")),
    ("feed", re.compile(r"mlp|feed_forward|ffn")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How the weights are spread; ``dp`` spreads routed experts alone, the rest is whole in each engine."""

    tp: int = 1
    pp: int = 1
    dp: int = 1


def kept_of(quantization: Mapping[str, Any] | None, layers: int) -> Kept | None:
    """What the config says is left unquantised; None where it says nothing.

    An entry with a layer's number counts for that layer, one without for all of them.
    """
    if quantization is None:
        return None
    listed = next((quantization[key] for key in _EXCEPTIONS if isinstance(quantization.get(key), list)), None)
    if listed is None:
        return None
    seen: dict[str, set[str]] = {"mixers": set(), "feed": set(), "experts": set()}
    for entry in listed:
        kind = None if not isinstance(entry, str) or _ROUTER.search(entry) else _kind(entry)
        if kind is not None:
            found = _LAYER.search(entry)
            seen[kind].add(found[1] if found else "*")
    shares = {
        kind: 1.0 if "*" in marks else min(1.0, len(marks) / max(1, layers)) for kind, marks in seen.items()
    }
    return Kept(**shares)


def _kind(entry: str) -> str | None:
    return next((kind for kind, mark in _MARKS if mark.search(entry.lower())), None)


def weight_bytes(
    model: Model, weight_dtype: str, element: int, ranks: Ranks | None = None, *, draft: bool = False
) -> tuple[float, float, float] | None:
    """Bytes of the weights on one rank: (low, likely, high). ``draft``: with the model's own MTP head.

    ``weight_dtype`` "auto" = the checkpoint's quantisation; ``element``: bytes of an unquantised parameter.
    None where the parameters are unknown. Raises PlanError for a quantisation that is unknown.
    """
    weights = model.weights
    if weights is None:
        return None
    name = weight_dtype.lower()
    name = model.quantization if name == "auto" else name
    spread = _spread(weights, ranks or Ranks())
    if name in _PLAIN:
        size = 4 if name == "float32" else element if name == "" else 2
        return _plain(spread, size, draft=draft)
    bits = _BITS.get(name)
    if bits is None:
        raise PlanError(
            f"weight dtype {name!r} is unknown: give --weights-gib, or one of {', '.join(sorted(_BITS))}"
        )
    scheme = _Scheme(bits, _kept(model, name), element, pads=name == "mxfp4")
    low, likely, high = (
        scheme.size(spread, end, draft=draft) * doubt
        for end, doubt in enumerate(_DOUBT_EIGHT if bits is _EIGHT else _DOUBT_FOUR)
    )
    return low, likely, high


@dataclass(frozen=True, slots=True)
class _Spread:
    """Parameters on one rank. ``padding``: what MXFP4's kernels may make of an expert."""

    mixers: float
    feed: float
    experts: float
    dense: float
    rotary: float
    draft: float
    towers: tuple[float, float, float]
    padding: float


def _spread(weights: Weights, ranks: Ranks) -> _Spread:
    """The largest stage's share. Embeddings stand on the first stage and the head on the last."""
    each = ranks.tp * ranks.pp
    ends = 1.0 if ranks.pp == 1 or weights.tied else 0.5
    known = weights.tower or 0
    body = weights.mixers + weights.feed + weights.experts + weights.dense
    unknown = _TOWERS * body / each if weights.tower is None else 0.0
    return _Spread(
        mixers=weights.mixers / each,
        feed=weights.feed / each,
        experts=weights.experts / (each * ranks.dp),
        dense=weights.dense * ends / ranks.tp,
        rotary=weights.rotary,
        draft=weights.draft / ranks.tp,
        towers=(0.6 * known / ranks.tp, known / ranks.tp + unknown / 4, 1.1 * known + unknown),
        padding=_padding(weights, ranks.tp),
    )


def _padding(weights: Weights, tp: int) -> float:
    """Marlin pads an expert's width on a rank to 128 and its input to 256."""
    inputs, width = weights.expert
    if not inputs or not width:
        return 1.0
    own = width / tp
    return -(-own // 128) * 128 * -(-inputs // 256) * 256 / (own * inputs)


def _plain(spread: _Spread, size: int, *, draft: bool) -> tuple[float, float, float]:
    parts = (spread.mixers, spread.feed, spread.experts, spread.dense, spread.rotary)
    whole = sum(parts) + (spread.draft if draft else 0)
    low, likely, high = (
        (whole * doubt + tower) * size for doubt, tower in zip(_DOUBT_PLAIN, spread.towers, strict=True)
    )
    return low, likely, high


@dataclass(frozen=True, slots=True)
class _Scheme:
    """A quantisation at the ends of the interval: 0 low, 1 likely, 2 high. ``pads``: its kernels do."""

    bits: tuple[float, float, float]
    kept: tuple[Kept, Kept, Kept]
    element: int
    pads: bool

    def size(self, spread: _Spread, end: int, *, draft: bool) -> float:
        """Bytes on one rank."""
        kept = self.kept[end]
        padding = (1.0, (1 + 2 * spread.padding) / 3, spread.padding)[end] if self.pads else 1.0
        return (
            self._some(spread.mixers, kept.mixers, end)
            + self._some(spread.feed, kept.feed, end)
            + self._some(spread.experts, kept.experts, end) * padding
            + (spread.dense + spread.rotary + spread.towers[end]) * self.element
            + (self._some(spread.draft, (0.0, 0.5, 1.0)[end], end) if draft else 0.0)
        )

    def _some(self, count: float, share: float, end: int) -> float:
        return count * (share * self.element + (1 - share) * self.bits[end] / 8)


def _kept(model: Model, name: str) -> tuple[Kept, Kept, Kept]:
    """What is left unquantised at the low end, likely, and at the high end."""
    if name == "mxfp4":
        return (Kept(mixers=1.0, feed=1.0),) * 3
    if model.kept is not None:
        return (model.kept,) * 3
    if _is_sparse(model) and (name in _OFTEN_PARTIAL or _BITS[name] is _INT4):
        return Kept(), Kept(mixers=0.5, feed=0.5), Kept(mixers=1.0, feed=1.0)
    if name in _OFTEN_PARTIAL:
        return Kept(), Kept(), Kept(mixers=1.0)
    return (Kept(),) * 3


def _is_sparse(model: Model) -> bool:
    return model.weights is not None and model.weights.experts > 0


def index_bytes(folder: Path) -> int | None:
    """Bytes of the weights from the safetensors index of a model's folder, or its files; None without."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file() and index.stat().st_size <= _MAX_INDEX_BYTES:
            total = json.loads(index.read_bytes())["metadata"]["total_size"]
            return total if isinstance(total, int) and total > 0 else None
        return sum(each.stat().st_size for each in folder.glob("*.safetensors")) or None
    except (OSError, ValueError, KeyError, TypeError):
        return None
