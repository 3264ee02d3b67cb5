"""How many parameters a model has, by kind, from the dimensions of its config.

Counted: projections of attention and recurrent layers, feed-forward (gated: three matrices), experts, shared
experts, routers, embeddings and output head, towers whose dimensions the config tells. Left out: norms and
biases, below 1 %. Law 3: a dimension that is absent makes the count unknown, not smaller.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvctl.plan.facts import Facts
from kvctl.plan.shapes import Attention, Latent, Layer, State, Weights

_UNGATED = (
    "opt", "gpt2", "gpt_bigcode", "mpt", "falcon", "starcoder2", "phi", "gptj", "bloom", "whisper",
    "gpt_neox", "nemotron_h", "nemotron",
)  # fmt: skip
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token", "experts_per_token")
HIDDEN = ("hidden_size", "n_embd", "d_model")
_INTER = ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads")
_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_STEPS = ("interleave_moe_layer_step", "decoder_sparse_step")
_GATED_QUERIES = ("qwen3_next", "qwen3_5")  # the query projection brings a gate of its own width

# Columns of projections per channel. Mamba: two in, one out; LFM2's convolution: three and one.
_RECURRENT: Mapping[str, int] = MappingProxyType({"mamba1": 3, "mamba2": 3, "conv": 4})
_TOWERS = ("vision_config", "audio_config")
_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "vt_num_hidden_layers")
_WIDTHS = ("hidden_size", "embed_dim", "d_model", "vt_hidden_size")
_FEEDS = ("intermediate_size", "encoder_ffn_dim", "vt_intermediate_size")


def weights_of(
    facts: Facts, layers: tuple[Layer, ...], drafts: tuple[Layer, ...], document: Mapping[str, Any]
) -> Weights | None:
    """Parameters by kind; None where the config lacks a dimension."""
    hidden = facts.optional(*HIDDEN, least=1)
    vocab = facts.optional("vocab_size", least=1)
    if hidden is None or vocab is None:
        return None
    mixers = _mixers(facts, layers, hidden)
    feed = _feed_forward(facts, layers, hidden)
    if feed is None or mixers is None:
        return None
    tied = facts.flag("tie_word_embeddings", default=facts.model_type.startswith("gemma"))
    return Weights(
        mixers=mixers,
        feed=feed.feed,
        experts=feed.experts,
        dense=vocab * hidden * (1 if tied else 2) + feed.routers,
        draft=_draft(facts, feed, drafts, hidden),
        rotary=_rotary(facts, hidden),
        tower=_tower(facts, document),
        expert=feed.expert,
        tied=tied,
    )


def _mixers(facts: Facts, layers: tuple[Layer, ...], hidden: int) -> int | None:
    found = [_mixer(facts, part, hidden) for layer in layers for part in layer]
    return None if None in found else sum(each for each in found if each is not None)


def _mixer(facts: Facts, part: object, hidden: int) -> int | None:
    heads = facts.optional(*_HEADS, least=1)
    if isinstance(part, Attention):
        if heads is None:
            return None
        gate = heads * part.key_dim if facts.model_type.startswith(_GATED_QUERIES) else 0
        return hidden * ((heads + part.kv_heads) * (part.key_dim + part.value_dim) + gate)
    if isinstance(part, Latent):
        return _latent(facts, part, hidden)
    if isinstance(part, State) and part.family == "gdn":
        values = part.heads * (facts.optional("linear_value_head_dim", least=1) or 128)
        return hidden * (part.channels + 2 * values + 2 * part.heads)
    if isinstance(part, State):
        return hidden * (_RECURRENT.get(part.family, 3) * part.channels + part.groups * part.group_width)
    return 0


def _latent(facts: Facts, part: Latent, hidden: int) -> int | None:
    nope = facts.optional("qk_nope_head_dim", least=0)
    value = facts.optional("v_head_dim", least=1)
    if nope is None or value is None:
        return None
    lora = facts.optional("q_lora_rank", least=1)
    query = part.heads * (nope + part.rope)
    asking = hidden * query if lora is None else lora * (hidden + query)
    keeping = hidden * (part.rank + part.rope) + part.rank * part.heads * (nope + value)
    return asking + keeping + part.heads * value * hidden


class _Feed:
    """Parameters of the feed-forward side; a value object. ``of_layer``: one layer of experts."""

    __slots__ = ("expert", "experts", "feed", "of_layer", "routers")

    def __init__(
        self,
        feed: int,
        experts: int = 0,
        routers: int = 0,
        of_layer: int = 0,
        expert: tuple[int, int] = (0, 0),
    ) -> None:
        self.feed, self.experts, self.routers, self.of_layer = feed, experts, routers, of_layer
        self.expert = expert


def _feed_forward(facts: Facts, layers: tuple[Layer, ...], hidden: int) -> _Feed | None:
    inter = facts.optional(*_INTER, least=1)
    count = len(layers)
    if facts.model_type.startswith("nemotron_h"):  # feed-forward layers are layers of their own
        count = sum(not layer for layer in layers)
    matrices = 2 if facts.model_type in _UNGATED else 3
    experts = facts.optional(*EXPERTS, least=0) or 0
    if not experts:
        return (
            None
            if inter is None
            else _Feed(count * matrices * hidden * inter, of_layer=matrices * hidden * inter)
        )
    width = _expert_width(facts, inter)
    if width is None:
        return None
    latent = facts.optional("moe_latent_size", least=1)  # experts of a smaller space (Nemotron-3)
    sparse = _sparse_layers(facts, count)
    common = _common_width(facts, width, inter)
    beside = matrices * hidden * common + (2 * hidden * latent if latent else 0)
    routed = matrices * (latent or hidden) * experts * width
    plain = facts.optional("intermediate_size_mlp", least=1) or inter or width
    return _Feed(
        feed=sparse * beside + (count - sparse) * matrices * hidden * plain,
        experts=sparse * routed,
        routers=sparse * hidden * experts,
        of_layer=routed + beside,
        expert=(latent or hidden, width),
    )


def _expert_width(facts: Facts, inter: int | None) -> int | None:
    width = facts.optional("moe_intermediate_size", "expert_ffn_hidden_size", least=1)
    if width is None and facts.has("num_local_experts"):  # Mixtral's kind names the expert's width so
        return inter
    return width


def _sparse_layers(facts: Facts, count: int) -> int:
    """Layers with experts: all but the first few, or each second, as the config says."""
    dense = min(facts.optional("first_k_dense_replace", "moe_layer_start_index", least=0) or 0, count)
    step = facts.optional(*_STEPS, least=1) or 1
    return (count - dense) // step


def _common_width(facts: Facts, width: int, inter: int | None) -> int:
    """Width that every token passes beside the routed experts."""
    if facts.model_type.startswith("llama4"):  # always one shared expert, of which the config is silent
        return width
    if facts.model_type.startswith("gemma4"):  # a plain feed-forward stands beside the experts
        return inter or 0
    given = facts.optional("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", least=0)
    return (facts.optional(*_SHARED, least=0) or 0) * width if given is None else given


def _draft(facts: Facts, feed: _Feed, drafts: tuple[Layer, ...], hidden: int) -> int:
    """An MTP head: a layer like the model's last, and the matrix that joins hidden state and embedding."""
    mixers = _mixers(facts, drafts, hidden)
    return (mixers or 0) + len(drafts) * (feed.of_layer + 2 * hidden * hidden)


def _rotary(facts: Facts, hidden: int) -> int:
    """A row for every position of the model's context: 2.5 GiB at ten million.

    Source: vLLM ``model_executor/layers/rotary_embedding/base.py`` (``_compute_cos_sin_cache``).
    """
    width = facts.optional("qk_rope_head_dim", "head_dim", least=1)
    if width is None:
        width = hidden // (facts.optional(*_HEADS, least=1) or hidden)
    return (facts.optional("max_position_embeddings", least=1) or 0) * width


def _tower(facts: Facts, document: Mapping[str, Any]) -> int | None:
    """Parameters of towers for pictures and sound; None where one is there and its size is not told."""
    sections = [document[key] for key in _TOWERS if isinstance(document.get(key), dict)]
    if not sections:
        return None if any("conditional" in each for each in facts.architectures) else 0
    sizes = [_transformer(Facts(section)) for section in sections]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _transformer(facts: Facts) -> int | None:
    depth, width = facts.optional(*_DEPTHS, least=1), facts.optional(*_WIDTHS, least=1)
    if depth is None or width is None:
        return None
    inter = facts.optional(*_FEEDS, least=1) or 4 * width
    return depth * (4 * width * width + 3 * width * inter)


def prefill_width_of(facts: Facts, layers: tuple[Layer, ...]) -> int | None:
    """Elements of activation that one prompt token needs in the widest layer; None where unknown.

    Feed-forward: three times its width and four times the hidden size. A recurrent layer in chunks of 64
    tokens: eight times its channels and two states per chunk.
    """
    hidden = facts.optional(*HIDDEN, least=1)
    inter = facts.optional("intermediate_size", "n_inner", "ffn_dim", least=1)
    if hidden is None:
        return None
    chosen = facts.optional(*CHOSEN, least=1)
    expert = facts.optional("moe_intermediate_size", least=1)
    wide = chosen * (expert or inter or hidden) if chosen else (inter or 4 * hidden)
    states = [part for layer in layers for part in layer if isinstance(part, State)]
    recurrent = max((8 * part.channels + part.heads * part.cells // 32 for part in states), default=0)
    return max(3 * wide, recurrent) + 4 * hidden
