"""Attention layers from a config: heads, dimensions, and which layers keep only a window.

Sources: vLLM ``transformers_utils/model_arch_config_convertor.py`` (order of the fields for KV heads and head
size), the ``layer_types`` defaults of the Hugging Face configuration classes (a saved config omits what
equals the default), and the models' own code where a layer's heads differ from the model's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvctl.plan.errors import PlanError, UnknownArchitectureError
from kvctl.plan.facts import Facts, layer_names, shown, whole
from kvctl.plan.shapes import Attention, Layer, Reach

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
_KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
_MAX_LAYERS = 4096

# Windows that a saved config omits where they equal the class's default.
_WINDOWS: Mapping[str, int] = MappingProxyType(
    {
        "gpt_oss": 128,
        "gemma2": 4096,
        "gemma3": 4096,
        "gemma3n": 512,
        "gemma4": 512,
        "cohere2": 4096,
        "olmo3": 4096,
    }
)

FULL_NAMES = frozenset({"full_attention", "attention", "full", "global", "global_attention", "hybrid", "*"})
SLIDING_NAMES = frozenset(
    {"sliding_attention", "sliding_window", "sliding_window_attention", "sliding", "local"}
)
CHUNKED_NAMES = frozenset({"chunked_attention", "chunked_local_attention"})
EMPTY_NAMES = frozenset({"none", "moe", "mlp", "ffn", "e", "-"})


def layer_count(facts: Facts) -> int:
    """Layers of the (decoder of the) model. Raises PlanError above 4,096: not a language model's config."""
    layers = facts.integer(*LAYERS)
    if layers > _MAX_LAYERS:
        raise PlanError(f"config: num_hidden_layers is {layers}, more than {_MAX_LAYERS}")
    return layers


def base_attention(facts: Facts) -> Attention:
    """The model's attention layer where nothing more special is said: total KV heads and head dimensions."""
    heads = facts.optional(*HEADS, least=1)
    if heads is None and facts.has("head_dim") and facts.has(*_KV_HEADS):
        heads = facts.integer(*_KV_HEADS)  # the query heads cost nothing in the cache
    heads = facts.integer(*HEADS) if heads is None else heads
    kv_heads = _kv_heads(facts, heads)
    dim = _head_dim(facts, heads)
    if heads % kv_heads:
        raise PlanError(f"config: {heads} attention heads do not divide into {kv_heads} KV heads")
    value = facts.optional("v_head_dim", least=1) if facts.model_type.startswith("mimo") else None
    return Attention(kv_heads=kv_heads, key_dim=dim, value_dim=value or dim)


def _kv_heads(facts: Facts, heads: int) -> int:
    kind = facts.model_type
    nested = facts.section("attn_config")  # dbrx, mpt
    if nested is not None and nested.has("kv_n_heads"):
        return nested.integer("kv_n_heads")
    new_falcon = facts.flag("new_decoder_architecture", default=False)
    if facts.flag("multi_query", default=False) and not new_falcon:
        return 1
    if kind == "chatglm" and not facts.flag("multi_query_attention", default=True):
        return heads
    found = facts.optional(*_KV_HEADS, least=1)
    return heads if found is None else found


def _head_dim(facts: Facts, heads: int) -> int:
    explicit = facts.optional(
        "attention_head_dim", "head_dim", "hidden_size_per_head", "kv_channels", least=0
    )
    if explicit:
        return explicit
    hidden = facts.integer(*HIDDEN)
    if hidden % heads:
        raise PlanError(
            f"config: hidden_size {hidden} does not divide into {heads} heads, and there is no head_dim"
        )
    return hidden // heads


def window_of(facts: Facts) -> int | None:
    """``sliding_window`` in tokens, None where the model has none in use."""
    if facts.values.get("use_sliding_window") is False:
        return None
    if facts.model_type.startswith("qwen") and not facts.flag("use_sliding_window", default=False):
        return None
    value = facts.values.get("sliding_window")
    if isinstance(value, list):
        raise UnknownArchitectureError(
            "config: sliding_window is a list; per-layer windows of this form are unknown"
        )
    window = facts.optional("sliding_window", "sliding_window_size", least=0)
    if window is None and "sliding_window" not in facts.values:
        window = _WINDOWS.get(facts.model_type)
    return window or None


@dataclass(frozen=True, slots=True)
class Mix:
    """A model's attention parts by reach; ``sliding``/``chunked`` are None where the config has no window."""

    full: Attention
    sliding: Attention | None
    chunked: Attention | None

    def part(self, name: str) -> Layer:
        """The layer of that ``layer_types`` name. Raises UnknownArchitectureError."""
        if name in EMPTY_NAMES:
            return ()
        found: Attention | None = None
        if name in FULL_NAMES:
            found = self.full
        elif name in SLIDING_NAMES:
            found = self.sliding
            if found is None:
                raise PlanError("config: sliding_attention layers, but sliding_window is missing")
        elif name in CHUNKED_NAMES:
            found = self.chunked
            if found is None:
                raise PlanError("config: chunked_attention layers, but attention_chunk_size is missing")
        if found is None:
            raise UnknownArchitectureError(
                f"config: layers of type {shown(name)} are unknown; what they cache per token has to be known"
            )
        return (found,)


def mix_of(facts: Facts) -> Mix:
    """The parts that this model's attention layers are made of."""
    full = base_attention(facts)
    window, chunk = window_of(facts), facts.optional("attention_chunk_size", least=1)
    sliding = replace(full, reach=Reach.SLIDING, window=window) if window else None
    chunked = replace(full, reach=Reach.CHUNKED, window=chunk) if chunk else None
    special = _SPECIAL.get(facts.model_type.split("_flash")[0])
    return Mix(full, sliding, chunked) if special is None else special(facts, Mix(full, sliding, chunked))


def _gemma4(facts: Facts, mix: Mix) -> Mix:
    """Full layers have their own heads (``global_head_dim``, ``num_global_key_value_heads``)."""
    dim = facts.optional("global_head_dim", least=1) or 512
    heads = facts.optional("num_global_key_value_heads", least=1) or mix.full.kv_heads
    return replace(mix, full=replace(mix.full, kv_heads=heads, key_dim=dim, value_dim=dim))


def _mimo(facts: Facts, mix: Mix) -> Mix:
    if mix.sliding is None:
        return mix
    sliding = replace(
        mix.sliding,
        kv_heads=facts.optional("swa_num_key_value_heads", least=1) or mix.full.kv_heads,
        key_dim=facts.optional("swa_head_dim", least=1) or mix.full.key_dim,
        value_dim=facts.optional("swa_v_head_dim", least=1) or mix.full.value_dim,
    )
    return replace(mix, sliding=sliding)


def _step(facts: Facts, mix: Mix) -> Mix:
    """``attention_other_setting`` gives the sliding layers their own head counts."""
    other = facts.section("attention_other_setting")
    if other is None or mix.sliding is None:
        raise PlanError("config: attention_other_setting and sliding_window are wanted for this model type")
    heads = other.integer("num_attention_groups")
    dim = other.optional("head_dim", least=1) or mix.full.key_dim
    return replace(mix, sliding=replace(mix.sliding, kv_heads=heads, key_dim=dim, value_dim=dim))


def _cohere2(facts: Facts, mix: Mix) -> Mix:  # noqa: ARG001 - one signature for the table
    """A Cohere layer sees window + 1 positions (vLLM ``models/commandr.py``)."""
    return (
        mix
        if mix.sliding is None
        else replace(mix, sliding=replace(mix.sliding, window=mix.sliding.window + 1))
    )


_SPECIAL: Mapping[str, Callable[[Facts, Mix], Mix]] = MappingProxyType(
    {
        "gemma4": _gemma4, "gemma4_unified": _gemma4, "mimo_v2": _mimo, "step3p5": _step, "step3p7": _step,
        "cohere2": _cohere2,
    }
)  # fmt: skip

# model_type: every n-th layer is full, the others slide (defaults of the configuration classes).
_PERIODS: Mapping[str, int] = MappingProxyType(
    {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "gemma3n": 5, "gemma4": 6, "gemma4_unified": 6, "cohere2": 4,
    "olmo3": 4,
     "exaone4": 4, "afmoe": 4}
)  # fmt: skip


def attention_layers(facts: Facts) -> tuple[Layer, ...]:
    """One layer per index, for models of attention only. Raises PlanError, UnknownArchitectureError."""
    layers = layer_count(facts)
    mix = mix_of(facts)
    shared = facts.optional("num_kv_shared_layers", least=0) or 0
    if shared >= layers and shared:
        raise PlanError(f"config: num_kv_shared_layers {shared} leaves no layer with KV of its own")
    own = _own_kv(facts, layers)
    names = own or _names(facts, layers, mix)
    parts = [mix.part(name) for name in names]
    if shared and own is None:
        parts[layers - shared :] = [()] * shared
    return tuple(parts)


def _own_kv(facts: Facts, layers: int) -> tuple[str, ...] | None:
    """``layer_types_counts_with_own_kv`` of a facts file: shared layers are already left out."""
    counts = facts.section("layer_types_counts_with_own_kv")
    if counts is None:
        return None
    return layer_names(Facts({"layer_types_counts": dict(counts.values)}), layers)


def _names(facts: Facts, layers: int, mix: Mix) -> tuple[str, ...]:
    for source in (layer_names(facts, layers), _pattern_list(facts, layers), _llama4(facts, layers)):
        if source is not None:
            return source
    period = _period(facts)
    if period and mix.sliding is not None:
        names = ["sliding" if (index + 1) % period else "full" for index in range(layers)]
        if facts.model_type.startswith("gemma4"):
            names[-1] = "full"
        return tuple(names)
    if facts.model_type in _PERIODS:
        raise PlanError(
            "config: sliding_window is missing, and this model type mixes sliding and full layers"
        )
    if facts.model_type.startswith("qwen") and mix.sliding is not None:
        first = facts.integer("max_window_layers", least=0)
        return tuple("sliding" if index >= first else "full" for index in range(layers))
    return ("sliding" if mix.sliding is not None else "full",) * layers


def _period(facts: Facts) -> int | None:
    """Every how many layers a full one comes; None where the config's family has no such pattern."""
    pattern = facts.values.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return len(pattern) or None
    if pattern is not None:
        return whole("sliding_window_pattern", pattern, 0) or None
    return _PERIODS.get(facts.model_type)


def _pattern_list(facts: Facts, layers: int) -> tuple[str, ...] | None:
    """Lists with 1 for a sliding layer (MiMo-V2, Gemma-3)."""
    for key in ("hybrid_layer_pattern", "sliding_window_indices"):
        listed = facts.integers(key)
        if listed is not None:
            if len(listed) != layers:
                raise PlanError(f"config: {key} has {len(listed)} entries for {layers} layers")
            return tuple("sliding" if each else "full" for each in listed)
    return None


def _llama4(facts: Facts, layers: int) -> tuple[str, ...] | None:
    """Layers without rope see everything, the others their chunk (``no_rope_layers``: 0 = no rope)."""
    if facts.model_type != "llama4":
        return None
    listed = facts.integers("no_rope_layers")
    if listed:
        if len(listed) != layers:
            raise PlanError(f"config: no_rope_layers has {len(listed)} entries for {layers} layers")
        return tuple("chunked_attention" if each else "full" for each in listed)
    every = facts.optional("no_rope_layer_interval", least=1) or 4
    return tuple("chunked_attention" if (index + 1) % every else "full" for index in range(layers))
