"""What a model keeps per layer while a request runs: the vocabulary of the planner.

A layer is a tuple of parts, since some hold two things (Falcon-H1: attention and state; LongCat: two
attentions; Whisper: self- and cross-attention), and some nothing (a feed-forward block, a layer that shares
another's KV).
"""

from dataclasses import dataclass
from enum import StrEnum


class Reach(StrEnum):
    """Which positions an attention layer keeps."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    CROSS = "cross"


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values per head. ``kv_heads`` of the whole model; ``window`` in tokens (window or chunk)."""

    kv_heads: int
    key_dim: int
    value_dim: int
    reach: Reach = Reach.FULL
    window: int = 0
    tag: str = ""  # layers that the engine never puts in one group with others of the same shape


@dataclass(frozen=True, slots=True)
class Latent:
    """MLA: one compressed vector of ``rank + rope`` elements per token, the same on every TP rank.

    ``unabsorbed`` is the head size (nope + rope) that engines without MLA support cache per head.
    """

    rank: int
    rope: int
    heads: int
    unabsorbed: int


@dataclass(frozen=True, slots=True)
class Indexer:
    """The key cache of a sparse-attention indexer: fp8 elements and one fp32 scale per 128 of them."""

    dim: int


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state of constant size: a convolution's last columns and a matrix per head.

    ``channels + groups * group_width`` columns of ``kernel - 1`` elements and ``heads * cells`` elements, all
    split over TP. ``cell_bytes``: bytes of a matrix element, None = as the model's weights.
    """

    channels: int
    kernel: int
    heads: int
    cells: int
    groups: int = 0
    group_width: int = 0
    cell_bytes: int | None = None
    speculates: bool = True  # speculative tokens add columns to the convolution
    checkpoints: int = 0  # extra pages per request in align mode, since the engine exports prefill states
    family: str = "state"


Part = Attention | Latent | Indexer | State
Layer = tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameters by kind, the whole model's; what the arithmetic of the weights' size needs.

    ``mixers``: projections of attention and recurrent layers; ``feed``: feed-forward matrices, shared experts
    too; ``experts``: routed experts; ``dense``: embeddings and output head, routers; ``draft``: the model's
    own MTP head, which is loaded only to speculate; ``rotary``: elements of the table of cosines and sines,
    whole on every rank. ``expert``: (input, width) of one expert.
    """

    mixers: int
    feed: int
    experts: int
    dense: int
    draft: int = 0
    rotary: int = 0
    tower: int | None = 0  # for pictures and sound; None: there is one of unknown size
    expert: tuple[int, int] = (0, 0)
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """Shares of ``mixers``, ``feed`` and ``experts`` that a quantised checkpoint leaves as they were."""

    mixers: float = 0.0
    feed: float = 0.0
    experts: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as the planner sees it. ``layers`` in order, ``drafts`` those of its own MTP head.

    ``kv_scheme``: KV dtype that the checkpoint asks for ("" = none). ``max_context``: tokens, None if the
    config does not say. ``weights``: None where the config lacks the fields for the arithmetic.
    """

    name: str
    layers: tuple[Layer, ...]
    dtype: str
    vocab: int | None
    hidden: int | None
    max_context: int | None
    attention: Attention | Latent | None
    drafts: tuple[Layer, ...] = ()
    weights: Weights | None = None
    quantization: str = ""
    kept: Kept | None = None  # None: the config does not say what is left unquantised
    kv_scheme: str = ""
    prefill_width: int | None = None  # elements of activation per prompt token in the widest layer
    notes: tuple[str, ...] = ()
