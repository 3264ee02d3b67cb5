"""The engine's page of each layer on one rank: bytes, tokens, and what makes two layers alike.

Source: vLLM ``v1/kv_cache_interface.py`` (``AttentionSpec.page_size_bytes``, ``MLAAttentionSpec``,
``MambaSpec``) and ``platforms/interface.py`` (``_align_hybrid_block_size``).
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from kvctl.plan.errors import PlanError
from kvctl.plan.setup import Setup
from kvctl.plan.shapes import Attention, Indexer, Latent, Model, Part, Reach, State

_OLD_HEAD = 256  # head size to which vLLM before MLA padded DeepSeek's heads
_OLD_ROW = 256  # bytes to which 0.7.1-0.7.3 padded an MLA row
_MLA_BLOCK = 128


class Kind(StrEnum):
    """How many blocks of a page a request needs."""

    FULL = "full"
    LATENT = "latent"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    CROSS = "cross"
    STATE = "state"


FULL_KINDS = frozenset({Kind.FULL, Kind.LATENT})


@dataclass(frozen=True, slots=True)
class Page:
    """One layer's page. ``page`` in bytes, ``block`` in tokens, ``window`` in tokens (0 = none).

    ``shape`` tells layers apart that cost the same but cannot share a group; ``token_bytes`` is what one
    token costs (0 for a state); ``extra_blocks`` are further states per request in align mode.
    """

    kind: Kind
    block: int
    page: int
    window: int = 0
    shape: tuple[object, ...] = ()
    token_bytes: Fraction = Fraction(0)
    extra_blocks: int = 0


def ceil_div(a: int, b: int) -> int:
    """``ceil(a / b)`` for positive integers."""
    return -(-a // b)


def heads_on_rank(kv_heads: int, tp: int) -> int:
    """``max(1, kv_heads // tp)``: above the number of KV heads, they are replicated.

    Raises PlanError where neither divides the other, as the engine does.
    """
    if max(kv_heads, tp) % min(kv_heads, tp):
        raise PlanError(f"--tp {tp} does not fit {kv_heads} KV heads: one must divide the other")
    return max(1, kv_heads // tp)


def token_bytes(part: Attention | Latent | Indexer, setup: Setup) -> Fraction:
    """Bytes of one token in this layer on one rank."""
    if isinstance(part, Attention):
        heads = heads_on_rank(part.kv_heads, setup.flags.tp)
        return heads * setup.kv.head_bytes(part.key_dim + part.value_dim)
    if isinstance(part, Indexer):
        return Fraction(part.dim + part.dim // 128 * 4)
    if not setup.version.since(0, 7):
        return heads_on_rank(part.heads, setup.flags.tp) * setup.kv.head_bytes(
            2 * max(_OLD_HEAD, part.unabsorbed)
        )
    row = setup.kv.latent_bytes(part.rank, part.rope)
    if setup.version.since(0, 7, 1) and not setup.version.since(0, 8):
        return Fraction(ceil_div(int(row), _OLD_ROW) * _OLD_ROW)
    return row


def state_bytes(state: State, setup: Setup) -> int:
    """Bytes of one request's state in this layer on one rank. Raises PlanError where TP does not divide."""
    tp = setup.flags.tp
    groups = state.groups if not state.groups or state.groups % tp == 0 else tp
    channels = state.channels + groups * state.group_width
    if channels % tp or state.heads % tp:
        raise PlanError(
            f"--tp {tp} does not divide {channels} channels and {state.heads} heads of the recurrent state"
        )
    columns = state.kernel - 1 + (setup.flags.num_spec if state.speculates else 0)
    cell = setup.dtype_bytes if state.cell_bytes is None else state.cell_bytes
    return channels // tp * columns * setup.dtype_bytes + state.heads // tp * state.cells * cell


def inflated_block(model: Model, setup: Setup) -> int:
    """The attention block of a model with recurrent layers: the smallest multiple whose page holds a state.

    ``block = A * ceil(state / (A * attention bytes per token))`` with ``A = max(16, block size)`` (MLA: >=
    128).
    """
    states = [state_bytes(part, setup) for layer in model.layers for part in layer if isinstance(part, State)]
    if not states or model.attention is None:
        return setup.block_size
    unit = max(16, setup.block_size, _MLA_BLOCK if isinstance(model.attention, Latent) else 0)
    per_token = token_bytes(model.attention, setup)
    blocks = -(-Fraction(max(states)) // (unit * per_token))
    return max(setup.block_size, unit * int(blocks))


def pages_of(part: Part, setup: Setup, block: int, state_page: int) -> Page:
    """The page of one part. ``block``: tokens of an attention block; ``state_page``: bytes of a state's."""
    if isinstance(part, State):
        size = max(state_bytes(part, setup), state_page)
        extra = part.checkpoints if setup.align_states and setup.version.since(0, 32) else 0
        return Page(Kind.STATE, setup.max_model_len, size, shape=(part.family,), extra_blocks=extra)
    per_token = token_bytes(part, setup)
    page = Page(Kind.FULL, block, int(block * per_token), token_bytes=per_token)
    if isinstance(part, Indexer):
        return replace(page, kind=Kind.LATENT, shape=("indexer",))
    if isinstance(part, Latent):
        return replace(page, kind=Kind.LATENT)
    shape = (part.kv_heads, part.key_dim, part.value_dim, part.tag)
    kind = _KINDS[part.reach]
    if kind is Kind.SLIDING and not setup.hybrid:
        return replace(page, shape=shape)
    if kind is Kind.CHUNKED and not setup.hybrid_chunked:
        return replace(page, shape=shape)
    return replace(page, kind=kind, window=part.window, shape=shape)


_KINDS = {
    Reach.FULL: Kind.FULL,
    Reach.SLIDING: Kind.SLIDING,
    Reach.CHUNKED: Kind.CHUNKED,
    Reach.CROSS: Kind.CROSS,
}


def request_blocks(page: Page, length: int, setup: Setup) -> int:
    """Blocks of this page that one request of ``length`` tokens needs.

    Source: each spec's ``max_memory_usage_bytes`` and ``max_admission_blocks_per_request``.
    """
    if page.kind in FULL_KINDS:
        return ceil_div(ceil_div(length, setup.flags.dcp), page.block)
    if page.kind is Kind.SLIDING:
        return ceil_div(min(page.window - 1 + setup.in_flight, length), page.block) + 1
    if page.kind is Kind.CHUNKED:
        return ceil_div(min(page.window + setup.in_flight, length), page.block)
    if page.kind is Kind.CROSS:
        return ceil_div(setup.batched_tokens, page.block)
    return (2 if setup.align_states else 1) + setup.flags.num_spec + page.extra_blocks
