"""From a config to a ``Model``: which family builds its layers, and what makes the planner refuse.

Fails closed: a model type outside the families below is planned as plain attention only if nothing in its
config hints at another kind of cache. Otherwise the error names the hint.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvctl.plan.attention import HIDDEN, attention_layers, base_attention, layer_count
from kvctl.plan.counting import prefill_width_of, weights_of
from kvctl.plan.dtypes import element_bytes, kv_scheme
from kvctl.plan.errors import PlanError, UnknownArchitectureError
from kvctl.plan.facts import Facts, layer_names
from kvctl.plan.latent import indexer_of, latent_layers, latent_of
from kvctl.plan.recurrent import RECURRENT, by_names
from kvctl.plan.shapes import Attention, Latent, Layer, Model, Reach
from kvctl.plan.weighing import kept_of

# Keys of caches that no family here knows, with what is missing.
_REFUSED: Mapping[str, str] = {
    "compress_ratios": "the compressor states of DeepSeek-V4",
    "linear_attn_config": "the KDA states of Kimi-Linear",
    "attn_type_list": "the lightning attention of MiniMax-01",
    "rwkv_version": "RWKV states",
    "block_types": "recurrent blocks (RecurrentGemma)",
    "xlstm_config": "xLSTM states",
}
_REFUSED_TYPES: Mapping[str, str] = {
    "deepseek_v4": "the compressor states of DeepSeek-V4", "kimi_linear": "the KDA states of Kimi-Linear",
    "kimi_k3": "the KDA states of Kimi-K3", "glm5_next": "KDA states with key pooling",
    "minimax": "lightning attention",
    "minimax_text_01": "lightning attention", "minimax_m1": "lightning attention", "rwkv": "RWKV states",
    "recurrent_gemma": "recurrent blocks", "plamo2": "PLaMo-2's states",
    "mllama": "cross-attention to images",
    "minimax_m3": "its sparse attention's index cache", "minimax_m3_vl": "its sparse attention's index cache",
    "phi4flash": "its shared states", "bailing_hybrid": "lightning attention",
    "t5": "T5 (vLLM does not serve it)",
}  # fmt: skip
_HINT = re.compile(
    r"mamba|ssm|linear_(?:num|key|value|conv)|recurren|rwkv|kda|lightning|compress|hybrid|state_size"
)
_HARMLESS = frozenset({"hybrid_layer_pattern", "mamba_ssm_dtype", "use_mamba_kernels"})
_MAX_CONTEXT_KEYS = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len",
"seq_length",
                     "max_sequence_length", "model_max_length")  # fmt: skip
# Architecture names for configs without model_type.
_BY_ARCHITECTURE: tuple[tuple[str, str], ...] = (
    ("qwen3next", "qwen3_next"), ("qwen3_5moe", "qwen3_5_moe"), ("qwen3_5", "qwen3_5"), ("gemma4", "gemma4"),
    ("gemma3n", "gemma3n"), ("gemma3", "gemma3"), ("gemma2", "gemma2"), ("gptoss", "gpt_oss"), ("llama4",
    "llama4"),
    ("nemotronh", "nemotron_h"), ("granitemoehybrid", "granitemoehybrid"), ("jamba", "jamba"), ("bamba",
    "bamba"),
    ("falconh1", "falcon_h1"), ("falconmamba", "falcon_mamba"), ("zamba2", "zamba2"), ("cohere2", "cohere2"),
    ("olmo3", "olmo3"), ("mimov2", "mimo_v2"), ("step3p5", "step3p5"), ("step3p7", "step3p7"), ("whisper",
    "whisper"),
    ("deepseekv4", "deepseek_v4"), ("kimilinear", "kimi_linear"), ("longcatflash", "longcat_flash"),
    ("minimaxm3", "minimax_m3"), ("minimaxm1", "minimax_m1"), ("minimaxtext01", "minimax_text_01"), ("qwen",
    "qwen2"),
    ("decilm", "nemotron-nas"), ("lfm2", "lfm2"), ("exaone4", "exaone4"), ("afmoe", "afmoe"), ("mamba2",
    "mamba2"),
)  # fmt: skip


def describe(document: Mapping[str, Any], name: str = "model") -> Model:
    """The model of a config. Pure; ``document`` as ``json.loads`` gives it. Raises PlanError."""
    facts = _named(Facts.of(document))
    _refuse(facts)
    layers, attention = _layers(facts)
    if not any(layers):
        raise UnknownArchitectureError(
            "config: no layer of this model caches anything, so there is no pool to plan"
        )
    quantization = _quantization(facts)
    drafts = _own_drafts(facts, attention)
    return Model(
        name=name,
        layers=layers,
        attention=attention,
        drafts=drafts,
        dtype=_dtype(facts),
        vocab=facts.optional("vocab_size", least=1),
        hidden=facts.optional(*HIDDEN, least=1),
        max_context=_max_context(facts),
        weights=weights_of(facts, layers, drafts, document),
        quantization=_quant_name(quantization),
        kept=kept_of(quantization, len(layers)),
        kv_scheme=kv_scheme(quantization),
        prefill_width=prefill_width_of(facts, layers),
        notes=_notes(facts, document),
    )


def _named(facts: Facts) -> Facts:
    """``facts`` with ``model_type`` filled in from ``architectures`` where it is absent."""
    if facts.model_type:
        return facts
    for architecture in facts.architectures:
        for prefix, kind in _BY_ARCHITECTURE:
            if architecture.startswith(prefix):
                return Facts({**facts.values, "model_type": kind})
    if facts.has(
        "kv_lora_rank", "head_dim", "num_key_value_heads", *_MAX_CONTEXT_KEYS, "hidden_size", "d_model"
    ):
        return facts
    raise PlanError("config: neither model_type nor architectures is there; is this a model's config.json?")


def _refuse(facts: Facts) -> None:
    for key, what in _REFUSED.items():
        if facts.has(key):
            raise UnknownArchitectureError(f"config: {key} is set, and {what} are not known to the planner")
    what = _REFUSED_TYPES.get(facts.model_type, "")
    if what:
        raise UnknownArchitectureError(
            f"config: model_type {facts.model_type}: {what}: not known to the planner"
        )
    if facts.model_type in RECURRENT:
        return
    for key in sorted(facts.values):
        if (
            _HINT.search(key.lower())
            and key not in _HARMLESS
            and facts.values[key] not in (None, False, [], 0)
        ):
            if by_names_possible(facts):
                return
            kind = facts.model_type or "(none)"
            raise UnknownArchitectureError(
                f"config: model_type {kind} with {key}: its recurrent layers are not known"
            )


def by_names_possible(facts: Facts) -> bool:
    """Whether ``layer_types`` says which layers are recurrent, so that their shape can be read."""
    return layer_names(facts, layer_count(facts)) is not None


def _layers(facts: Facts) -> tuple[tuple[Layer, ...], Attention | Latent | None]:
    """The layers by family, and the attention that inflates blocks beside recurrent layers."""
    kind = facts.model_type
    if kind in RECURRENT:
        layers = RECURRENT[kind](facts)
        has_attention = any(isinstance(part, Attention) for layer in layers for part in layer)
        return layers, base_attention(facts) if has_attention else None
    if kind == "whisper" or facts.has("decoder_layers"):
        return _encoder_decoder(facts), base_attention(facts)
    if facts.has("kv_lora_rank") and kind != "minicpm3":
        return latent_layers(facts), latent_of(facts)
    if facts.has("block_configs"):
        return _nas(facts), base_attention(_with_kv(facts))
    named = by_names(facts)
    return (named or attention_layers(facts)), base_attention(facts)


def _encoder_decoder(facts: Facts) -> tuple[Layer, ...]:
    """Each decoder layer keeps its own KV and that of the encoder's output (Whisper)."""
    own = base_attention(facts)
    cross = Attention(own.kv_heads, own.key_dim, own.value_dim, Reach.CROSS)
    return ((own, cross),) * layer_count(facts)


def _nas(facts: Facts) -> tuple[Layer, ...]:
    """Nemotron-NAS: each block has its own head grouping, or no attention."""
    blocks = facts.values["block_configs"]
    if not isinstance(blocks, list) or len(blocks) != layer_count(facts):
        raise PlanError("config: block_configs does not have one entry per layer")
    layers: list[Layer] = []
    for index, block in enumerate(blocks):
        section = Facts(block).section("attention") if isinstance(block, dict) else None
        if section is None:
            raise PlanError(f"config: block_configs[{index}] has no attention section")
        if section.flag("no_op", default=False) or section.flag("replace_with_linear", default=False):
            layers.append(())
            continue
        layers.append((base_attention(_grouped(facts, section.integer("n_heads_in_group"))),))
    return tuple(layers)


def _grouped(facts: Facts, per_group: int) -> Facts:
    heads = facts.integer("num_attention_heads")
    if heads % per_group:
        raise PlanError(f"config: {heads} heads do not divide into groups of {per_group}")
    return Facts({**facts.values, "num_key_value_heads": heads // per_group})


def _with_kv(facts: Facts) -> Facts:
    """KV heads of a NAS model are those of its first attention block."""
    blocks = [
        Facts(block).section("attention")
        for block in facts.values["block_configs"]
        if isinstance(block, dict)
    ]
    groups = [each.optional("n_heads_in_group", least=1) for each in blocks if each is not None]
    first = next((each for each in groups if each), None)
    return facts if first is None else _grouped(facts, first)


def _own_drafts(facts: Facts, attention: Attention | Latent | None) -> tuple[Layer, ...]:
    """The attention layers of the model's own MTP head; Gemma-4's shares the model's KV and has none."""
    if attention is None or facts.model_type.startswith("gemma4"):
        return ()
    count = facts.optional("num_nextn_predict_layers", "mtp_num_hidden_layers", least=0) or 0
    pattern = facts.text("mtp_hybrid_override_pattern")
    count *= pattern.count("*") if pattern else 1
    indexer = indexer_of(facts) if isinstance(attention, Latent) else None
    layer: Layer = (attention,) if indexer is None else (attention, indexer)
    return (layer,) * min(count, layer_count(facts))


def _quantization(facts: Facts) -> Mapping[str, Any] | None:
    for key in ("quantization_config", "quantization", "compression_config"):
        section = facts.section(key)
        if section is not None:
            return section.values
    return None


def _quant_name(quantization: Mapping[str, Any] | None) -> str:
    """What the weights are quantised with: by algorithm, then format, then method."""
    if quantization is None:
        return ""
    for key in ("quant_algo", "format", "quant_method"):
        value = quantization.get(key)
        if isinstance(value, str):
            return {"float-quantized": "fp8", "nvfp4-pack-quantized": "nvfp4"}.get(
                value.lower(), value.lower()
            )
    return ""


def _dtype(facts: Facts) -> str:
    """The model's dtype; float32 checkpoints are served as 16 bit, as vLLM's "auto" does."""
    for key in ("torch_dtype", "dtype"):
        name = facts.text(key).removeprefix("torch.")
        if name and name != "auto":
            return "float16" if element_bytes(name) == 4 else name
    return "bfloat16"


def _max_context(facts: Facts) -> int | None:
    """The model's context length; scaled by ``rope_scaling`` where its type stretches it."""
    base = facts.optional(*_MAX_CONTEXT_KEYS, least=1)
    scaling = facts.values.get("rope_scaling") or facts.values.get("rope_parameters")
    if base is None or not isinstance(scaling, dict):
        return base
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")
    if (
        kind not in ("yarn", "linear", "dynamic")
        or not isinstance(factor, int | float)
        or isinstance(factor, bool)
    ):
        return base
    original = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
    start = original if isinstance(original, int) and original > 0 else base
    return max(base, int(start * factor)) if 1 <= factor <= 4096 else base


def _notes(facts: Facts, document: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    if not facts.model_type:
        notes.append(
            "config has no model_type: every layer is taken as full attention, as nothing says otherwise"
        )
    if "vision_config" in document:
        notes.append("the vision tower's weights are estimated from its depth and width")
    if not facts.has("torch_dtype", "dtype"):
        notes.append("config names no dtype: bfloat16 assumed")
    return tuple(notes)
