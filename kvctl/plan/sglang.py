"""SGLang's pools, as it logs them: tokens, the size of K and of V, and the split of sliding-window models.

``tokens x layers x kv_heads / tp x head_dim x bytes`` is the K size, in GB of 2**30 bytes. Models with
sliding-window layers have two pools: of ``full`` tokens, and of ``swa_full_tokens_ratio x full`` (default
0.8). Recurrent models have a pool of states beside: slots + 1, each of one state per layer. fp4 K sizes
leave the scales out. There is no per-request block reserve: a request costs its tokens.
"""

from dataclasses import dataclass
from fractions import Fraction

from kvctl.plan.dtypes import KvKind
from kvctl.plan.pages import state_bytes, token_bytes
from kvctl.plan.setup import Setup
from kvctl.plan.shapes import Attention, Model, Reach, State


@dataclass(frozen=True, slots=True)
class SglangPool:
    """What SGLang would log of one rank. Sizes in GiB (its log says GB); 0 where there is no such pool."""

    tokens: int
    k_gib: float
    v_gib: float
    swa_tokens: int
    swa_k_gib: float
    swa_v_gib: float
    state_slots: int
    state_gib: float
    bytes_per_token: int
    swa_bytes_per_token: int


def sglang_tokens(model: Model, setup: Setup, available: int) -> int:
    """Tokens of the full pool in ``available`` bytes, after the states and with the sliding share."""
    full, swa = _per_token(model, setup)
    left = available - _state_bytes(model, setup) * _slots(setup, model)
    cost = full + swa * Fraction(setup.flags.swa_full_tokens_ratio).limit_denominator(10_000)
    return max(0, int(left / cost)) if cost else 0


def sglang_pool(model: Model, setup: Setup, tokens: int) -> SglangPool:
    """The pools of a full pool of ``tokens`` (what ``--max-total-tokens`` or the log says)."""
    full, swa = _per_token(model, setup)
    swa_tokens = int(tokens * setup.flags.swa_full_tokens_ratio) if swa else 0
    k_full, v_full = _sizes(model, setup, tokens, sliding=False)
    k_swa, v_swa = _sizes(model, setup, swa_tokens, sliding=True)
    slots = _slots(setup, model)
    return SglangPool(
        tokens, k_full, v_full, swa_tokens, k_swa, v_swa, max(0, slots - 1), slots * _state_bytes(model,
        setup) / 2**30,
        int(full), int(swa),
    )  # fmt: skip


def _attentions(model: Model, *, sliding: bool) -> list[Attention]:
    parts = [part for layer in model.layers for part in layer if isinstance(part, Attention)]
    return [part for part in parts if (part.reach is Reach.SLIDING) is sliding]


def _per_token(model: Model, setup: Setup) -> tuple[Fraction, Fraction]:
    """Bytes of a token in the full pool and in the sliding one."""
    others = [part for layer in model.layers for part in layer if not isinstance(part, Attention | State)]
    full = sum((token_bytes(part, setup) for part in others), Fraction(0))
    full += sum((token_bytes(part, setup) for part in _attentions(model, sliding=False)), Fraction(0))
    swa = sum((token_bytes(part, setup) for part in _attentions(model, sliding=True)), Fraction(0))
    return (full, swa) if full else (swa, Fraction(0))


def _sizes(model: Model, setup: Setup, tokens: int, *, sliding: bool) -> tuple[float, float]:
    """GiB of K and of V; scales of fp4 are not counted, as SGLang does not log them."""
    element = {KvKind.PLAIN: Fraction(setup.kv.plain_bytes), KvKind.NVFP4: Fraction(1, 2)}.get(
        setup.kv.kind, Fraction(1)
    )
    parts = _attentions(model, sliding=sliding)
    heads = [max(1, part.kv_heads // setup.flags.tp) for part in parts]
    k = sum(each * part.key_dim for each, part in zip(heads, parts, strict=True))
    v = sum(each * part.value_dim for each, part in zip(heads, parts, strict=True))
    return float(tokens * k * element / 2**30), float(tokens * v * element / 2**30)


def _state_bytes(model: Model, setup: Setup) -> int:
    return sum(
        state_bytes(part, setup) for layer in model.layers for part in layer if isinstance(part, State)
    )


def _slots(setup: Setup, model: Model) -> int:
    """Slots of the state pool, one more than asked for."""
    if not any(isinstance(part, State) for layer in model.layers for part in layer):
        return 0
    return (setup.flags.mamba_slots or setup.seqs) + 1
