"""Element types: bytes of model and KV dtypes, and which of them "auto" means.

Source: vLLM ``utils/torch_utils.py`` (``resolve_kv_cache_dtype_string``, ``nvfp4_kv_cache_full_dim``) and
``v1/kv_cache_interface.py`` (``KVQuantMode``).
"""

from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from kvctl.plan.errors import PlanError

_MODEL_BYTES: Mapping[str, int] = MappingProxyType(
    {"bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "half": 2, "float32": 4, "fp32": 4, "float": 4}
)


def element_bytes(name: str) -> int:
    """Bytes of one unquantised element. Raises PlanError for a name that is no such type."""
    found = _MODEL_BYTES.get(name.lower().removeprefix("torch."))
    if found is None:
        raise PlanError(f"dtype {name!r} is unknown; known are bfloat16, float16 and float32")
    return found


class KvKind(StrEnum):
    """How keys and values are stored."""

    PLAIN = "plain"
    FP8 = "fp8"
    FP8_DS_MLA = "fp8_ds_mla"
    NVFP4 = "nvfp4"
    NVFP4_DS_MLA = "nvfp4_ds_mla"
    SCALED_8 = "per_token_head_8"
    SCALED_4 = "per_token_head_4"


_KINDS: Mapping[str, KvKind] = MappingProxyType(
    {
        "fp8": KvKind.FP8, "fp8_e4m3": KvKind.FP8, "fp8_e5m2": KvKind.FP8, "fp8_inc": KvKind.FP8,
        "fp8_ds_mla": KvKind.FP8_DS_MLA, "nvfp4": KvKind.NVFP4, "fp4_e2m1": KvKind.NVFP4, "fp4": KvKind.NVFP4,
        "nvfp4_ds_mla": KvKind.NVFP4_DS_MLA, "int8_per_token_head": KvKind.SCALED_8,
        "fp8_per_token_head": KvKind.SCALED_8, "int4_per_token_head": KvKind.SCALED_4,
    }
)  # fmt: skip
SCHEMES: Mapping[str, str] = MappingProxyType({"fp8": "fp8", "nvfp4": "nvfp4", "fp8_e4m3": "fp8"})


class KvDtype:
    """A resolved KV dtype; a value object. ``name`` as the engine would show it."""

    __slots__ = ("kind", "name", "plain_bytes")

    def __init__(self, name: str, kind: KvKind, plain_bytes: int) -> None:
        self.name, self.kind, self.plain_bytes = name, kind, plain_bytes

    def head_bytes(self, elements: int) -> Fraction:
        """Bytes of one head's K and V of one token, ``elements`` = key + value dimension.

        fp8: one byte an element, the scales are per layer. nvfp4: 4 bits and one fp8 scale per 16 elements
        (0.5625 B). Per-token-head modes: two fp32 scales besides.
        """
        scaled: Mapping[KvKind, Fraction] = {
            KvKind.PLAIN: Fraction(elements * self.plain_bytes),
            KvKind.FP8: Fraction(elements),
            KvKind.FP8_DS_MLA: Fraction(elements),
            KvKind.NVFP4: Fraction(elements * 9, 16),
            KvKind.NVFP4_DS_MLA: Fraction(elements * 9, 16),
            KvKind.SCALED_8: Fraction(elements + 8),
            KvKind.SCALED_4: Fraction(elements, 2) + 8,
        }
        return scaled[self.kind]

    def latent_bytes(self, rank: int, rope: int) -> Fraction:
        """Bytes of one MLA vector: in ``fp8_ds_mla`` 656 at 512 + 64 (512 fp8, 4 scales, 64 bf16)."""
        if self.kind is KvKind.FP8_DS_MLA:
            return Fraction(rank + rank // 128 * 4 + rope * 2)
        if self.kind is KvKind.NVFP4_DS_MLA:
            return Fraction(rank // 2 + rank // 16 + rope)
        return self.head_bytes(rank + rope)


def resolve_kv_dtype(asked: str, model_dtype: str, scheme: str = "", *, sparse: bool = False) -> KvDtype:
    """The dtype that ``--kv-dtype`` means. "auto" is the checkpoint's KV scheme, else the model's dtype.

    ``sparse``: an MLA model with an indexer, for which vLLM stores plain "fp8" as ``fp8_ds_mla``.
    Raises PlanError for an unknown name.
    """
    name = asked.partition("(")[0].strip().lower() or "auto"
    if name == "auto":
        name = scheme or model_dtype
    kind = _KINDS.get(name)
    if kind is None:
        return KvDtype(name, KvKind.PLAIN, element_bytes(name))
    if sparse and kind in (KvKind.FP8, KvKind.NVFP4):
        kind = KvKind.FP8_DS_MLA if kind is KvKind.FP8 else KvKind.NVFP4_DS_MLA
    return KvDtype(name, kind, element_bytes(model_dtype))


def kv_scheme(quantization: Mapping[str, Any] | None) -> str:
    """The KV dtype that a quantised checkpoint asks for: "fp8", "nvfp4", or "" for none.

    ModelOpt writes ``kv_cache_scheme`` (an object or a name) or ``kv_cache_quant_algo``, llm-compressor
    ``kv_cache_scheme``; fp8 *weights* alone change nothing.
    """
    if quantization is None:
        return ""
    inner = quantization.get("quantization")
    for section in (inner if isinstance(inner, Mapping) else {}, quantization):
        scheme = section.get("kv_cache_scheme") or section.get("kv_cache_quant_algo")
        if isinstance(scheme, str):
            return SCHEMES.get(scheme.lower(), "")
        if isinstance(scheme, Mapping):
            return {8: "fp8", 4: "nvfp4"}.get(_bits(scheme), "") if scheme.get("type") == "float" else ""
    return ""


def _bits(scheme: Mapping[str, Any]) -> int:
    bits = scheme.get("num_bits")
    return bits if isinstance(bits, int) else 0
