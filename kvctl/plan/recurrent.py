"""Recurrent layers from a config: Mamba1, Mamba2, gated delta nets, short convolutions, and where they stand.

Source of the shapes: vLLM ``model_executor/layers/mamba/mamba_utils.py`` (``MambaStateShapeCalculator``); of
the element types: ``MambaStateDtypeCalculator`` and the per-model overrides in
``model_executor/models/config.py``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvctl.plan.attention import EMPTY_NAMES, HIDDEN, Mix, layer_count, mix_of
from kvctl.plan.dtypes import element_bytes
from kvctl.plan.errors import PlanError, UnknownArchitectureError
from kvctl.plan.facts import Facts, layer_names, shown, whole
from kvctl.plan.shapes import Layer, State

MAMBA_NAMES = frozenset({"mamba", "mamba2", "mamba1", "m"})
LINEAR_NAMES = frozenset({"linear_attention", "gated_delta_net"})
CONV_NAMES = frozenset({"conv", "short_conv"})
_BAMBA = (
    "bamba",
    "granitemoehybrid",
    "falcon_h1",
)  # classes whose defaults a saved config omits: 128 heads, state 256


def cell_bytes(facts: Facts) -> int | None:
    """Bytes of an element of the recurrent state that the config asks for; None = as the model's weights."""
    for key in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        if facts.has(key):
            return element_bytes(facts.text(key))
    return 4 if facts.model_type.startswith(("nemotron_h", "qwen3_5")) else None


def mamba1(facts: Facts) -> State:
    """``inter`` channels of ``kernel - 1`` columns and ``inter x d_state`` elements (Jamba, Falcon-Mamba)."""
    hidden = facts.integer(*HIDDEN)
    inter = facts.optional("intermediate_size", least=1) if facts.has("state_size") else None
    if inter is None:
        inter = _factor(facts, "mamba_expand", "expand") * hidden
    state = facts.optional("mamba_d_state", "state_size", "d_state", least=1) or 16
    kernel = facts.optional("mamba_d_conv", "conv_kernel", "d_conv", least=1) or 4
    return State(channels=inter, kernel=kernel, heads=inter, cells=state, cell_bytes=cell_bytes(facts),
                 speculates=False, family="mamba1")  # fmt: skip


def mamba2(facts: Facts) -> State:
    """``heads x head_dim`` channels and 2 x groups x state more; ``heads x head_dim x state`` elements."""
    heads = facts.optional("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", least=1)
    if heads is None:
        heads = 128 if facts.model_type in _BAMBA else facts.integer("mamba_n_heads", "num_heads")
    inter = _inner(facts, heads)
    if inter % heads:
        raise PlanError(f"config: {inter} Mamba channels do not divide into {heads} heads")
    state = facts.optional("mamba_d_state", "ssm_state_size", "state_size", least=1)
    state = 256 if state is None and facts.model_type in _BAMBA else state
    if state is None:
        raise PlanError("config: mamba_d_state or ssm_state_size is missing")
    groups = facts.optional("mamba_n_groups", "n_groups", "mamba_ngroups", least=1) or 1
    return State(
        channels=inter, kernel=facts.optional("mamba_d_conv", "conv_kernel", least=1) or 4, heads=heads,
        cells=inter // heads * state, groups=groups, group_width=2 * state, cell_bytes=cell_bytes(facts),
        checkpoints=1, family="mamba2",
    )  # fmt: skip


def _inner(facts: Facts, heads: int) -> int:
    """Width of the Mamba2 mixer: given, or heads x head size, or expand x hidden."""
    explicit = facts.optional("mamba_d_ssm", least=1)
    if explicit:
        return explicit
    head_dim = facts.values.get("mamba_d_head")
    if head_dim not in (None, "auto"):
        return heads * whole("mamba_d_head", head_dim, 1)
    head_dim = facts.optional("mamba_head_dim", "mamba_headdim", least=1)
    if head_dim is None and facts.model_type == "mamba2":
        head_dim = facts.optional("head_dim", least=1)
    if head_dim:
        return heads * head_dim
    return _factor(facts, "mamba_expand", "expand") * facts.integer(*HIDDEN)


def _factor(facts: Facts, *keys: str) -> int:
    """The expansion factor, 2 where the config keeps the class's default."""
    return facts.optional(*keys, least=1) or 2


def gated_delta(facts: Facts) -> State:
    """Gated delta net of Qwen3-Next and later: ``v_heads x v_dim x k_dim`` elements."""
    k_heads, v_heads = facts.integer("linear_num_key_heads"), facts.integer("linear_num_value_heads")
    k_dim = facts.optional("linear_key_head_dim", least=1) or 128
    v_dim = facts.optional("linear_value_head_dim", least=1) or 128
    return State(
        channels=2 * k_heads * k_dim + v_heads * v_dim,
        kernel=facts.optional("linear_conv_kernel_dim", least=1) or 4,
        heads=v_heads, cells=v_dim * k_dim, cell_bytes=cell_bytes(facts), family="gdn",
    )  # fmt: skip


def short_conv(facts: Facts) -> State:
    """LFM2's convolution: columns only, no matrix."""
    width = facts.optional("conv_dim", least=1) or facts.integer(*HIDDEN)
    kernel = facts.optional("conv_L_cache", least=2) or 3
    return State(channels=width, kernel=kernel, heads=0, cells=0, family="conv")


def _from_names(
    facts: Facts, names: tuple[str, ...], mix: Mix, mamba: Callable[[Facts], State]
) -> tuple[Layer, ...]:
    """Attention by the mix; every other name by its state. Raises UnknownArchitectureError."""
    makers: Mapping[str, Callable[[Facts], State]] = {
        **dict.fromkeys(MAMBA_NAMES, mamba),
        **dict.fromkeys(LINEAR_NAMES, gated_delta),
        **dict.fromkeys(CONV_NAMES, short_conv),
    }
    states = {name: (makers[name](facts),) for name in set(names) if name in makers}
    return tuple(states[name] if name in states else mix.part(name) for name in names)


def nemotron_h(facts: Facts) -> tuple[Layer, ...]:
    """``hybrid_override_pattern``: M = Mamba2, * = attention, - and E = feed-forward."""
    layers = layer_count(facts)
    pattern = facts.text("hybrid_override_pattern")
    names = tuple(pattern) if pattern else layer_names(facts, layers)
    if names is None:
        raise PlanError("config: hybrid_override_pattern or layers_block_type is missing")
    if len(names) != layers:
        raise PlanError(
            f"config: hybrid_override_pattern names {len(names)} layers, num_hidden_layers says {layers}"
        )
    return _from_names(facts, names, mix_of(facts), mamba2)


def qwen_linear(facts: Facts) -> tuple[Layer, ...]:
    """Every ``full_attention_interval``-th layer is attention, the others gated delta nets."""
    layers = layer_count(facts)
    every = facts.optional("full_attention_interval", least=1) or 4
    names = layer_names(facts, layers) or tuple(
        "linear_attention" if (index + 1) % every else "full" for index in range(layers)
    )
    return _from_names(facts, names, mix_of(facts), mamba2)


def jamba(facts: Facts) -> tuple[Layer, ...]:
    """``attn_layer_period`` and ``attn_layer_offset`` place the attention layers, the others are Mamba1."""
    layers = layer_count(facts)
    period = facts.optional("attn_layer_period", least=1) or 8
    offset = facts.optional("attn_layer_offset", least=0)
    offset = 4 if offset is None else offset
    names = layer_names(facts, layers) or tuple(
        "attention" if index % period == offset else "mamba" for index in range(layers)
    )
    return _from_names(facts, names, mix_of(facts), mamba1)


def named_hybrid(facts: Facts) -> tuple[Layer, ...]:
    """Models that list their layers (Granite-4, LFM2), or the attention layers' indices (Bamba)."""
    layers = layer_count(facts)
    names = layer_names(facts, layers)
    for key, other in (("attn_layer_indices", "mamba"), ("full_attn_idxs", "conv")):
        listed = facts.integers(key)
        if names is None and listed is not None:
            names = tuple("attention" if index in listed else other for index in range(layers))
    if names is None:
        raise PlanError("config: layer_types (or attn_layer_indices) is missing: which layers are attention?")
    return _from_names(facts, names, mix_of(facts), mamba2)


def falcon_h1(facts: Facts) -> tuple[Layer, ...]:
    """Attention and Mamba2 side by side in every layer."""
    both: Layer = (mix_of(facts).full, mamba2(facts))
    return (both,) * layer_count(facts)


def zamba2(facts: Facts) -> tuple[Layer, ...]:
    """Mamba2 in every layer; the hybrid ones share weights, not KV: each has an attention of its own."""
    layers = layer_count(facts)
    names = layer_names(facts, layers)
    listed = facts.integers("hybrid_layer_ids")
    if names is None and listed is None:
        raise PlanError("config: layers_block_type or hybrid_layer_ids is missing: which layers are hybrid?")
    hybrid = set(listed or ()) or {index for index, name in enumerate(names or ()) if name in ("hybrid", "g")}
    state, full = mamba2(facts), mix_of(facts).full
    return tuple((full, state) if index in hybrid else (state,) for index in range(layers))


def pure_mamba(facts: Facts) -> tuple[Layer, ...]:
    """No attention at all."""
    one = mamba2(facts) if facts.model_type == "mamba2" or facts.has("n_groups") else mamba1(facts)
    return ((one,),) * layer_count(facts)


RECURRENT: Mapping[str, Callable[[Facts], tuple[Layer, ...]]] = MappingProxyType(
    {
        "nemotron_h": nemotron_h, "nemotron_h_puzzle": nemotron_h, "qwen3_next": qwen_linear,
        "qwen3_5": qwen_linear,
        "qwen3_5_moe": qwen_linear, "jamba": jamba, "granitemoehybrid": named_hybrid, "bamba": named_hybrid,
        "lfm2": named_hybrid, "lfm2_moe": named_hybrid, "olmo_hybrid": named_hybrid, "falcon_h1": falcon_h1,
        "zamba2": zamba2, "mamba": pure_mamba, "mamba2": pure_mamba, "falcon_mamba": pure_mamba,
    }
)  # fmt: skip


def by_names(facts: Facts) -> tuple[Layer, ...] | None:
    """A model of unknown type whose ``layer_types`` name recurrent layers; None where they name none."""
    names = layer_names(facts, layer_count(facts))
    if names is None or not set(names) & (MAMBA_NAMES | LINEAR_NAMES | CONV_NAMES):
        return None
    known = set(names) & (EMPTY_NAMES | MAMBA_NAMES | LINEAR_NAMES | CONV_NAMES)
    if not known:
        raise UnknownArchitectureError(f"config: layers of type {shown(names[0])} are unknown")
    return named_hybrid(facts)
