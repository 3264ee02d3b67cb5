"""Which cards to watch: what the setting ``gpus`` may say, and what it means on this machine.

NVML counts cards in PCI order, CUDA in an order of its own (fastest first, or as CUDA_VISIBLE_DEVICES
says), so an index may name another card than the engine's. UUIDs and PCI ids do not; an index is
resolved once and the card's UUID is kept from then on, since indexes shift when a card is lost.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class CardState(StrEnum):
    """What enumeration found at an index."""

    PRESENT = "present"
    LOST = "lost"  # no handle to be had: it fell off the bus
    DENIED = "denied"  # present, but this process may not open it
    PARTITIONED = (
        "partitioned"  # in MIG mode without a visible instance: the parent's numbers are not the engine's
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card, or one MIG instance, as enumerated. ``handle`` and ``parent`` are NVML's."""

    index: int | None
    uuid: str  # "" where it could not be read
    pci: str = ""  # 00000000:3b:00.0
    name: str = ""
    handle: object = None
    parent: object = None  # the handle of the whole card, for an instance
    parent_uuid: str = ""
    state: CardState = CardState.PRESENT


class SelectorError(ValueError):
    """A selector that is none of the known forms."""


class Kind(StrEnum):
    """The forms of a selector."""

    ALL = "all"
    INDEX = "index"
    UUID = "uuid"
    PCI = "pci"


@dataclass(frozen=True, slots=True)
class Selector:
    """One parsed selector; ``text`` is as compared, not as written."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What selectors chose, each card once and in their order, and the selectors that chose nothing."""

    cards: tuple[Card, ...]
    missing: tuple[str, ...]


_INDEX = re.compile(r"[0-9]+")
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]+", re.IGNORECASE)
_PCI = re.compile(
    r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2}):(?P<device>[0-9a-f]{2})(?:\.(?P<function>[0-7]))?"
)


def parse_selector(text: str) -> Selector:
    """``all``, an NVML index, a full or short GPU UUID, a MIG UUID or a PCI id. Raises SelectorError."""
    text = text.strip()
    if text.lower() == "all":
        return Selector(Kind.ALL, "all")
    if _INDEX.fullmatch(text):
        return Selector(Kind.INDEX, text.lstrip("0") or "0")
    if _UUID.fullmatch(text):
        return Selector(Kind.UUID, text.lower())
    pci = normal_pci(text)
    if pci:
        return Selector(Kind.PCI, pci)
    raise SelectorError(
        f"{text!r} names no card: use all, an index (0), a UUID (GPU-8932f937, MIG-...)"
        " or a PCI id (0000:3b:00.0)"
    )


def normal_pci(text: str) -> str:
    """A PCI id with an eight-digit domain, lower case; "" for what is none."""
    match = _PCI.fullmatch(text.strip().lower())
    if match is None:
        return ""
    domain = (match["domain"] or "0").zfill(8)
    return f"{domain}:{match['bus']}:{match['device']}.{match['function'] or '0'}"


def select(selectors: Iterable[Selector], cards: Sequence[Card]) -> Selection:
    """Apply ``selectors`` to what was enumerated. A short UUID that fits several cards chooses none."""
    chosen: list[Card] = []
    missing: list[str] = []
    for selector in selectors:
        matches = [card for card in cards if _matches(selector, card)]
        if not matches or _ambiguous(selector, matches):
            missing.append(selector.text)
            continue
        chosen += [card for card in matches if card not in chosen]
    return Selection(cards=tuple(chosen), missing=tuple(missing))


def _matches(selector: Selector, card: Card) -> bool:
    """Whether a selector means this card. The name of a partitioned card means all of its instances."""
    if selector.kind is Kind.ALL:
        return True
    if selector.kind is Kind.INDEX:
        return card.index is not None and str(card.index) == selector.text
    if selector.kind is Kind.PCI:
        return card.pci == selector.text
    return any(uuid.lower().startswith(selector.text) for uuid in (card.uuid, card.parent_uuid) if uuid)


def _ambiguous(selector: Selector, matches: Sequence[Card]) -> bool:
    if selector.kind is not Kind.UUID or selector.text in {card.uuid.lower() for card in matches}:
        return False
    whole_cards = {card.parent_uuid or card.uuid for card in matches}
    return len(whole_cards) > 1
