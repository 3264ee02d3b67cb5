"""Each figure of a plan with its formula, the numbers in it, and where the formula was read."""

from dataclasses import dataclass
from itertools import groupby

from kvctl.plan.accounting import VllmAccounting
from kvctl.plan.groups import Group
from kvctl.plan.pages import Kind, request_blocks
from kvctl.plan.planner import Plan

_INTERFACE = "vLLM v1/kv_cache_interface.py"
_UTILS = "vLLM v1/core/kv_cache_utils.py"


@dataclass(frozen=True, slots=True)
class Formula:
    """One figure: ``formula`` with numbers filled in, ``value`` as printed."""

    name: str
    formula: str
    value: str
    source: str


def formulas(plan: Plan) -> list[Formula]:
    """The figures in the order in which they follow from each other."""
    accounting = plan.accounting
    found = [
        Formula(term.name, term.source, f"{term.gib.likely:.2f} GiB", "memory") for term in plan.memory.terms
    ]
    found.append(
        Formula("memory for KV", plan.memory.source, f"{plan.memory.available.likely:.2f} GiB", "per rank"),
    )
    if isinstance(accounting, VllmAccounting):
        return [*found, *_vllm(plan, accounting)]
    per_token = accounting.bytes_per_token
    found.append(
        Formula(
            "bytes per token", "sum over layers of heads x dims x bytes", f"{per_token:,}", "engine's log"
        )
    )
    found.append(
        Formula(
            "tokens",
            f"memory // {accounting.bytes_per_block:,} x {accounting.block}",
            f"{plan.pool.kv_tokens:,}",
            "",
        )
    )
    return found


def _vllm(plan: Plan, accounting: VllmAccounting) -> list[Formula]:
    setup, pool, layout = plan.setup, plan.pool, accounting.layout
    found = [
        _group(number, list(same)) for number, same in groupby(layout.grouping.groups, key=lambda g: g.page)
    ]
    found.append(
        Formula("bytes per block", "largest group's layers x page", f"{accounting.bytes_per_block:,}",
                f"{_UTILS} _get_kv_cache_bytes_per_block"),
    )  # fmt: skip
    found.append(
        Formula("blocks", f"memory // {accounting.bytes_per_block:,}", f"{pool.num_blocks:,}",
                f"{_UTILS} get_kv_cache_config_from_groups"),
    )  # fmt: skip
    length = setup.max_model_len
    each = " + ".join(str(request_blocks(group.page, length, setup)) for group in layout.grouping.groups)
    found.append(
        Formula(f"blocks of a request of {length:,}", each, f"{accounting.blocks_for(length):,}",
                f"{_INTERFACE} max_memory_usage_bytes"),
    )  # fmt: skip
    found.append(
        Formula("concurrency", f"{pool.num_blocks:,} / {accounting.blocks_for(length):,}",
        f"{pool.max_concurrency:.2f}",
                f"{_UTILS} get_max_concurrency_for_kv_cache_config"),
    )  # fmt: skip
    logged = "concurrency x max_model_len" if setup.concurrency_tokens else (
        f"{pool.num_blocks:,} // {layout.groups} groups x {layout.least_block} tokens x dcp {setup.flags.dcp}"
    )  # fmt: skip
    found.append(Formula("tokens in the log", logged, f"{pool.kv_tokens_logged:,}", f"{_UTILS}, by version"))
    return found


def _group(page: object, same: list[Group]) -> Formula:  # noqa: ARG001 - groupby's key
    first = same[0]
    what = f"{len(same)} x {len(first.members)} {first.page.kind} layers"
    if first.page.kind is Kind.STATE:
        return Formula(what, "convolution columns + matrix, padded to the attention page",
        f"{first.page.page:,} bytes",
                       "vLLM mamba_utils.py MambaStateShapeCalculator")  # fmt: skip
    formula = f"{first.page.block} tokens x {float(first.page.token_bytes):g} bytes"
    return Formula(what, formula, f"{first.page.page:,} bytes a page", f"{_INTERFACE} page_size_bytes")
