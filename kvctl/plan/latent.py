"""Multi-head latent attention from a config: DeepSeek-V2 and later, Kimi-K2, GLM-5, LongCat-Flash.

One vector of ``kv_lora_rank + qk_rope_head_dim`` elements per token, not split by tensor parallelism. Models
with an indexer (DeepSeek-V3.2, GLM-5) keep a second cache beside it on the layers that own one. Source: vLLM
``model_executor/models/deepseek_v2.py``.
"""

from kvctl.plan.attention import HEADS, layer_count
from kvctl.plan.errors import PlanError
from kvctl.plan.facts import Facts
from kvctl.plan.shapes import Indexer, Latent, Layer, Part


def latent_of(facts: Facts) -> Latent:
    """The latent part of every layer. Raises PlanError where the rank or the rope dimension is missing."""
    rope = facts.integer("qk_rope_head_dim", least=0)
    nope = facts.optional("qk_nope_head_dim", least=0)
    return Latent(
        rank=facts.integer("kv_lora_rank"),
        rope=rope,
        heads=facts.integer(*HEADS),
        unabsorbed=(128 if nope is None else nope) + rope,
    )


def latent_layers(facts: Facts) -> tuple[Layer, ...]:
    """One layer per index. LongCat-Flash has two attentions in each."""
    layers = layer_count(facts)
    latent, indexer = latent_of(facts), indexer_of(facts)
    owns = _indexer_owners(facts, layers) if indexer is not None else (False,) * layers
    per_layer: tuple[Part, ...] = (latent,) * (2 if facts.model_type.startswith("longcat_flash") else 1)
    return tuple((*per_layer, indexer) if has and indexer else per_layer for has in owns)


def indexer_of(facts: Facts) -> Indexer | None:
    """The indexer's key cache where the model has one (``index_topk``)."""
    if not facts.has("index_topk", "index_head_dim"):
        return None
    return Indexer(facts.integer("index_head_dim"))


def _indexer_owners(facts: Facts, layers: int) -> tuple[bool, ...]:
    """Which layers build an indexer: ``indexer_types``, ``index_topk_pattern`` or the frequency."""
    types = facts.names("indexer_types")
    if types is not None:
        if len(types) != layers:
            raise PlanError(
                f"config: indexer_types names {len(types)} layers, num_hidden_layers says {layers}"
            )
        return tuple(each == "full" for each in types)
    pattern = facts.values.get("index_topk_pattern")
    if isinstance(pattern, str | list):
        return tuple(index >= len(pattern) or pattern[index] != "S" for index in range(layers))
    every = facts.optional("index_topk_freq", least=1) or 1
    offset = facts.optional("index_skip_topk_offset", least=0)
    offset = 2 if offset is None else offset
    return tuple(max(index - offset + 1, 0) % every == 0 for index in range(layers))
