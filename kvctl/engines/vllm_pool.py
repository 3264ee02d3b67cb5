"""``vllm:cache_config_info`` -> the KV pool of one rank.

Usable tokens are the pool less one block: block 0 is the null block, reserved for good, and the usage gauge
is relative to the rest. ``num_gpu_blocks`` is the sum over the data-parallel engines of the page, repeated
under each of them; ``kv_cache_size_tokens`` is one engine's. Law 4: a 400 needs proof, so the capacity is
exact only where the labels confirm each other as one pool of equal blocks.

How they confirm each other: vLLM computes ``kv_cache_size_tokens = concurrency x context``, where
``concurrency`` (label ``kv_cache_max_concurrency``) is how many contexts of full length the pool holds. For
plain attention that is ``blocks / ceil(context / block)``. On hybrid models (sliding window, Mamba) a token
costs another number of blocks, and the equation does not hold.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvctl.core.outcomes import Absence
from kvctl.engines.values import known, positive, truth

# Labels with a value only where layers differ in how they hold KV.
_HYBRID_LABELS = ("sliding_window", "mamba_block_size")
_NOTHING = ("None", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What one ``cache_config_info`` says of one rank's pool."""

    block_size: int | Absence
    capacity_tokens: int | Absence
    capacity_exact: bool
    prefix_caching: bool | Absence
    unsupported: str | None


NO_POOL = Pool(
    block_size=Absence.MISSING,
    capacity_tokens=Absence.MISSING,
    capacity_exact=False,
    prefix_caching=Absence.MISSING,
    unsupported=None,
)


def read_pool(infos: Sequence[Mapping[str, str]], ranks: int) -> Pool:
    """The pool of one rank from the label sets found for it; ``ranks`` of them are on the page.

    More than one set (a restart leaves ghosts in multi-process mode): if they contradict each other, the
    smallest capacity, not exact.
    """
    pools = [_read(labels, ranks) for labels in infos]
    if not pools:
        return NO_POOL
    if all(pool == pools[0] for pool in pools):
        return pools[0]
    sized = [pool for pool in pools if isinstance(pool.capacity_tokens, int)]
    least = min(sized, key=lambda pool: known(pool.capacity_tokens) or 0, default=pools[0])
    return Pool(
        block_size=least.block_size,
        capacity_tokens=least.capacity_tokens,
        capacity_exact=False,
        prefix_caching=least.prefix_caching,
        unsupported=least.unsupported,
    )


def _read(labels: Mapping[str, str], ranks: int) -> Pool:
    block = _block(labels)
    tokens, exact = _capacity(labels, known(block), ranks)
    return Pool(
        block_size=block,
        capacity_tokens=tokens,
        capacity_exact=exact,
        prefix_caching=truth(labels.get("enable_prefix_caching")),
        unsupported=_unsupported(labels),
    )


def _block(labels: Mapping[str, str]) -> int | Absence:
    """Tokens a block holds for claims: context parallelism and hybrids make it larger than block_size."""
    effective = positive(labels.get("effective_attention_block_size"))
    return effective if isinstance(effective, int) else positive(labels.get("block_size"))


def _capacity(labels: Mapping[str, str], block: int | None, ranks: int) -> tuple[int | Absence, bool]:
    """Usable KV tokens of one rank, and whether they may prove a 400."""
    summed = positive(labels.get("num_gpu_blocks"))
    tokens = positive(labels.get("kv_cache_size_tokens"))
    blocks = summed // ranks if isinstance(summed, int) else None
    if isinstance(tokens, int):
        if not blocks:
            return _above_zero(tokens - (block or 0)), False
        if block is not None and blocks * ranks == summed and _is_plain(labels, tokens, blocks, block):
            return _above_zero((blocks - 1) * block), True
        return _above_zero(tokens * (blocks - 1) // blocks), False
    if blocks is None or block is None:
        return (summed if isinstance(summed, Absence) else Absence.MISSING), False
    return _above_zero((blocks - 1) * block), False


def _is_plain(labels: Mapping[str, str], tokens: int, blocks: int, block: int) -> bool:
    """Whether every token of every request costs the same share of one block."""
    if any(labels.get(name, "None") not in _NOTHING for name in _HYBRID_LABELS):
        return False
    if tokens == blocks * block:
        return True
    concurrency = _float(labels.get("kv_cache_max_concurrency"))
    if concurrency is None:
        return False
    context = math.ceil(tokens / concurrency - 1e-6)
    return math.isclose(concurrency * math.ceil(context / block), blocks, rel_tol=1e-9)


def _unsupported(labels: Mapping[str, str]) -> str | None:
    """Set-ups in which a pool of tokens is not what limits."""
    if labels.get("is_attention_free") == "True":
        return "attention-free model"
    if labels.get("kv_offloading_size", "None") not in (*_NOTHING, "0", "0.0"):
        return "KV offloading"
    return None


def _above_zero(tokens: int) -> int | Absence:
    return tokens if tokens > 0 else Absence.OUT_OF_RANGE


def _float(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
