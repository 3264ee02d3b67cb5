"""When there will be room: the forecast curve of what is in flight, read along time.

``heights[j]`` is mean plus spread of what is held ``STEPS[j]`` decode steps from now, in KV tokens. A request
may start at a step if from there on the highest of them, plus the most that it will hold itself, stays within
the budget. The two maxima need not coincide, so this errs on the late side.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import sqrt

from kvctl.core.correlation import RHO_MOST
from kvctl.core.curves import Curve, Z
from kvctl.core.survival import STEPS


def highest_from(curve: Curve, z: float = Z, rho: float = RHO_MOST) -> list[float]:
    """For each node, the highest that the curve still reaches from there on, ``z`` spreads above the mean."""
    heights = [
        min(mean + z * sqrt(max((1.0 - rho) * square + rho * spread * spread, 0.0)), most)
        for mean, spread, square, most in zip(
            curve.means, curve.spreads, curve.squares, curve.most, strict=True
        )
    ]
    return list(accumulate(reversed(heights), max))[::-1]


def steps_until(highest: Sequence[float], room: float) -> float | None:
    """Decode steps until at most ``room`` KV tokens are held for good; None: that cannot happen."""
    if room < 0.0:
        return None
    for j, height in enumerate(highest):
        if height <= room:
            return _between(highest, j, room)
    return _between([*highest, 0.0], len(highest), room) if highest else 0.0


def _between(highest: Sequence[float], j: int, room: float) -> float:
    """Interpolates between the node before ``j`` and ``j``: answers end all along the way."""
    if j == 0:
        return 0.0
    before, after = highest[j - 1], highest[j]
    start, end = STEPS[j - 1], STEPS[min(j, len(STEPS) - 1)]
    return start + (end - start) * (before - room) / max(before - after, 1e-9)


def height_at(highest: Sequence[float], steps: float) -> float:
    """The highest that is still reached from ``steps`` on, KV tokens."""
    for j, height in enumerate(highest):
        end = STEPS[j + 1] if j + 1 < len(STEPS) else STEPS[-1]
        if steps < end:
            after = highest[j + 1] if j + 1 < len(highest) else 0.0
            return height + (after - height) * max(steps - STEPS[j], 0.0) / max(end - STEPS[j], 1)
    return 0.0
