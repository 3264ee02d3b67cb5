"""Slots of output length: where histories and survival tables are resolved, finely for short answers."""

from collections.abc import Sequence

LONGEST = 1 << 20  # tokens; longer outputs are treated as this long


def _slot_starts() -> list[int]:
    ranges = ((0, 512, 8), (512, 4096, 32), (4096, 32768, 256), (32768, LONGEST + 1, 16384))
    return [x for start, stop, width in ranges for x in range(start, stop, width)]


SLOT_STARTS: Sequence[int] = _slot_starts()
SLOT_ENDS: Sequence[int] = [*SLOT_STARTS[1:], LONGEST + 16384]
SLOTS = len(SLOT_STARTS)


def _slot_table() -> list[int]:
    pairs = zip(SLOT_STARTS, [*SLOT_STARTS[1:], 3 * LONGEST], strict=True)
    return [slot for slot, (start, end) in enumerate(pairs) for _ in range(start, end, 8)]


SLOT_OF: Sequence[int] = _slot_table()
"""Slot of an output length ``x``: ``SLOT_OF[x >> 3]``, for x under three times LONGEST."""


def slot_of(tokens: int) -> int:
    """Slot of any output length."""
    return SLOT_OF[min(tokens, LONGEST) >> 3]
