"""Leases and survival -> occupancy curve -> peak.

For a sequence of prompt ``p`` that has shown ``g`` output tokens and may make ``m``:

    alive(t) = S(g + t) / S(g)   for t <= m - g, else 0
    held(t)  = p + g + t in whole blocks, at most what the sequence claims
    mean(t)  = sum alive held
    var(t)   = (1 - rho) sum s^2 + rho (sum s)^2,   s^2 = alive (1 - alive) held^2
    most(t)  = sum held, of those that may still live
    peak     = max over t of min(mean(t) + z sqrt(var(t)), most(t))

``rho`` is how far lengths vary together (``correlation``). Where few large sequences run, a normal law
spreads far beyond what all of them together can hold.
What ``k`` sequences hold together counts with the chance that any of them lives, at most
``min(1, sum alive)``, and the rest of each by itself.

``t`` are decode steps on a grid. Peaks sit between nodes, just before answers end, so each interval takes
``alive`` at its left end and ``held`` at its right end, the latter never past m - g.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import cache, reduce
from itertools import zip_longest
from math import hypot, sqrt
from operator import add, itemgetter, mul, sub
from typing import NamedTuple

from kvctl.core.claim import Claim, round_up
from kvctl.core.correlation import RHO_MOST
from kvctl.core.slots import LONGEST
from kvctl.core.survival import STEPS, Table

Z = 2.0
CROWDED = 14
"""Sequences from which on they are summed node by node: fewer are drawn one by one in less time."""

_SEVERAL = 4  # curves that are cheaper to sum node by node than one after the other

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

    @property
    def nodes(self) -> int:
        """At how many nodes it is above zero."""
        return len(self.means)

    def drawn(self) -> "Curve":
        """Itself."""
        return self

    def point(self, node: int) -> "Point":
        """What it is there."""
        if node >= len(self.means):
            return NOWHERE
        return Point(self.means[node], self.spreads[node], self.squares[node], self.most[node])

    def crest(self, known: Sequence[float] = (), rho: float = RHO_MOST) -> "Crest":
        """Where it is highest, KV tokens; ``known``: mean and spread at the last nodes, with the same rho."""
        apart, common, root, unknown = 1.0 - rho, rho, sqrt, len(self.means) - len(known)
        tall = [
            mean + Z * root(variance)
            if (variance := apart * square + common * spread * spread) > 0.0
            else mean
            for mean, spread, square in zip(self.means[:unknown], self.spreads, self.squares, strict=False)
        ]
        tall += known
        if not tall:
            return FLAT
        peak = tallest = max(tall)
        node = tall.index(peak)
        if peak > self.most[node]:
            heights = list(map(min, tall, self.most))
            peak = max(heights)
            node = heights.index(peak)
        return Crest(peak, node, tallest, max(self.most), tall)

    def peak(self, rho: float = RHO_MOST) -> float:
        """Forecast peak of this curve, KV tokens."""
        return self.crest(rho=rho).peak


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

    def height(self, rho: float = RHO_MOST) -> float:
        """What is forecast there, KV tokens."""
        mean, spread, square, most = self
        variance = (1.0 - rho) * square + rho * spread * spread
        return min(mean + Z * sqrt(variance), most) if variance > 0.0 else mean

    def plus(self, other: "Point", times: float = 1.0) -> "Point":
        """With another curve put on so many times; -1: taken off."""
        mean, spread, square, most = other
        return Point(
            self.mean + times * mean,
            self.spread + times * spread,
            self.square + times * square,
            self.most + times * most,
        )


FLAT = Crest(0.0, 0, 0.0, 0.0, ())
NOWHERE = Point(0.0, 0.0, 0.0, 0.0)
NOTHING = Curve([], [], [], [])


class Sketch(NamedTuple):
    """One sequence, by what its curve is drawn from.

    ``held`` and ``left`` are tokens: by itself now, not rounded, and those that it may still make.
    """

    left: int
    held: int
    shown: int
    block: int
    table: Table

    @property
    def nodes(self) -> int:
        """At how many nodes its curve is above zero."""
        return _nodes_within(self.left)

    def alive(self) -> list[float]:
        """Its chance to live, at each node."""
        nodes = self.nodes
        return self.table.ahead(self.shown, nodes).alive[:nodes]

    def drawn(self) -> Curve:
        """Its curve."""
        return _scaled(_ends(self.held, self.left, self.block), self.table, self.shown, 1)

    def point(self, node: int) -> Point:
        """Its curve at one node, without drawing the rest."""
        return _point(self, node)


def _point(sketch: tuple[int, int, int, int, Table], node: int) -> Point:
    left, held, shown, block, table = sketch
    nodes = bisect_left(STEPS, left) or 1
    if node >= nodes:
        return NOWHERE
    alive, spread = table.ahead(shown, nodes)
    holds = -(-(held + (left if node == nodes - 1 else _INTERVAL_ENDS[node])) // block) * block
    wide = holds * spread[node]
    return Point(holds * alive[node], wide, wide * wide, holds)


def crowd(sketches: Sequence[Sketch]) -> Curve:
    """The sum of the curves of many sequences, all with blocks of one size.

    Summed node by node and not lease by lease: what is looked at for each of them is little.
    """
    by_end = sorted(sketches, key=itemgetter(0), reverse=True)  # who ends at a node is last there
    left, now, shown, (block, *_), tables = zip(*by_end, strict=True)
    nodes = [bisect_left(STEPS, tokens) or 1 for tokens in left]
    ahead = [table.ahead(made, count) for table, made, count in zip(tables, shown, nodes, strict=True)]
    rounded = [float(-(-tokens // block) * block) for tokens in now]
    full = [float(-(-(tokens + more) // block) * block) for tokens, more in zip(now, left, strict=True)]
    means, spreads, squares, most = list[float](), list[float](), list[float](), list[float]()
    alive_of_all, spread_of_all = (zip_longest(*column) for column in zip(*ahead, strict=True))
    going, last, steps = len(nodes), Counter(nodes), range(1, nodes[0] + 1)
    by_node = zip(steps, _INTERVAL_ENDS, alive_of_all, spread_of_all, strict=False)
    for node, end, alive_there, spread_there in by_node:
        here, going = going, going - last[node]
        if end % block:
            held = [float(-(-(tokens + end) // block) * block) for tokens in now[:going]]
        else:
            held = [tokens + end for tokens in rounded[:going]]
        held += full[going:here]
        wide = list(map(mul, spread_there, held))
        means.append(sum(map(mul, alive_there, held)))
        spreads.append(sum(wide))
        squares.append(hypot(*wide) ** 2)
        most.append(sum(held))
    return Curve(means, spreads, squares, most)


def together(parts: Collection[Sketch | Curve]) -> Curve:
    """The sum of the curves of all."""
    if len(parts) == 1:
        (one,) = parts
        return one.drawn()
    drawn: list[Curve] = []
    by_block: defaultdict[int, list[Sketch]] = defaultdict(list)
    for part in parts:
        if isinstance(part, Curve):
            drawn.append(part)
        else:
            by_block[part.block].append(part)
    for alike in by_block.values():
        if len(alike) < CROWDED:
            drawn += [one.drawn() for one in alike]
        else:
            drawn.append(crowd(alike))
    return total(drawn)


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
    if len(outputs) == 1:
        cap, prompt = outputs[0], whole[0] if shared is None else whole[0] - shared[0]
        shown = min(shown, cap)
        return _scaled(_ends(prompt + shown, cap - shown, claim.block), table_for(cap), shown, claim.n)
    own = whole if shared is None else [p - other for p, other in zip(whole, shared, strict=True)]
    parts = []
    for cap in dict.fromkeys(outputs):
        prompts = [p for p, output in zip(own, outputs, strict=True) if output == cap]
        mean = _mean_held(prompts, cap, shown, claim.block)
        parts.append(_scaled(mean, table_for(cap), min(shown, cap), claim.n * len(prompts)))
    return total(parts)


def sketch_or_curve(
    claim: Claim,
    output_per_sequence: int,
    table_for: Callable[[int], Table],
    shared: Sequence[int] | None = None,
) -> Sketch | Curve:
    """What ``curve`` draws, not drawn yet where it is of one sequence: nearly all are."""
    if claim.sequences > 1:
        return curve(claim, output_per_sequence, table_for, shared)
    cap, prompt = claim.outputs[0], claim.prompts[0]
    shown = min(output_per_sequence, cap)
    held = prompt + shown if shared is None else prompt - shared[0] + shown
    return Sketch(cap - shown, held, shown, claim.block, table_for(cap))


def _scaled(held: list[float], table: Table, shown: int, sequences: int) -> Curve:
    """The curve of ``sequences`` equal sequences that hold ``held[j]`` tokens at node j."""
    alive, spread = table.ahead(shown, len(held))
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
    sequences = claim.n
    one = _point((claim.outputs[0], claim.prompts[0], 0, claim.block, table), node)
    if sequences == 1:
        return one
    return Point(sequences * one.mean, sequences * one.spread, sequences * one.square, sequences * one.most)


def alive(
    claim: Claim, index: int, output_per_sequence: int, table_for: Callable[[int], Table]
) -> list[float]:
    """How many of the sequences of a prompt will live, at each node."""
    cap = claim.outputs[index]
    nodes = _nodes_within(cap - output_per_sequence)
    chances = table_for(cap).ahead(min(output_per_sequence, cap), nodes).alive[:nodes]
    return chances if claim.n == 1 else [claim.n * one for one in chances]


def _ends(held: int, left: int, block: int) -> list[float]:
    """Tokens held at the right end of each interval by a sequence that holds ``held`` now."""
    over = held % block
    whole = float(held - over)
    ends = [whole + more for more in _rounded_ends(block, over)[: bisect_left(STEPS, left) or 1]]
    ends[-1] = float(-(-(held + left) // block) * block)
    return ends


@cache
def _rounded_ends(block: int, over: int) -> list[float]:
    """Blocks at the right end of each interval for a sequence that holds ``over`` tokens now."""
    return [float(round_up(over + t, block)) for t in _INTERVAL_ENDS]


def _mean_held(prompts: list[int], cap: int, shown: int, block: int) -> list[float]:
    """The same for the average of many prompts, without a round over all of them at every node."""
    now = sum(round_up(p + min(shown, cap), block) for p in prompts) / len(prompts)
    most = sum(round_up(p + cap, block) for p in prompts) / len(prompts)
    held = [min(now + t, most) for t in _INTERVAL_ENDS[: _nodes_within(cap - shown)]]
    held[-1] = most
    return held


def total(curves: Sequence[Curve]) -> Curve:
    """The sum of many curves."""
    if 0 < len(curves) < _SEVERAL:
        return reduce(plus, curves)
    return Curve(
        list(map(sum, zip_longest(*[one.means for one in curves], fillvalue=0.0))),
        list(map(sum, zip_longest(*[one.spreads for one in curves], fillvalue=0.0))),
        list(map(sum, zip_longest(*[one.squares for one in curves], fillvalue=0.0))),
        list(map(sum, zip_longest(*[one.most for one in curves], fillvalue=0.0))),
    )


def plus(one: Curve, other: Curve) -> Curve:
    """The sum of two curves."""
    if len(one.means) < len(other.means):
        one, other = other, one
    shared = len(other.means)
    return Curve(
        [*map(add, one.means, other.means), *one.means[shared:]],
        [*map(add, one.spreads, other.spreads), *one.spreads[shared:]],
        [*map(add, one.squares, other.squares), *one.squares[shared:]],
        [*map(add, one.most, other.most), *one.most[shared:]],
    )


def minus(whole: Curve, part: Curve) -> Curve:
    """``part`` taken off a sum that it is in."""
    shared = len(part.means)
    return Curve(
        [*map(sub, whole.means, part.means), *whole.means[shared:]],
        [*map(sub, whole.spreads, part.spreads), *whole.spreads[shared:]],
        [*map(sub, whole.squares, part.squares), *whole.squares[shared:]],
        [*map(sub, whole.most, part.most), *whole.most[shared:]],
    )
