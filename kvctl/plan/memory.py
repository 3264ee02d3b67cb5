"""The memory that is left for KV on one rank, as an interval: the engine measures it, we can only bound it.

``available = total x utilisation - weights - activation peak - other (NCCL, context) - CUDA graphs (since
0.21)``, the engine's own sum (vLLM ``v1/worker/gpu_worker.determine_available_memory``). It holds to 0.01
GiB in every start-up log that prints all terms. Total and weights are known; the others are bounded from
logs:

* activation: until 0.11 the sampler on a dummy batch, ``9.7 x max_num_seqs x vocabulary x 4 bytes`` (k =
  9.6-9.9 in most logs, 2.2-7.2 in the others); later samplers need less (k = 4.5-6.4 until 0.20, 0.9-5
  since). Never less than what the largest prefill needs.
* other: 0.06-0.35 GiB on one GPU, up to 1.4 GiB with tensor parallelism.
* CUDA graphs: inside the budget since 0.21, up to 0.7 GiB; before that outside it.

``--overhead-gib`` replaces utilisation and all three; ``--available-gib`` and ``--kv-cache-memory-bytes``
replace the whole sum.
"""

from dataclasses import dataclass

from kvctl.plan.cards import GIB, Card
from kvctl.plan.errors import PlanError
from kvctl.plan.setup import Setup
from kvctl.plan.shapes import Model
from kvctl.plan.weighing import Ranks, weight_bytes

_MOST_GIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """An interval in GiB: ``low`` and ``high`` bound it, ``likely`` is the figure to plan with."""

    low: float
    likely: float
    high: float

    def scaled(self, factor: float) -> "Span":
        """Every bound times ``factor``."""
        return Span(self.low * factor, self.likely * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the sum: ``gib`` per rank and where it comes from."""

    name: str
    gib: Span
    source: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory for KV per rank. ``terms`` in the order of the sum; empty where it was given outright."""

    available: Span
    terms: tuple[Term, ...]
    source: str

    @property
    def exact(self) -> bool:
        """Whether the memory is a single figure, not an interval."""
        return self.available.low == self.available.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the user knows of the memory: sizes in GiB of one rank, as the engine logs them.

    ``weights_total_gib`` is the whole model's (a safetensors index), to be divided over TP and PP.
    """

    card: Card | None = None
    weights_gib: float | None = None
    weights_total_gib: float | None = None
    overhead_gib: float | None = None
    available_gib: float | None = None
    kv_cache_memory_bytes: int | None = None
    cpu_offload_gib: float | None = None


def memory_of(model: Model, setup: Setup, given: Given, spec: Model | None = None) -> Memory:
    """The interval of memory for KV; ``spec``: a draft model, whose weights are there too.

    Raises PlanError where card or weights are wanted and unknown.
    """
    for size in (given.weights_gib, given.overhead_gib, given.available_gib, given.cpu_offload_gib):
        if size is not None and not 0 <= size <= _MOST_GIB:
            raise PlanError(f"{size} GiB is no amount of memory")
    if given.kv_cache_memory_bytes is not None:
        return _given(given.kv_cache_memory_bytes / GIB, "--kv-cache-memory-bytes")
    if given.available_gib is not None:
        return _given(given.available_gib, "--available-gib")
    if setup.flags.num_gpu_blocks is not None:
        return _given(0.0, "--num-gpu-blocks-override")
    if given.card is None:
        raise PlanError(
            "give --gpu, or --available-gib, or --kv-cache-memory-bytes: how much memory is there?"
        )
    weights = _weights(model, setup, given, spec)
    if given.overhead_gib is not None:
        total = Term("total", _exact(given.card.total_gib), _card_source(given.card))
        terms: tuple[Term, ...] = (
            total,
            weights,
            Term("overhead", _exact(given.overhead_gib), "--overhead-gib"),
        )
    else:
        terms = _engine_terms(model, setup, given.card, weights)
    return Memory(_sum(terms), terms, "sum")


def _given(gib: float, source: str) -> Memory:
    return Memory(_exact(gib), (), source)


def _exact(gib: float) -> Span:
    return Span(gib, gib, gib)


def _card_source(card: Card) -> str:
    return (
        f"{card.name}: the driver's total"
        if card.seen
        else f"{card.name}: label less the driver's share, not seen"
    )


def _engine_terms(model: Model, setup: Setup, card: Card, weights: Term) -> tuple[Term, ...]:
    doubt = 0.0 if card.seen else 0.01 * card.total_gib
    total = Span(card.total_gib - doubt, card.total_gib, card.total_gib + doubt).scaled(setup.utilization)
    if setup.flags.engine != "vllm":
        share = "static share of weights and pools"
        return (
            Term("total x fraction", total, share),
            weights,
            Term("other", Span(0.05, 0.5, 1.5), "context, NCCL"),
        )
    terms = [
        Term("total x utilisation", total, f"{_card_source(card)}, x {setup.utilization:g}"),
        weights,
        activation(model, setup),
        Term("other", _other(setup), "context, NCCL: seen in logs of this number of GPUs"),
    ]
    if setup.version.since(0, 21):
        terms.append(Term("CUDA graphs", Span(0.0, 0.4, 0.9), "estimated inside the budget since 0.21"))
    return tuple(terms)


def _sum(terms: tuple[Term, ...]) -> Span:
    first, *rest = terms
    return Span(
        first.gib.low - sum(term.gib.high for term in rest),
        first.gib.likely - sum(term.gib.likely for term in rest),
        first.gib.high - sum(term.gib.low for term in rest),
    )


def _weights(model: Model, setup: Setup, given: Given, spec: Model | None) -> Term:
    """Per rank: as given, else the index's or the arithmetic's share of a TP, PP (and DP) rank."""
    flags = setup.flags
    if given.weights_gib is not None:
        return Term("weights", _exact(given.weights_gib), "--weights-gib, of one rank")
    if given.weights_total_gib is not None and flags.weight_dtype == "auto":
        size = given.weights_total_gib / (flags.tp * flags.pp)
        found = Span(size, size * 1.005, size * 1.03)
        return _offloaded(_with_draft(found, setup, spec), given, "safetensors beside the config")
    ranks = Ranks(tp=flags.tp, pp=flags.pp, dp=flags.dp)
    draft = flags.num_spec > 0 and (flags.spec_method or "mtp").lower() == "mtp"
    sizes = weight_bytes(model, flags.weight_dtype, setup.dtype_bytes, ranks, draft=draft)
    if sizes is None:
        raise PlanError("the weights' size cannot be worked out from this config: give --weights-gib")
    found = _with_draft(Span(*(size / GIB for size in sizes)), setup, spec)
    return _offloaded(found, given, "dimensions and dtype of the config")


def _with_draft(size: Span, setup: Setup, spec: Model | None) -> Span:
    """With a draft model's weights, where its config tells them; it may or may not be split over TP."""
    sizes = None if spec is None else weight_bytes(spec, "auto", setup.dtype_bytes)
    if sizes is None:
        return size
    low, likely, high = (each / GIB for each in sizes)
    return Span(size.low + low / setup.flags.tp, size.likely + likely / setup.flags.tp, size.high + high)


def _offloaded(size: Span, given: Given, source: str) -> Term:
    """Less what ``--cpu-offload-gb`` keeps in the host's memory: whole parameters, so only nearly."""
    away = given.cpu_offload_gib
    if not away:
        return Term("weights", size, source)
    left = Span(
        max(0.0, size.low - away * 1.01), max(0.0, size.likely - away), max(0.0, size.high - away * 0.99)
    )
    return Term("weights", left, f"{source}, less {away:g} GiB kept by the host")


# Sampler's k (low, likely, high) up to the release; seen in logs, see docs/plan.md. The last row is for
# newer ones.
_SAMPLER: tuple[tuple[tuple[int, int], tuple[float, float, float]], ...] = (
    ((0, 12), (2.0, 9.65, 10.4)),
    ((0, 21), (1.5, 5.0, 7.5)),
    ((1 << 20, 0), (0.8, 2.8, 6.0)),
)
_UNKNOWN_SAMPLER = (0.8, 4.0, 10.4)
_FULL_BATCH, _LEAST_FULL = 1024, 4.0  # with 1024 sequences no log until 0.11 shows less than k = 4.2


def activation(model: Model, setup: Setup) -> Term:
    """The transient peak of the profile run: sampler or prefill, whichever is larger."""
    sampler = setup.seqs * (model.vocab or 128_000) * 4 / GIB
    width = model.prefill_width or 8 * (model.hidden or 4096)
    prefill = setup.batched_tokens * width * setup.dtype_bytes / GIB / setup.flags.tp
    fitting = (span for before, span in _SAMPLER if not setup.version.since(*before))
    low, likely, high = next(fitting) if setup.version.known else _UNKNOWN_SAMPLER
    if setup.seqs >= _FULL_BATCH and not setup.version.since(0, 12):
        low = _LEAST_FULL
    peak = Span(
        max(low * sampler, 0.5 * prefill, 0.05),
        max(likely * sampler, prefill, 0.1),
        max(high * sampler, 1.8 * prefill, 0.3),
    )
    return Term(
        "activation", peak, f"{likely:g} x {setup.seqs} sequences x vocabulary x 4 bytes, or the prefill's"
    )


def _other(setup: Setup) -> Span:
    ranks = setup.flags.tp
    if not setup.version.since(0, 7):
        return Span(0.05, 0.35, 1.8)
    if ranks == 1:
        return Span(0.05, 0.13, 0.5)
    return Span(0.1, 0.54, 1.4)
