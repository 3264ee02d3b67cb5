"""Leases and survival -> occupancy curve -> peak.

For a sequence of prompt ``p`` that has shown ``g`` output tokens and may make ``m``:

    alive(t) = S(g + t) / S(g)   for t <= m - g, else 0
    held(t)  = p + g + t in whole blocks, at most what the sequence claims
    mean(t)  = sum alive held
    var(t)   = (1 - rho) sum s^2 + rho (sum s)^2,   s^2 = alive (1 - alive) held^2
    most(t)  = sum held, of those that may still live
    peak     = max over t of min(mean(t) + z sqrt(var(t)), most(t))

Where few large sequences run, a normal law spreads far beyond what all of them together can hold.
What ``k`` sequences hold together counts with the chance that any of them lives, at most
``min(1, sum alive)``, and the rest of each by itself.

``t`` are decode steps on a grid. Peaks sit between nodes, just before answers end, so each interval takes
``alive`` at its left end and ``held`` at its right end, the latter never past m - g.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import zip_longest
from math import sqrt
from operator import add, mul, sub
from typing import Any, NamedTuple

from kvctl.core.claim import Claim, round_up
from kvctl.core.slots import LONGEST
from kvctl.core.survival import STEPS, Table

Z = 2.0
RHO = 0.03
"""Correlation of the lengths in flight: a hundred leases spread twice as far as independent lengths do.
Half of it serves 5 % more where many short answers run, and preempts twice as many in the worst run after
answers have become four times as long; 0.05 costs a tenth of the goodput of short answers."""

_INTERVAL_ENDS = [*STEPS[1:], LONGEST * 4]


class Curve:
    """What one lease adds at each node: mean tokens, and the spread of it per sequence.

    ``means[j]``, ``spreads[j]`` (sum of s), ``squares[j]`` (sum of s^2) and ``most[j]`` (what is held if all
    live) for the first nodes; zero beyond.
    """

    __slots__ = ("means", "most", "spreads", "squares")

    def __init__(
        self, means: list[float], spreads: list[float], squares: list[float], most: Sequence[float]
    ) -> None:
        self.means = means
        self.spreads = spreads
        self.squares = squares
        self.most = most

    def point(self, node: int) -> "Point":
        """What it is there."""
        if node >= len(self.means):
            return _NOWHERE
        return Point(self.means[node], self.spreads[node], self.squares[node], self.most[node])

    def crest(self, known: Sequence[float] = ()) -> "Crest":
        """Where it is highest, KV tokens; ``known``: mean and spread at the last nodes."""
        apart, common, unknown = 1.0 - RHO, RHO, len(self.means) - len(known)
        tall = [
            mean + Z * sqrt(variance)
            if (variance := apart * square + common * spread * spread) > 0.0
            else mean
            for mean, spread, square in zip(
                self.means[:unknown], self.spreads[:unknown], self.squares[:unknown], strict=True
            )
        ]
        tall += known
        if not tall:
            return _FLAT
        heights = list(map(min, tall, self.most))
        peak = max(heights)
        return Crest(peak, heights.index(peak), max(tall), max(self.most), tall)

    def peak(self) -> float:
        """Forecast peak of this curve, KV tokens."""
        return self.crest().peak


class Crest(NamedTuple):
    """The peak of a curve, its node, and the highest of the two that it is the lesser of, each by itself.

    ``tall`` is mean and spread, ``most`` what all can hold. Both of a sum are at most the sums of its parts'
    (a spread is a norm, whatever the correlation); the peak, as the lesser of the two, is not.
    """

    peak: float
    node: int
    tall: float
    most: float
    talls: Sequence[float]  # at each node


class Point(NamedTuple):
    """A curve at one node."""

    mean: float
    spread: float
    square: float
    most: float

    def height(self) -> float:
        """What is forecast there, KV tokens."""
        variance = (1.0 - RHO) * self.square + RHO * self.spread * self.spread
        return min(self.mean + Z * sqrt(variance), self.most) if variance > 0.0 else self.mean

    def plus(self, other: "Point", times: float = 1.0) -> "Point":
        """With another curve put on so many times; -1: taken off."""
        return Point(
            self.mean + times * other.mean,
            self.spread + times * other.spread,
            self.square + times * other.square,
            self.most + times * other.most,
        )


_FLAT = Crest(0.0, 0, 0.0, 0.0, ())
_NOWHERE = Point(0.0, 0.0, 0.0, 0.0)


def curve(
    claim: Claim,
    output_per_sequence: int,
    table_for: Callable[[int], Table],
    shared: Sequence[int] | None = None,
) -> Curve:
    """The curve of one request; ``table_for(cap)`` is the survival table for that output cap.

    ``shared`` tokens of each prompt, in whole blocks, are counted elsewhere.
    """
    outputs, shown, whole = claim.outputs, output_per_sequence, claim.prompts
    own = whole if shared is None else [p - other for p, other in zip(whole, shared, strict=True)]
    if len(outputs) == 1:
        held = _blocks_held(own[0], outputs[0], shown, claim.block)
        return _scaled(held, outputs[0] - shown, table_for(outputs[0]), shown, claim.n)
    parts = []
    for cap in dict.fromkeys(outputs):
        prompts = [p for p, output in zip(own, outputs, strict=True) if output == cap]
        mean = _mean_held(prompts, cap, shown, claim.block)
        parts.append(_scaled(mean, cap - shown, table_for(cap), shown, claim.n * len(prompts)))
    return total(parts)


def _scaled(held: list[float] | list[int], left: int, table: Table, shown: int, sequences: int) -> Curve:
    """The curve of ``sequences`` equal sequences that hold ``held[j]`` tokens at node j."""
    alive, spread = table.ahead(min(shown, shown + left), len(held))
    means, spreads = list(map(mul, alive, held)), list(map(mul, spread, held))
    squares = list(map(mul, spreads, spreads))
    if sequences == 1:
        return Curve(means, spreads, squares, held)
    return Curve(*([sequences * x for x in column] for column in (means, spreads, squares, held)))


def _nodes_within(left: int) -> int:
    """How many nodes lie before the last of ``left`` tokens; the present always does."""
    return bisect_left(STEPS, left) or 1


def at_node(claim: Claim, table: Table, node: int) -> Point:
    """A request of one prompt that has shown nothing: its ``curve`` at one node, without drawing the rest."""
    prompt, cap, sequences = claim.prompts[0], claim.outputs[0], claim.n
    last = _nodes_within(cap) - 1
    if node > last:
        return _NOWHERE
    alive, spread = table.ahead(0, last + 1)
    held = round_up(prompt + (cap if node == last else _INTERVAL_ENDS[node]), claim.block)
    wide = held * spread[node]
    return Point(sequences * held * alive[node], sequences * wide, sequences * wide * wide, sequences * held)


def alive(
    claim: Claim, index: int, output_per_sequence: int, table_for: Callable[[int], Table]
) -> list[float]:
    """How many of the sequences of a prompt will live, at each node."""
    cap = claim.outputs[index]
    nodes = _nodes_within(cap - output_per_sequence)
    chances = table_for(cap).ahead(min(output_per_sequence, cap), nodes).alive[:nodes]
    return chances if claim.n == 1 else [claim.n * one for one in chances]


def _blocks_held(prompt: int, cap: int, shown: int, block: int) -> list[int]:
    """Tokens held by a sequence of a prompt at the right end of each interval."""
    whole, over = divmod(prompt + min(shown, cap), block)
    rounded = list(map((whole * block).__add__, _rounded_ends(block, over)[: _nodes_within(cap - shown)]))
    rounded[-1] = round_up(prompt + cap, block)
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
        list(map(sum, zip_longest(*[one.most for one in curves], fillvalue=0.0))),
    )


def _plus(one: Curve, other: Curve) -> Curve:
    if len(one.means) < len(other.means):
        one, other = other, one
    shared = len(other.means)
    return Curve(
        [*map(add, one.means, other.means), *one.means[shared:]],
        [*map(add, one.spreads, other.spreads), *one.spreads[shared:]],
        [*map(add, one.squares, other.squares), *one.squares[shared:]],
        [*map(add, one.most, other.most), *one.most[shared:]],
    )


def _minus(whole: Curve, part: Curve) -> Curve:
    """``part`` taken off a sum that it is in."""
    shared = len(part.means)
    return Curve(
        [*map(sub, whole.means, part.means), *whole.means[shared:]],
        [*map(sub, whole.spreads, part.spreads), *whole.spreads[shared:]],
        [*map(sub, whole.squares, part.squares), *whole.squares[shared:]],
        [*map(sub, whole.most, part.most), *whole.most[shared:]],
    )


_NOTHING = Curve([], [], [], [])


class Forecast:
    """The sum of the curves of all leases, rebuilt every tick; between ticks curves are put on and taken off.

    What is taken off is exactly the curve that was put on, so nothing drifts for longer than a tick. It is
    taken off the sum when that is next read; at the node of the last peak it is seen at once.
    """

    def __init__(self) -> None:
        self._curves: dict[Any, Curve] = {}
        self._sum = _NOTHING
        self._gone: list[Curve] = []  # of the sum
        self._crest: Crest | None = _FLAT  # of the sum, None: not known
        self._talls: Sequence[float] = ()  # mean and spread of the sum when its peak was last read
        self._touched = 0  # so many of its nodes are others since then
        self.node = 0  # where the peak was when it was last read
        self._point = _NOWHERE  # the sum there now
        self._tried: tuple[Curve, Curve, Curve, Crest] | None = None  # sum, candidate, both, their crest

    def rebuild(self, curves: dict[Any, Curve]) -> None:
        """Replace all curves."""
        self._curves = curves
        self._sum = total(list(curves.values()))
        self._gone.clear()
        self._crest, self._talls = None, ()
        self._point = self._sum.point(self.node)

    def add(self, key: Hashable, one: Curve) -> bool:
        """Put on the curve of a lease just admitted; whether the peak with it is known already."""
        whole = self.sum
        self._curves[key] = one
        tried, self._tried = self._tried, None
        if tried is not None and tried[0] is whole and tried[1] is one:
            self._read(tried[2], tried[3])
            return True
        self._sum, self._crest = _plus(whole, one), None
        self._touched = max(self._touched, len(one.means))
        self._point = self._point.plus(one.point(self.node))
        return False

    def remove(self, key: Hashable) -> float:
        """Take off the curve of a lease that ended.

        Returns by how much the forecast fell where its peak was, in KV tokens.
        """
        old = self._curves.pop(key, None)
        if old is None:
            return 0.0
        self._gone.append(old)
        self._crest = None
        self._touched = max(self._touched, len(old.means))
        before = self._point
        self._point = before.plus(old.point(self.node), -1.0) if self._curves else _NOWHERE
        return before.height() - self._point.height()

    @property
    def level(self) -> float:
        """What is forecast where the peak was when it was last read, KV tokens."""
        return self._point.height()

    def beside(self, part: Point) -> float:
        """How much higher ``part`` makes the forecast where the peak was, KV tokens."""
        return self._point.plus(part).height() - self._point.height()

    def replace(self, key: Hashable, one: Curve | None) -> None:
        """Put ``one`` in the place of what stands under ``key``, if anything does; None: nothing."""
        self.remove(key)
        if one is not None:
            self.add(key, one)

    @property
    def sum(self) -> Curve:
        """The curve of all leases together."""
        if self._gone:
            gone = self._gone[0] if len(self._gone) == 1 else total(self._gone)
            self._gone.clear()
            if self._curves:
                self._sum = _minus(self._sum, gone)
            else:
                self._sum, self._talls = _NOTHING, ()
        return self._sum

    @property
    def crest(self) -> Crest:
        """The peak of what is in flight, KV tokens."""
        return self._crest or self._read(self.sum, self.sum.crest(self._talls[self._touched :]))

    def _read(self, whole: Curve, crest: Crest) -> Crest:
        self._sum, self._crest, self.node = whole, crest, crest.node
        self._talls, self._touched = crest.talls, 0
        self._point = whole.point(crest.node)
        return crest

    def peak(self) -> float:
        """Forecast peak of what is in flight, KV tokens."""
        return self.crest.peak

    def crest_with(self, candidate: Curve) -> Crest:
        """The same, were ``candidate`` admitted too; if it then is, nothing is summed anew."""
        whole = self.sum
        both = _plus(whole, candidate)
        crest = both.crest(self._talls[max(self._touched, len(candidate.means)) :])
        self._tried = whole, candidate, both, crest
        return crest

    def peak_with(self, candidate: Curve) -> float:
        """Forecast peak were ``candidate`` admitted too."""
        return self.crest_with(candidate).peak
