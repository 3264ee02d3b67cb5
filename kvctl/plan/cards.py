"""GPUs by name: the memory that the driver reports, which is less than the label.

Figures in GiB. Those marked seen were read in engines' start-up logs; the others are the label less the share
that the driver keeps on cards of the same kind.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvctl.plan.errors import PlanError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Card:
    """A card: ``total_gib`` as the driver says, ``seen`` whether that figure was read on a real one."""

    name: str
    total_gib: float
    seen: bool


_TABLE: Mapping[str, tuple[str, float, bool]] = MappingProxyType(
    {
        # normalised name: (name, GiB, seen)
        "t4": ("T4", 14.58, False), "v100": ("V100 32GB", 31.73, False), "a10": ("A10", 22.03, False),
        "a10g": ("A10G", 22.03, False), "l4": ("L4", 22.03, False), "a30": ("A30", 23.5, False),
        "rtx3090": ("RTX 3090", 23.56, True), "3090": ("RTX 3090", 23.56, True),
        "rtx4090": ("RTX 4090", 23.55, True), "4090": ("RTX 4090", 23.55, True),
        "rtx5090": ("RTX 5090", 31.36, False), "5090": ("RTX 5090", 31.36, False),
        "rtx5080": ("RTX 5080", 15.47, False), "rtx5070ti": ("RTX 5070 Ti", 15.47, False),
        "rtxa5000": ("RTX A5000", 23.55, False), "a5000": ("RTX A5000", 23.55, False),
        "rtxa6000": ("RTX A6000", 47.41, False), "a6000": ("RTX A6000", 47.41, False),
        "rtx6000ada": ("RTX 6000 Ada", 47.38, False), "a40": ("A40", 44.42, False), "l40": ("L40", 44.42,
        False),
        "l40s": ("L40S", 44.42, True), "a100": ("A100-80GB", 79.15, True), "a10080gb": ("A100-80GB", 79.15,
        True),
        "a10040gb": ("A100-40GB", 39.39, False), "h100": ("H100", 79.18, True), "h10080gb": ("H100", 79.18,
        True),
        "h10080gbhbm3": ("H100", 79.18, True), "h100nvl": ("H100 NVL", 93.1, False), "h800": ("H800", 79.18,
        False),
        "h20": ("H20", 95.0, False), "gh200": ("GH200", 94.5, False), "h200": ("H200", 139.81, True),
        "b200": ("B200", 178.4, False), "b300": ("B300", 267.7, False), "gb200": ("GB200", 184.3, False),
        "rtxpro6000": ("RTX PRO 6000", 94.97, True), "gb10": ("GB10 (DGX Spark)", 119.7, False),
        "dgxspark": ("GB10 (DGX Spark)", 119.7, False), "gx10": ("GB10", 119.7, False),
        "mi300x": ("MI300X", 191.98, False), "mi325x": ("MI325X", 255.9, False),
        "arcprob70": ("Arc Pro B70", 31.0, False),
    }
)  # fmt: skip
# Labels in GB: the driver's total of the commonest card of that size.
_LABELS: Mapping[int, float] = MappingProxyType(
    {16: 15.99, 24: 23.55, 32: 31.36, 40: 39.39, 48: 44.42, 80: 79.15, 96: 94.97, 141: 139.81}
)
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(gib|gb|g)?$", re.IGNORECASE)
_IN_BRACKETS = re.compile(r"(\d+(?:\.\d+)?)\s*gib", re.IGNORECASE)
_NOISE = re.compile(r"\(.*?\)|nvidia|geforce|-class|class")
_LABEL = re.compile(r"(\d+)\s*gb")
MAX_GIB = 4096.0


def card_of(text: str) -> Card:
    """The card of ``--gpu``: a name from the table, or a size.

    ``24GiB`` and ``24`` are taken as they stand, ``24GB`` is a label: the driver's total of such a card. A
    name with a total in it (``H100 (79.18 GiB)``) counts with that total. Raises PlanError for others.
    """
    name = text.strip()
    sized = _SIZE.match(name)
    if sized is not None and (sized[2] or "").lower() == "gb":
        return _labelled(name, float(sized[1]))
    if sized is not None:
        return Card(name, _checked(float(sized[1])), seen=True)
    inner = _IN_BRACKETS.search(name)
    if inner is not None:
        return Card(name, _checked(float(inner[1])), seen=True)
    return _named(name)


def _named(text: str) -> Card:
    plain = _NOISE.sub("", text.lower())
    for candidate in (plain, _LABEL.sub("", plain)):
        key = re.sub(r"[^a-z0-9]", "", candidate)
        found = _TABLE.get(key) or _longest(key)
        if found is not None:
            return Card(*found)
    label = _LABEL.search(plain)
    if label is not None:
        return _labelled(text, float(label[1]))
    known = ", ".join(sorted({each[0] for each in _TABLE.values()}))
    raise PlanError(f"--gpu {text!r} is unknown: give a size such as 24GiB, or one of {known}")


def _labelled(text: str, gigabytes: float) -> Card:
    """A card known by its label only; sizes that are not in the table lose 2 %."""
    total = _LABELS.get(int(gigabytes))
    return Card(text, _checked(gigabytes * 0.98 if total is None else total), seen=total is not None)


def _longest(name: str) -> tuple[str, float, bool] | None:
    """The longest table name that the text begins with: ``h200141gb`` is an H200."""
    fitting = [key for key in _TABLE if not key.isdigit() and len(key) > 2 and name.startswith(key)]
    return _TABLE[max(fitting, key=len)] if fitting else None


def _checked(gib: float) -> float:
    if not 0 < gib <= MAX_GIB:
        raise PlanError(f"--gpu: {gib:g} GiB is no card's memory")
    return gib
