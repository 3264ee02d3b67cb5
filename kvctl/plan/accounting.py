"""Each engine's way from memory to tokens, behind one interface.

``VllmAccounting``: blocks and groups. ``SglangAccounting``: pools of single tokens. ``TgiAccounting``: TGI's
warm-up infers the batch's total tokens from the memory that is left; every layer keeps every position.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from kvctl.plan.errors import PlanError
from kvctl.plan.pages import Kind, ceil_div, request_blocks, token_bytes
from kvctl.plan.setup import Engine, Setup
from kvctl.plan.sglang import sglang_pool, sglang_tokens
from kvctl.plan.shapes import Attention, Indexer, Latent, Model, Reach, State
from kvctl.plan.vllm import Layout, Pool, lay_out, longest_fit, pool_of

_SWAP_BYTES = 4 << 30  # the first engine's swap space per GPU, whose blocks its log counts as CPU blocks


class Accounting(Protocol):
    """Memory -> pool. Bytes are per rank; ``block`` in tokens of the smallest block."""

    bytes_per_token: int
    bytes_per_token_beyond: int
    bytes_per_block: int
    block: int

    def pool(self, available: int) -> Pool:
        """The pool in ``available`` bytes."""
        ...

    def blocks_for(self, length: int) -> int:
        """Blocks that one request of ``length`` tokens needs."""
        ...

    def shares(self, length: int) -> Mapping[str, int]:
        """These blocks by use: the largest share is the term that decides."""
        ...

    def details(self, pool: Pool) -> Mapping[str, object]:
        """Figures that only this engine logs."""
        ...


_SHARE_NAMES: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.FULL: "KV of the layers that keep every position", Kind.LATENT: "the latent KV",
        Kind.SLIDING: "windows and in-flight reserve of the sliding layers",
        Kind.CHUNKED: "chunks and in-flight reserve of the chunked layers",
        Kind.CROSS: "the encoder's KV", Kind.STATE: "the recurrent states",
    }
)  # fmt: skip


class VllmAccounting:
    """vLLM, by version."""

    def __init__(self, model: Model, setup: Setup, spec: Model | None) -> None:
        self.layout: Layout = lay_out(model, setup, spec)
        self._setup = setup
        self.bytes_per_token = self.layout.bytes_per_token
        self.bytes_per_token_beyond = self.layout.bytes_per_token_beyond
        self.bytes_per_block = self.layout.bytes_per_block
        self.block = self.layout.least_block

    def pool(self, available: int) -> Pool:
        """See ``kvctl.plan.vllm.pool_of``."""
        return pool_of(self.layout, self._setup, available)

    def blocks_for(self, length: int) -> int:
        """See ``Layout.blocks_for``."""
        return self.layout.blocks_for(length, self._setup)

    def shares(self, length: int) -> Mapping[str, int]:
        """Blocks by kind of layer."""
        found: dict[str, int] = {}
        for group in self.layout.grouping.groups:
            name = _SHARE_NAMES[group.page.kind]
            found[name] = found.get(name, 0) + request_blocks(group.page, length, self._setup)
        return found

    def details(self, pool: Pool) -> Mapping[str, object]:
        """Groups, padding and the attention block, as the start-up log names them."""
        found: dict[str, object] = {
            "groups": self.layout.groups,
            "padding_layers": self.layout.grouping.padding_layers,
            "attention_block": self.layout.attention_block,
            "usable_blocks": max(0, pool.num_blocks - 1),
        }
        if not self._setup.version.since(0, 8):
            found["cpu_blocks"] = _SWAP_BYTES // self.bytes_per_block
        return found


class SglangAccounting:
    """SGLang: full pool, sliding pool, state slots."""

    def __init__(self, model: Model, setup: Setup, spec: Model | None) -> None:
        if spec is not None or setup.flags.spec_method:
            raise PlanError("--engine sglang: speculative layers are not known; leave --spec-method out")
        self._model, self._setup = model, setup
        one = sglang_pool(model, setup, 1)
        self.bytes_per_token = one.bytes_per_token + one.swa_bytes_per_token
        self.bytes_per_token_beyond = one.bytes_per_token
        self.bytes_per_block = self.bytes_per_token
        self.block = 1

    def pool(self, available: int) -> Pool:
        """Concurrency is limited by the full pool, the sliding pool and the state slots."""
        blocks = self._setup.flags.num_gpu_blocks
        tokens = sglang_tokens(self._model, self._setup, available) if blocks is None else blocks
        length = self._setup.max_model_len
        found = sglang_pool(self._model, self._setup, tokens)
        limits = [tokens / length]
        window = max((p.window for p in self._parts() if p.reach is Reach.SLIDING), default=0)
        if found.swa_tokens:
            limits.append(found.swa_tokens / min(length, window))
        if found.state_slots:
            limits.append(float(found.state_slots))
        return Pool(tokens, tokens, tokens, min(limits), tokens)

    def _parts(self) -> list[Attention]:
        return [part for layer in self._model.layers for part in layer if isinstance(part, Attention)]

    def blocks_for(self, length: int) -> int:
        """Tokens."""
        return length

    def shares(self, length: int) -> Mapping[str, int]:
        """One pool decides."""
        return {"the full pool's tokens": length}

    def details(self, pool: Pool) -> Mapping[str, object]:
        """The sizes that SGLang logs, in GiB (it writes GB)."""
        found = sglang_pool(self._model, self._setup, pool.num_blocks)
        return {
            "k_gib": round(found.k_gib, 2), "v_gib": round(found.v_gib, 2), "swa_tokens": found.swa_tokens,
            "swa_k_gib": round(found.swa_k_gib, 2), "swa_v_gib": round(found.swa_v_gib, 2),
            "state_slots": found.state_slots, "state_gib": round(found.state_gib, 2),
        }  # fmt: skip


class TgiAccounting:
    """TGI: one pool, every layer keeps every position. States are not served by it."""

    def __init__(self, model: Model, setup: Setup, spec: Model | None) -> None:  # noqa: ARG002 - one signature
        parts = [part for layer in model.layers for part in layer]
        if any(isinstance(part, State) for part in parts):
            raise PlanError("--engine tgi: recurrent layers have no paged cache there")
        kept = [part for part in parts if isinstance(part, Attention | Latent | Indexer)]
        self.bytes_per_token = self.bytes_per_token_beyond = int(
            sum(token_bytes(part, setup) for part in kept)
        )
        self.block = setup.flags.block_size or 1
        self.bytes_per_block = self.block * self.bytes_per_token
        self._setup = setup

    def pool(self, available: int) -> Pool:
        """The inferred max batch total tokens: blocks times their size."""
        blocks = self._setup.flags.num_gpu_blocks
        blocks = available // self.bytes_per_block if blocks is None else blocks
        tokens = blocks * self.block
        return Pool(blocks, tokens, tokens, tokens / self._setup.max_model_len, tokens)

    def blocks_for(self, length: int) -> int:
        """Whole blocks."""
        return ceil_div(length, self.block)

    def shares(self, length: int) -> Mapping[str, int]:
        """One pool decides."""
        return {"the pool's tokens": self.blocks_for(length)}

    def details(self, pool: Pool) -> Mapping[str, object]:
        """The line of the warm-up."""
        return {"inferred_max_batch_total_tokens": pool.kv_tokens}


_ENGINES: Mapping[Engine, type[VllmAccounting | SglangAccounting | TgiAccounting]] = MappingProxyType(
    {"vllm": VllmAccounting, "sglang": SglangAccounting, "tgi": TgiAccounting}
)


def accounting_of(model: Model, setup: Setup, spec: Model | None = None) -> Accounting:
    """The accounting of the engine that the flags name."""
    return _ENGINES[setup.flags.engine](model, setup, spec)


__all__ = ["Accounting", "accounting_of", "longest_fit"]
