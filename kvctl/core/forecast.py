"""Leases and survival -> occupancy curve -> peak.

For a sequence of prompt ``p`` that has shown ``g`` output tokens and may make ``m``:

    alive(t) = S(g + t) / S(g)   for t <= m - g, else 0
    held(t)  = p + g + t in whole blocks, at most what the sequence claims
    mean(t)  = sum alive held
    var(t)   = (1 - rho) sum s^2 + rho (sum s)^2,   s^2 = alive (1 - alive) held^2
    peak     = max over t of mean(t) + z sqrt(var(t))

``t`` are decode steps on a grid. Peaks sit between nodes, just before answers end, so each interval takes
``alive`` at its left end and ``held`` at its right end, the latter never past m - g.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import zip_longest
from math import sqrt
from operator import add, mul, neg

from kvctl.core.claim import Claim, round_up
from kvctl.core.survival import LONGEST, STEPS, Table

Z = 2.0
RHO = 0.03
"""Correlation of the lengths in flight: a hundred leases spread twice as far as independent lengths do.
Where lengths have two humps, 0.02 preempts some 10 per 1,000 at twice saturation and 0.03 nobody; 0.05 costs
a tenth of the goodput where many short answers run."""

_INTERVAL_ENDS = [*STEPS[1:], LONGEST * 4]


class Curve:
    """What one lease adds at each node: mean tokens, and the spread of it per sequence.

    ``means[j]``, ``spreads[j]`` (sum of s) and ``squares[j]`` (sum of s^2) for the first nodes; zero beyond.
    """

    __slots__ = ("means", "spreads", "squares")

    def __init__(self, means: list[float], spreads: list[float], squares: list[float]) -> None:
        self.means = means
        self.spreads = spreads
        self.squares = squares

    def peak(self) -> float:
        """Forecast peak of this curve, KV tokens."""
        apart, common = 1.0 - RHO, RHO
        heights = [
            mean + Z * sqrt(variance)
            if (variance := apart * square + common * spread * spread) > 0.0
            else mean
            for mean, spread, square in zip(self.means, self.spreads, self.squares, strict=True)
        ]
        return max(heights, default=0.0)


def curve(claim: Claim, output_per_sequence: int, table_for: Callable[[int], Table]) -> Curve:
    """The curve of one request; ``table_for(cap)`` is the survival table for that output cap."""
    outputs, shown = claim.outputs, output_per_sequence
    if len(outputs) == 1:
        return _scaled(_blocks_held(claim, shown), outputs[0] - shown, table_for(outputs[0]), shown, claim.n)
    parts = []
    for cap in dict.fromkeys(outputs):
        prompts = [p for p, output in zip(claim.prompts, outputs, strict=True) if output == cap]
        held = _mean_held(prompts, cap, shown, claim.block)
        parts.append(_scaled(held, cap - shown, table_for(cap), shown, claim.n * len(prompts)))
    return total(parts)


def _scaled(held: list[float] | list[int], left: int, table: Table, shown: int, sequences: int) -> Curve:
    """The curve of ``sequences`` equal sequences that hold ``held[j]`` tokens at node j."""
    alive, spread = table.ahead(min(shown, shown + left), len(held))
    means, spreads = list(map(mul, alive, held)), list(map(mul, spread, held))
    squares = list(map(mul, spreads, spreads))
    if sequences == 1:
        return Curve(means, spreads, squares)
    return Curve(*([sequences * x for x in column] for column in (means, spreads, squares)))


def _nodes_within(left: int) -> int:
    """How many nodes lie before the last of ``left`` tokens; the present always does."""
    return bisect_left(STEPS, left) or 1


def _blocks_held(claim: Claim, shown: int) -> list[int]:
    """Tokens held by a sequence of the only prompt at the right end of each interval."""
    block, cap = claim.block, claim.outputs[0]
    whole, over = divmod(claim.prompts[0] + min(shown, cap), block)
    rounded = list(map((whole * block).__add__, _rounded_ends(block, over)[: _nodes_within(cap - shown)]))
    rounded[-1] = round_up(claim.prompts[0] + cap, block)
    return rounded


@cache
def _rounded_ends(block: int, over: int) -> list[int]:
    """Blocks at the right end of each interval for a sequence that holds ``over`` tokens now."""
    return [round_up(over + t, block) for t in _INTERVAL_ENDS]


def _mean_held(prompts: list[int], cap: int, shown: int, block: int) -> list[float]:
    """The same for the average of many prompts, without a round over all of them at every node."""
    now = sum(round_up(p + min(shown, cap), block) for p in prompts) / len(prompts)
    most = sum(round_up(p + cap, block) for p in prompts) / len(prompts)
    held = [min(now + t, most) for t in _INTERVAL_ENDS[: _nodes_within(cap - shown)]]
    held[-1] = most
    return held


def total(curves: Sequence[Curve]) -> Curve:
    """The sum of many curves."""
    return Curve(
        list(map(sum, zip_longest(*[one.means for one in curves], fillvalue=0.0))),
        list(map(sum, zip_longest(*[one.spreads for one in curves], fillvalue=0.0))),
        list(map(sum, zip_longest(*[one.squares for one in curves], fillvalue=0.0))),
    )


def _plus(one: Curve, other: Curve) -> Curve:
    if len(one.means) < len(other.means):
        one, other = other, one
    shared = len(other.means)
    return Curve(
        [*map(add, one.means, other.means), *one.means[shared:]],
        [*map(add, one.spreads, other.spreads), *one.spreads[shared:]],
        [*map(add, one.squares, other.squares), *one.squares[shared:]],
    )


class Forecast:
    """The sum of the curves of all leases, rebuilt every tick; between ticks curves are put on and taken off.

    What is taken off is exactly the curve that was put on, so nothing drifts for longer than a tick.
    """

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._sum = Curve([], [], [])
        self._peak: float | None = 0.0

    def rebuild(self, curves: dict[str, Curve]) -> None:
        """Replace all curves."""
        self._curves = curves
        self._sum = total(list(curves.values()))
        self._peak = None

    def add(self, lease_id: str, one: Curve) -> None:
        """Put on the curve of a lease just admitted."""
        self._curves[lease_id] = one
        self._sum = _plus(self._sum, one)
        self._peak = None

    def remove(self, lease_id: str) -> float:
        """Take off the curve of a lease that ended; returns by how much the peak fell, in KV tokens."""
        one = self._curves.pop(lease_id)
        before = self.peak()
        off = Curve(*(list(map(neg, column)) for column in (one.means, one.spreads, one.squares)))
        self._sum = _plus(self._sum, off) if self._curves else Curve([], [], [])
        self._peak = None
        return before - self.peak()

    def peak(self) -> float:
        """Forecast peak of what is in flight, KV tokens."""
        if self._peak is None:
            self._peak = self._sum.peak()
        return self._peak

    def peak_with(self, candidate: Curve) -> float:
        """Forecast peak were ``candidate`` admitted too."""
        return _plus(self._sum, candidate).peak()
