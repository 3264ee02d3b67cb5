"""What the driver reports by itself: Xid errors and memory errors, and which of them end the engine.

The numbers are the driver's own (NVIDIA's "Xid errors" document). Each is one of three kinds: ``fatal`` ends
every context on the card, or the card; ``application`` is the fault, or the end, of one program, which need
not be the engine; ``other`` is worth a line and changes nothing now. An Xid that is not in the table is
``other``: the next reading of the card and the engine's own progress say what became of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    """What a message of the driver means for whoever computes on the card."""

    XID_FATAL = "xid_fatal"  # all contexts on the card are over, or the card is
    XID_APPLICATION = "xid_application"  # one program's own fault
    XID_OTHER = "xid_other"  # reported; nothing follows from it now
    ECC_UNCORRECTED = "ecc_uncorrected"  # memory that cannot be trusted: as bad as a fatal Xid
    ECC_CORRECTED = "ecc_corrected"  # mended by the hardware


FATAL = frozenset({EventKind.XID_FATAL, EventKind.ECC_UNCORRECTED})
"""Kinds after which the engines on the card are over."""

_FATAL: Mapping[int, str] = {
    46: "the card stopped processing",
    48: "uncorrectable memory error",
    61: "breakpoint inside the card's microcontroller",
    62: "the card's microcontroller halted",
    64: "a faulty memory row could not be retired",
    74: "NVLink error",
    79: "the card fell off the bus",
    94: "uncorrectable memory error, contained: its program was ended",
    95: "uncorrectable memory error, not contained: every program on the card was ended",
    110: "security fault",
    119: "no answer from the card's system processor (GSP)",
    120: "error of the card's system processor (GSP)",
    136: "link training failed",
    140: "uncorrectable memory error that the card did not recover from",
    143: "the card could not be initialised",
}
_APPLICATION: Mapping[int, str] = {
    8: "a program's work did not end in time",
    13: "exception in a program's kernel",
    31: "a program touched memory that is not its own",
    43: "a program's channel was stopped; the card is well",
    45: "a program was ended and cleaned up after",
    68: "error of the video processor",
    69: "exception in a program's graphics or compute class",
    109: "a program's context switch did not end in time",
}
_OTHER: Mapping[int, str] = {
    63: "a faulty memory row is recorded, to be retired at the next reset",
    92: "many memory errors that the card corrected",
    154: "the driver asks for a recovery of the card (see nvidia-smi -q)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CardEvent:
    """One message. ``uuids``: the card, or the instances of it, as samples name them; () : not told which."""

    uuids: tuple[str, ...]
    kind: EventKind
    xid: int | None = None

    @property
    def fatal(self) -> bool:
        """Whether the engines on these cards are over."""
        return self.kind in FATAL

    @property
    def sentence(self) -> str:
        """What happened, for people."""
        where = ", ".join(self.uuids) or "a card that the driver does not name"
        if self.xid is None:
            what = "uncorrectable" if self.kind is EventKind.ECC_UNCORRECTED else "corrected"
            return f"{where}: {what} memory error"
        return f"{where}: Xid {self.xid}, {meaning(self.xid)}"


def kind_of_xid(xid: int) -> EventKind:
    """What follows from an Xid."""
    if xid in _FATAL:
        return EventKind.XID_FATAL
    return EventKind.XID_APPLICATION if xid in _APPLICATION else EventKind.XID_OTHER


def meaning(xid: int) -> str:
    """An Xid in words."""
    return _FATAL.get(xid) or _APPLICATION.get(xid) or _OTHER.get(xid) or "not in kvctl's table"


def table() -> list[tuple[int, EventKind, str]]:
    """Every Xid that kvctl knows, for docs/gpu.md."""
    return [(xid, kind_of_xid(xid), meaning(xid)) for xid in sorted({**_FATAL, **_APPLICATION, **_OTHER})]
