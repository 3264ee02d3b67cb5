"""Engine flags as given, and as the engine would resolve them: every default with the assumption it makes.

Sources: vLLM ``engine/arg_utils.py`` (``get_batch_defaults``),
``config/vllm.py`` (``max_concurrent_batches``),
``model_executor/models/config.py`` (Mamba cache mode), release notes and logged start-ups for what changed
when.
"""

from dataclasses import dataclass
from typing import Literal

from kvctl.plan.cards import Card
from kvctl.plan.dtypes import KvDtype, element_bytes, resolve_kv_dtype
from kvctl.plan.errors import PlanError
from kvctl.plan.shapes import Indexer, Latent, Model, State
from kvctl.plan.versions import NEWEST, Version, parse_version

Engine = Literal["vllm", "sglang", "tgi"]
_FOR_ALL = ("max_model_len", "KV dtype", "gpu_memory_utilization")  # what other engines assume too
_FRACTIONS: dict[str, float] = {"sglang": 0.88, "tgi": 0.95}  # of the card, for weights and pools together
_BIG_CARD_GIB, _BIGGEST_CARD_GIB = 70, 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the user asked for; None = not given, the engine's default. Counts >= 1, ratios in (0, 1]."""

    engine: Engine = "vllm"
    version: str | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    weight_dtype: str = "auto"
    kv_dtype: str = "auto"
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    prefix_caching: bool | None = None
    num_spec: int = 0
    spec_method: str | None = None
    async_scheduling: bool | None = None
    hybrid_manager: bool | None = None
    num_gpu_blocks: int | None = None
    swa_full_tokens_ratio: float = 0.8
    mamba_slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Flags with every default filled in; lengths in tokens.

    ``in_flight``: tokens reserved per request in layers that drop old positions; ``reserved_blocks``: blocks
    that the must-fit check takes off (the null block); ``concurrency_tokens``: the newer token line.
    """

    flags: Flags
    version: Version
    dtype_bytes: int
    kv: KvDtype
    block_size: int
    utilization: float
    max_model_len: int
    batched_tokens: int
    seqs: int
    in_flight: int
    align_states: bool
    hybrid: bool
    hybrid_chunked: bool
    reserved_blocks: int
    concurrency_tokens: bool
    assumptions: tuple[str, ...]


def resolve(model: Model, flags: Flags, card: Card | None = None) -> Setup:
    """The setup that the engine would start with on ``card``. Raises PlanError where no default exists."""
    version = parse_version(flags.version)
    said: list[str] = []
    if not version.known and flags.engine == "vllm":
        said.append(f"engine version not known: the rules of vLLM {NEWEST} apply")
    kinds = {type(part) for layer in model.layers for part in layer}
    length = _length(model, flags, said)
    batched = _batched_tokens(flags, version, length, card, said)
    return Setup(
        flags=flags,
        version=version,
        dtype_bytes=element_bytes(model.dtype),
        kv=_kv_dtype(model, flags, version, sparse=Indexer in kinds, said=said),
        block_size=_block_size(flags, version, kinds, said),
        utilization=_utilization(flags, version, said),
        max_model_len=length,
        batched_tokens=batched,
        seqs=_seqs(flags, version, card, said),
        in_flight=_batches(flags, version, said) * batched,
        align_states=State in kinds and _aligns(flags, version, said),
        hybrid=_hybrid(flags, version, since=(0, 9, 2)),
        hybrid_chunked=_hybrid(flags, version, since=(0, 13, 0)),
        reserved_blocks=1 if flags.engine == "vllm" and version.since(0, 32) else 0,
        concurrency_tokens=version.since(0, 20, 1),
        assumptions=tuple(each for each in said if flags.engine == "vllm" or each.startswith(_FOR_ALL)),
    )


def _length(model: Model, flags: Flags, said: list[str]) -> int:
    if flags.max_model_len is not None:
        return flags.max_model_len
    if model.max_context is None:
        raise PlanError("config: max_position_embeddings is missing: give --max-model-len")
    said.append(f"max_model_len {model.max_context:,} from the config")
    return model.max_context


def _batched_tokens(flags: Flags, version: Version, length: int, card: Card | None, said: list[str]) -> int:
    """Server defaults: 16384 from 160 GiB, 8192 from 70 GiB but not on A100, else 2048; V0: the context."""
    if flags.max_num_batched_tokens is not None:
        return flags.max_num_batched_tokens
    if not version.since(0, 8):
        default = max(length, 2048)
    elif card is not None and card.total_gib >= _BIGGEST_CARD_GIB:
        default = 16384
    else:
        default = 8192 if _is_big(card) else 2048
    where = "" if card else " on a card below 70 GiB"
    said.append(f"max_num_batched_tokens {default:,}: the API server's default{where}")
    return default


def _seqs(flags: Flags, version: Version, card: Card | None, said: list[str]) -> int:
    """1024 sequences from 70 GiB but not on A100 (since 0.8.3 or so), else 256."""
    if flags.max_num_seqs is not None:
        return flags.max_num_seqs
    default = 1024 if version.since(0, 8, 3) and _is_big(card) else 256
    said.append(f"max_num_seqs {default}: the API server's default")
    return default


def _is_big(card: Card | None) -> bool:
    """Whether the engine's larger defaults apply: from 70 GiB, but not on A100."""
    return card is not None and card.total_gib >= _BIG_CARD_GIB and "A100" not in card.name.upper()


def _batches(flags: Flags, version: Version, said: list[str]) -> int:
    """Batches whose tokens are not yet settled: 1 until 0.22, then 2 with async scheduling (the default)."""
    if not version.since(0, 23):
        return 1
    asynchronous = True if flags.async_scheduling is None else flags.async_scheduling
    if flags.async_scheduling is None:
        said.append("async scheduling on: two batches in flight")
    if not asynchronous:
        return flags.pp
    return 2 if flags.pp == 1 else flags.pp + 1


def _aligns(flags: Flags, version: Version, said: list[str]) -> bool:
    """Whether states are kept per block (mode "align"): with prefix caching, by default since 0.20.1."""
    default = version.since(0, 20, 1)
    if flags.prefix_caching is None:
        said.append(
            f"prefix caching {'on' if default else 'off'} for recurrent layers: this version's default"
        )
        return default
    return flags.prefix_caching and version.since(0, 11)


def _hybrid(flags: Flags, version: Version, since: tuple[int, int, int]) -> bool:
    return version.since(*since) if flags.hybrid_manager is None else flags.hybrid_manager


def _utilization(flags: Flags, version: Version, said: list[str]) -> float:
    if flags.gpu_memory_utilization is not None:
        return flags.gpu_memory_utilization
    default = _FRACTIONS.get(flags.engine) or (0.92 if version.since(0, 20) else 0.9)
    said.append(f"gpu_memory_utilization {default}: this version's default")
    return default


def _block_size(flags: Flags, version: Version, kinds: set[type], said: list[str]) -> int:
    """16 on CUDA; 64 where an MLA kernel or a sparse indexer wants it (since 0.7.1)."""
    if flags.block_size is not None:
        return flags.block_size
    default = 64 if Latent in kinds and version.since(0, 7, 1) else 16
    said.append(f"block size {default}: the default on CUDA for this attention")
    return default


def _kv_dtype(model: Model, flags: Flags, version: Version, *, sparse: bool, said: list[str]) -> KvDtype:
    scheme = model.kv_scheme if version.since(0, 11) else ""
    kv = resolve_kv_dtype(flags.kv_dtype, model.dtype, scheme, sparse=sparse)
    if flags.kv_dtype.lower() == "auto":
        said.append(
            f"KV dtype {kv.name}: " + ("the checkpoint's KV scheme" if scheme else "the model's dtype")
        )
    return kv
