"""Leases and survival -> occupancy curve -> peak.

For a sequence that holds ``a`` KV tokens (prompt and output so far, in whole blocks), has shown ``g`` output
tokens and may make ``m``:

    alive(t) = S(g + t) / S(g)   for t <= m - g, else 0
    mean(t)  = sum alive (a + t)
    var(t)   = (1 - rho) sum s^2 + rho (sum s)^2,   s^2 = alive (1 - alive) (a + t)^2
    peak     = max over t of mean(t) + z sqrt(var(t))

``t`` are decode steps on a grid. Peaks sit between nodes, just before answers end, so each interval takes
``alive`` at its left end and the tokens at its right end, the latter never past m - g.
"""

from collections.abc import Sequence
from math import sqrt

from kvctl.core.claim import Claim, round_up
from kvctl.core.survival import LONGEST, SLOT_OF

Z = 2.0
RHO = 0.05
"""Correlation of the lengths in flight. A common surprise of 15-30 % makes the spread about twice that of
independent lengths at fifty leases, which is what 0.05 gives."""


def _nodes() -> list[int]:
    nodes, step = [0, 8, 16, 32, 48], 64
    while step <= LONGEST:
        nodes += [step, step + step // 2]
        step *= 2
    return nodes


NODES: Sequence[int] = _nodes()
_INTERVALS: Sequence[tuple[int, int]] = list(zip(NODES, [*NODES[1:], LONGEST * 4], strict=True))


class Curve:
    """What one lease adds at each node: mean tokens, and the spread of it per sequence.

    ``means[j]``, ``spreads[j]`` (sum of s) and ``squares[j]`` (sum of s^2) for the first nodes; zero beyond.
    """

    __slots__ = ("means", "spreads", "squares")

    def __init__(self, means: list[float], spreads: list[float], squares: list[float]) -> None:
        self.means = means
        self.spreads = spreads
        self.squares = squares


def curve(claim: Claim, output_per_sequence: int, table_of: Sequence[Sequence[float]]) -> Curve:
    """The curve of one request; ``table_of[i]`` is the survival table for its i-th prompt's cap."""
    first = _sequence_curve(claim, 0, output_per_sequence, table_of[0])
    for i in range(1, len(claim.prompts)):
        _add(first, _sequence_curve(claim, i, output_per_sequence, table_of[i]))
    return first


def _sequence_curve(claim: Claim, i: int, shown: int, table: Sequence[float]) -> Curve:
    cap, n = claim.outputs[i], claim.n
    shown = min(shown, cap)
    held = round_up(claim.prompts[i] + shown, claim.block)
    left = cap - shown
    slots = SLOT_OF
    longest = LONGEST - shown
    base = table[slots[min(shown, LONGEST) >> 3]]
    means: list[float] = []
    spreads: list[float] = []
    squares: list[float] = []
    for t, until in _INTERVALS:
        if t >= left and t:
            break
        reach = t if t < longest else longest  # noqa: FURB136 - hot: half the cost of min()
        alive = table[slots[(shown + reach) >> 3]] / base
        tokens = held + (until if until < left else left)  # noqa: FURB136 - hot: half the cost of min()
        square = alive * (1.0 - alive) * tokens * tokens
        means.append(n * alive * tokens)
        spreads.append(n * sqrt(square))
        squares.append(n * square)
    return Curve(means, spreads, squares)


def _add(into: Curve, other: Curve) -> None:
    _extend(into, len(other.means))
    for j, (mean, spread, square) in enumerate(zip(other.means, other.spreads, other.squares, strict=True)):
        into.means[j] += mean
        into.spreads[j] += spread
        into.squares[j] += square


def _extend(curve_: Curve, length: int) -> None:
    missing = length - len(curve_.means)
    if missing > 0:
        for column in (curve_.means, curve_.spreads, curve_.squares):
            column.extend([0.0] * missing)


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
        total = Curve([], [], [])
        for one in curves.values():
            _add(total, one)
        self._sum = total
        self._peak = None

    def add(self, lease_id: str, one: Curve) -> None:
        """Put on the curve of a lease just admitted."""
        self._curves[lease_id] = one
        _add(self._sum, one)
        self._peak = None

    def remove(self, lease_id: str) -> float:
        """Take off the curve of a lease that ended; returns by how much the peak fell, in KV tokens."""
        one = self._curves.pop(lease_id)
        before = self.peak()
        if not self._curves:
            self._sum = Curve([], [], [])
        else:
            _add(
                self._sum,
                Curve([-x for x in one.means], [-x for x in one.spreads], [-x for x in one.squares]),
            )
        self._peak = None
        return before - self.peak()

    def peak(self) -> float:
        """Forecast peak of what is in flight, KV tokens."""
        if self._peak is None:
            total = self._sum
            self._peak = max(map(_height, total.means, total.spreads, total.squares), default=0.0)
        return self._peak

    def peak_with(self, candidate: Curve) -> float:
        """Forecast peak were ``candidate`` admitted too."""
        total, shared = self._sum, min(len(self._sum.means), len(candidate.means))
        peak = 0.0
        for j in range(shared):
            height = _height(
                total.means[j] + candidate.means[j],
                total.spreads[j] + candidate.spreads[j],
                total.squares[j] + candidate.squares[j],
            )
            peak = max(peak, height)
        for rest in (total, candidate):
            for j in range(shared, len(rest.means)):
                peak = max(peak, _height(rest.means[j], rest.spreads[j], rest.squares[j]))
        return peak


def _height(mean: float, spread: float, square: float) -> float:
    return mean + Z * sqrt(max((1.0 - RHO) * square + RHO * spread * spread, 0.0))
