"""Layers that share a block table: page unification and groups.

Source: vLLM ``v1/core/kv_cache_utils.py``: ``get_kv_cache_groups``, ``unify_kv_cache_spec_page_size``,
``_get_kv_cache_groups_uniform_page_size``.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvctl.plan.errors import PlanError
from kvctl.plan.pages import FULL_KINDS, Kind, Page, ceil_div


@dataclass(frozen=True, slots=True)
class Placed:
    """A layer's page and the pipeline stage that holds it."""

    stage: int
    page: Page


@dataclass(frozen=True, slots=True)
class Group:
    """Layers behind one block table. A block of the pool is one page of each of them.

    ``padding``: layers by which the group is filled up to the others' size.
    """

    members: tuple[Placed, ...]

    @property
    def page(self) -> Page:
        """A representative page: all members need the same number of blocks."""
        return self.members[0].page

    def bytes_on(self, stage: int) -> int:
        """Bytes of one block on that pipeline stage."""
        return sum(member.page.page for member in self.members if member.stage == stage)


@dataclass(frozen=True, slots=True)
class Grouping:
    """All groups of a model. ``padding_layers``: layers' worth of pool that exist only to fill groups up."""

    groups: tuple[Group, ...]
    padding_layers: int = 0

    def bytes_per_block(self, stage: int) -> int:
        """Bytes of one block on that stage: the largest group's."""
        return max(group.bytes_on(stage) for group in self.groups)


def group_layers(placed: Sequence[Placed]) -> Grouping:
    """The groups of the layers, in the engine's order. Raises PlanError where the pages cannot be unified."""
    pages = [each.page for each in placed]
    if _alike(pages):
        return Grouping((Group(tuple(placed)),))
    unified = _unify(placed)
    buckets: dict[object, list[Placed]] = defaultdict(list)
    for each in unified:
        page = each.page
        buckets[(page.kind, page.block, page.page, page.window, page.shape, page.extra_blocks)].append(each)
    size = _group_size([len(bucket) for bucket in buckets.values()])
    groups: list[Group] = []
    padding = 0
    for bucket in buckets.values():
        number = ceil_div(len(bucket), size)
        padding += number * size - len(bucket)
        groups.extend(Group(tuple(bucket[index::number])) for index in range(number))
    return Grouping(tuple(groups), padding)


def _alike(pages: Sequence[Page]) -> bool:
    """Whether all layers need the same token slots, so that one table serves them and their bytes add up."""
    first = pages[0]
    if len({page.block for page in pages}) > 1:
        return False
    if all(page.kind in FULL_KINDS for page in pages):
        return True
    same_kind = all(page.kind is first.kind and page.window == first.window for page in pages)
    return same_kind and (first.kind is not Kind.STATE or len({page.page for page in pages}) == 1)


def _group_size(counts: Sequence[int]) -> int:
    """The smallest bucket's layers; the largest's where it is less than 1.5 times as many."""
    return max(counts) if max(counts) < min(counts) * 1.5 else min(counts)


def _unify(placed: Sequence[Placed]) -> list[Placed]:
    """Every page as large as the largest: by more tokens a block where that divides, else by padding."""
    largest = max(each.page.page for each in placed)
    return [replace(each, page=_grown(each.page, largest)) for each in placed]


def _grown(page: Page, largest: int) -> Page:
    if page.page == largest:
        return page
    if page.kind is Kind.STATE:
        return replace(page, page=largest)
    if largest % page.page == 0:
        return replace(page, block=page.block * (largest // page.page), page=largest)
    if page.kind is Kind.LATENT:
        raise PlanError(
            f"the pages of this model cannot be unified: {page.page} bytes do not divide {largest}"
        )
    return replace(page, page=largest)
