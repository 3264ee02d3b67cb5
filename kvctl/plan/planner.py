"""The plan: from a model, flags and a card to the pool, what it serves, and what decides.

Pure. All sizes are per rank (one GPU of a TP group; with DP each engine has a pool of its own). Figures of a
pool come three times where memory is an interval: low, likely, high.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvctl.plan.accounting import Accounting, accounting_of
from kvctl.plan.cards import GIB
from kvctl.plan.errors import PlanError
from kvctl.plan.memory import Given, Memory, memory_of
from kvctl.plan.setup import Flags, Setup, resolve
from kvctl.plan.shapes import Attention, Latent, Model, Reach, State
from kvctl.plan.vllm import Pool

_STEPS = (
    1024,
    2048,
    4096,
    8192,
    16384,
    32768,
    65536,
    131072,
    262144,
    524288,
    1048576,
    2097152,
    4194304,
    8388608,
)


@dataclass(frozen=True, slots=True)
class Point:
    """At a context of ``length`` tokens: requests at once (likely), and MiB of KV per rank that one holds."""

    length: int
    concurrency: float
    mib_per_request: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a plan says. ``pool`` is at the likely memory, ``low``/``high`` at its bounds.

    ``max_model_len_fits``: tokens of the longest single request, bounded by the model's own context;
    ``binding``: the term that decides the concurrency at ``setup.max_model_len``.
    """

    model: Model
    setup: Setup
    memory: Memory
    accounting: Accounting
    pool: Pool
    low: Pool
    high: Pool
    curve: tuple[Point, ...]
    max_model_len_fits: int
    binding: str
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    details: Mapping[str, object]


def make_plan(model: Model, flags: Flags, given: Given, spec: Model | None = None) -> Plan:
    """Plan ``model`` under ``flags`` with the memory that ``given`` tells of.

    ``spec``: the draft model where speculation wants one. Raises PlanError (one line that names the way out).
    """
    _check(flags)
    setup = resolve(model, flags, given.card)
    memory = memory_of(model, setup, given, spec)
    accounting = accounting_of(model, setup, spec)
    low, pool, high = (accounting.pool(int(gib * GIB)) for gib in _bounds(memory))
    fits = _fits(model, setup, pool)
    return Plan(
        model=model,
        setup=setup,
        memory=memory,
        accounting=accounting,
        pool=pool,
        low=low,
        high=high,
        curve=_curve(setup, accounting, pool),
        max_model_len_fits=fits,
        binding=_binding(setup, accounting, pool, memory),
        assumptions=_assumptions(model, setup, given),
        warnings=_warnings(model, setup, accounting, pool, memory),
        details=accounting.details(pool),
    )


def _assumptions(model: Model, setup: Setup, given: Given) -> tuple[str, ...]:
    """The assumptions that matter to this plan: not utilisation, for instance, where the memory was given."""
    outright = (
        given.overhead_gib,
        given.available_gib,
        given.kv_cache_memory_bytes,
        setup.flags.num_gpu_blocks,
    )
    idle = "gpu_memory_utilization" if any(each is not None for each in outright) else "-"
    return (*(each for each in setup.assumptions if not each.startswith(idle)), *model.notes)


def _bounds(memory: Memory) -> tuple[float, float, float]:
    return memory.available.low, memory.available.likely, memory.available.high


def _check(flags: Flags) -> None:
    """Counts of at least 1, ratios in (0, 1]. Raises PlanError."""
    counts = {
        "--tp": flags.tp, "--pp": flags.pp, "--dp": flags.dp, "--dcp": flags.dcp,
        "--block-size": flags.block_size,
        "--max-model-len": flags.max_model_len, "--max-num-batched-tokens": flags.max_num_batched_tokens,
        "--max-num-seqs": flags.max_num_seqs, "--num-gpu-blocks-override": flags.num_gpu_blocks,
    }  # fmt: skip
    for name, value in counts.items():
        if value is not None and not 1 <= value <= 1 << 31:
            raise PlanError(f"{name} {value}: at least 1 is wanted")
    if flags.num_spec < 0:
        raise PlanError(f"--num-spec {flags.num_spec}: at least 0 is wanted")
    if flags.tp % flags.dcp:
        raise PlanError(f"--dcp {flags.dcp} must divide --tp {flags.tp}")
    for name, ratio in (
        ("--gpu-memory-utilization", flags.gpu_memory_utilization),
        ("--swa-full-tokens-ratio", flags.swa_full_tokens_ratio),
    ):
        if ratio is not None and not 0 < ratio <= 1:
            raise PlanError(f"{name} {ratio:g}: a ratio above 0 and at most 1 is wanted")


def _fits(model: Model, setup: Setup, pool: Pool) -> int:
    """The longest request: the pool's bound, or the model's context where that is less."""
    if model.max_context is None:
        return pool.max_model_len_fits
    return min(pool.max_model_len_fits, max(model.max_context, setup.flags.max_model_len or 0))


def _curve(setup: Setup, accounting: Accounting, pool: Pool) -> tuple[Point, ...]:
    lengths = [step for step in _STEPS if step < setup.max_model_len]
    return tuple(_point(accounting, pool, length) for length in (*lengths, setup.max_model_len))


def _point(accounting: Accounting, pool: Pool, length: int) -> Point:
    blocks = accounting.blocks_for(length)
    size = blocks * accounting.bytes_per_block / (1 << 20)
    return Point(length, pool.num_blocks / max(1, blocks), size)


def _binding(setup: Setup, accounting: Accounting, pool: Pool, memory: Memory) -> str:
    if memory.available.likely <= 0 and setup.flags.num_gpu_blocks is None:
        largest = max(memory.terms[1:], key=lambda term: term.gib.likely, default=None)
        return f"{largest.name} ({largest.gib.likely:.2f} GiB)" if largest else "memory"
    if pool.max_concurrency > setup.seqs:
        return f"max_num_seqs ({setup.seqs}): the pool would hold {pool.max_concurrency:.0f}"
    shares = accounting.shares(setup.max_model_len)
    name, blocks = max(shares.items(), key=lambda item: item[1])
    return (
        f"{name}: {blocks / max(1, sum(shares.values())):.0%} of a request of {setup.max_model_len:,} tokens"
    )


def _warnings(
    model: Model, setup: Setup, accounting: Accounting, pool: Pool, memory: Memory
) -> tuple[str, ...]:
    flags, parts = setup.flags, [part for layer in model.layers for part in layer]
    heads = max((part.kv_heads for part in parts if isinstance(part, Attention)), default=None)
    found = []
    if heads is not None and flags.tp > heads:
        found.append(
            f"--tp {flags.tp} is above the {heads} KV heads: they are replicated, more TP adds no KV capacity"
        )
    if any(isinstance(part, Latent) for part in parts) and flags.tp > 1 and flags.dcp == 1:
        found.append("the latent KV is replicated on every TP rank; only --dcp divides it")
    if model.kv_scheme and flags.kv_dtype == "auto":
        found.append(f"KV is {setup.kv.name} because the checkpoint says so, not by a flag")
    hybrid = any(isinstance(part, State) for part in parts) or any(
        isinstance(part, Attention) and part.reach is not Reach.FULL for part in parts
    )
    if hybrid and flags.engine == "vllm":
        found.append(_hybrid_warning(setup))
    if not memory.exact and memory.available.low <= 0 < memory.available.likely:
        found.append("at the low end of the interval nothing is left for KV")
    fitting = accounting.blocks_for(setup.max_model_len) + setup.reserved_blocks <= pool.num_blocks
    if not fitting:
        found.append(
            f"one request of max_model_len {setup.max_model_len:,} does not fit: the engine would not start"
        )
    if memory.terms and not setup.version.since(0, 21) and flags.engine == "vllm":
        found.append("CUDA graphs (0.1-3.5 GiB) come on top of the budget before 0.21")
    if model.max_context is not None and setup.max_model_len > model.max_context:
        found.append(f"max_model_len is above the model's own context of {model.max_context:,} tokens")
    if flags.dp > 1:
        found.append(f"{flags.dp} engines, each with a pool of its own: the figures are those of one")
    return tuple(found)


def _hybrid_warning(setup: Setup) -> str:
    if setup.concurrency_tokens:
        return (
            "layers differ: the logged tokens are concurrency x max_model_len and change with max_model_len"
        )
    return (
        "layers differ: the logged tokens are blocks / groups x block size, less than the context that fits"
    )
