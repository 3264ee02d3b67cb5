"""vLLM's pool: from memory for KV to blocks, tokens and concurrency, and to the line the engine logs.

Source: vLLM ``v1/core/kv_cache_utils.py`` (``get_kv_cache_config_from_groups``, ``get_kv_cache_capacity``,
``_estimate_max_model_len_from_groups``), ``distributed/utils.py`` (``get_pp_indices``); before 0.20.1 the
token line was ``blocks // groups * block size``, since then it is ``concurrency x max_model_len``.
"""

from dataclasses import dataclass, replace

from kvctl.plan.errors import PlanError
from kvctl.plan.groups import Grouping, Placed, group_layers
from kvctl.plan.pages import FULL_KINDS, inflated_block, pages_of, request_blocks, token_bytes
from kvctl.plan.setup import Setup
from kvctl.plan.shapes import Attention, Layer, Model, Reach, State

_NO_LAYERS = ("ngram", "suffix", "medusa", "mlp_speculator")
_CHECKS_ONE_STAGE = (0, 16)  # before, one stage's memory was compared with the need of all stages
_SEARCH_TOP = 1 << 27  # tokens; longer contexts are not looked for


@dataclass(frozen=True, slots=True)
class Layout:
    """How the model's layers lie in the pool on one rank, whatever the pool's size.

    ``bytes_per_block`` is that of the pipeline stage with the largest, ``bytes_of_all_stages`` the sum over
    them; ``bytes_per_token`` counts every attention layer, ``bytes_per_token_beyond`` only those that keep
    all positions (the cost of one more token in a long context). All per rank.
    """

    grouping: Grouping
    stages: int
    attention_block: int
    bytes_per_block: int
    bytes_of_all_stages: int
    bytes_per_token: int
    bytes_per_token_beyond: int

    @property
    def groups(self) -> int:
        """Number of block tables that a request draws blocks for."""
        return len(self.grouping.groups)

    @property
    def least_block(self) -> int:
        """Tokens of the smallest block among the groups."""
        return min(group.page.block for group in self.grouping.groups)

    @property
    def plain(self) -> bool:
        """Whether a token costs the same wherever it stands: one group, all positions kept."""
        return self.groups == 1 and self.grouping.groups[0].page.kind in FULL_KINDS

    def blocks_for(self, length: int, setup: Setup) -> int:
        """Blocks of the pool that one request of ``length`` tokens needs, over all groups."""
        return sum(request_blocks(group.page, length, setup) for group in self.grouping.groups)


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of ``num_blocks`` on each rank.

    ``kv_tokens``: context it holds at max_model_len; ``kv_tokens_logged``: what the engine's start-up line
    says; ``max_concurrency``: requests of max_model_len; ``max_model_len_fits``: the longest single request.
    """

    num_blocks: int
    kv_tokens: int
    kv_tokens_logged: int
    max_concurrency: float
    max_model_len_fits: int


def lay_out(model: Model, setup: Setup, spec: Model | None = None) -> Layout:
    """The layout with speculative layers. ``spec``: the draft model, where it has a config."""
    layers = [*model.layers, *draft_layers(model, setup, spec)]
    block = inflated_block(model, setup)
    states = any(isinstance(part, State) for layer in layers for part in layer)
    padded = int(block * token_bytes(model.attention, setup)) if states and model.attention is not None else 0
    bounds = _stages(len(model.layers), setup.flags.pp)
    placed = [
        Placed(_stage_of(index, bounds), pages_of(part, setup, block, padded))
        for index, layer in enumerate(layers)
        for part in layer
    ]
    grouping = group_layers(placed)
    stages = range(setup.flags.pp)
    per_token = [sum(each.page.token_bytes for each in placed if each.stage == stage) for stage in stages]
    beyond = [
        sum(e.page.token_bytes for e in placed if e.stage == stage and e.page.kind in FULL_KINDS)
        for stage in stages
    ]
    return Layout(
        grouping=grouping,
        stages=setup.flags.pp,
        attention_block=block,
        bytes_per_block=max(grouping.bytes_per_block(stage) for stage in stages),
        bytes_of_all_stages=sum(grouping.bytes_per_block(stage) for stage in stages),
        bytes_per_token=int(max(per_token)),
        bytes_per_token_beyond=int(max(beyond)),
    )


def draft_layers(model: Model, setup: Setup, spec: Model | None) -> tuple[Layer, ...]:
    """Attention layers that speculation adds.

    EAGLE: one of the model's own shape; MTP: the model's; a draft model or DFlash: those of its config.
    Raises PlanError where a config is wanted and missing.
    """
    method = (setup.flags.spec_method or "").lower()
    if not method and setup.flags.num_spec and model.drafts:
        method = "mtp"  # the model's own head is the only drafter that needs no name
    if not method or method in _NO_LAYERS:
        return ()
    if method.endswith("mtp"):
        if setup.flags.num_spec < 1:
            raise PlanError("--spec-method mtp wants --num-spec")
        return model.drafts
    if spec is not None:
        return tuple(_tagged(layer) for layer in spec.layers) if method == "dflash" else spec.layers
    if method in ("eagle", "eagle3") and isinstance(model.attention, Attention):
        return ((replace(model.attention, reach=Reach.FULL),),)
    if method in ("eagle", "eagle3") and model.attention is not None:
        return ((model.attention,),)
    raise PlanError(f"--spec-method {method} wants the draft's config: --spec-config FILE")


def _tagged(layer: Layer) -> Layer:
    """A DFlash drafter's layers attend both ways, so they never join the model's groups."""
    return tuple(replace(part, tag="dflash") if isinstance(part, Attention) else part for part in layer)


def _stages(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage: equal shares, the remainder to the last but one, the one before, ..."""
    if pp > layers:
        raise PlanError(f"--pp {pp} is more than the model's {layers} layers")
    shares = [layers // pp] * pp
    for index in range(2, layers % pp + 2):
        shares[-index] += 1
    return tuple(shares)


def _stage_of(index: int, shares: tuple[int, ...]) -> int:
    """The stage of a layer; drafts, which come after the last layer, are on the last stage."""
    end = 0
    for stage, share in enumerate(shares):
        end += share
        if index < end:
            return stage
    return len(shares) - 1


def pool_of(layout: Layout, setup: Setup, available: int) -> Pool:
    """The pool in ``available`` bytes for KV on each rank (the scarcest stage counts)."""
    if setup.flags.num_gpu_blocks is not None:
        return pool_of_blocks(layout, setup, setup.flags.num_gpu_blocks)
    found = pool_of_blocks(layout, setup, max(0, available) // layout.bytes_per_block)
    if layout.stages == 1 or setup.version.since(*_CHECKS_ONE_STAGE):
        return found
    checked = longest_fit(layout, setup, max(0, available) // layout.bytes_of_all_stages)
    return replace(found, max_model_len_fits=checked)


def pool_of_blocks(layout: Layout, setup: Setup, num_blocks: int) -> Pool:
    """The pool of a number of blocks per rank."""
    length, dcp = setup.max_model_len, setup.flags.dcp
    plain_tokens = num_blocks // layout.groups * layout.least_block * dcp
    if setup.version.since(0, 9, 2):
        concurrency = num_blocks / max(1, layout.blocks_for(length, setup))
    else:
        concurrency = plain_tokens / length
    held = num_blocks * layout.least_block * dcp if layout.plain else int(concurrency * length)
    return Pool(
        num_blocks=num_blocks,
        kv_tokens=held,
        kv_tokens_logged=int(concurrency * length) if setup.concurrency_tokens else plain_tokens,
        max_concurrency=concurrency,
        max_model_len_fits=longest_fit(layout, setup, num_blocks - setup.reserved_blocks),
    )


def longest_fit(layout: Layout, setup: Setup, blocks: int) -> int:
    """The largest context of one request that ``blocks`` hold, 0 if not even one token; by binary search."""
    if layout.blocks_for(1, setup) > blocks:
        return 0
    low, high = 1, _SEARCH_TOP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layout.blocks_for(middle, setup) <= blocks else (low, middle - 1)
    return low
