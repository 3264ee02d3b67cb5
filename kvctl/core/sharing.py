"""Forecast of what leases share: each lease's own part, and shared parts once.

Beside the curve of each lease there is one for each node of the tree of prefixes that more than one sequence
holds. A newcomer is added as it was judged, with what it adds to those nodes; their curves are then redrawn
by the next tick, or at the next end of a lease that shares. So between two ticks, too, a common part is there
once as long as anyone holds it: the last holder's own curve inherits it.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import sqrt
from operator import add, mul, sub

from kvctl.core.claim import Claim
from kvctl.core.curves import Curve, Sketch, alive, at_node, curve, sketch_or_curve, total
from kvctl.core.forecast import Forecast
from kvctl.core.ledger import Lease, Ledger
from kvctl.core.newcomers import Newcomers
from kvctl.core.prefixes import Node, Place
from kvctl.core.survival import Key, Table


class Candidate(Curve):
    """What a request will hold by itself and, where that is less, what it adds to what is in flight.

    ``saved``: KV tokens of its claim that others hold, or that its own sequences share. ``cached``: prompt
    tokens that the engine has computed for others. ``at``: the state of the tree for which these hold.
    """

    __slots__ = ("adds", "at", "cached", "key", "living", "saved")

    def __init__(self, whole: Curve, key: Key) -> None:
        self.means, self.spreads, self.squares, self.most = (
            whole.means,
            whole.spreads,
            whole.squares,
            whole.most,
        )
        self.key = key
        self.adds: Curve = self
        self.saved = self.cached = 0
        self.at = -1
        self.living: list[list[float]] = []  # of each prompt: how many of its sequences, at each step


class Sharing:
    """Keeps the curves of a forecast in step with the ledger's tree of prefixes."""

    def __init__(self, ledger: Ledger, forecast: Forecast, table: Callable[[Key, int], Table]) -> None:
        self._ledger = ledger
        self._forecast = forecast
        self._table = table
        self.newcomers = Newcomers(table)
        self._undrawn: dict[str, Lease] = {}  # let in without a curve since all curves were drawn
        self._stale = False  # what leases share changed unseen: everything has to be redrawn
        self._common = 0  # KV tokens that several leases share
        self._looked = False  # whether a decision has used the curve since the last tick
        self._unseen = False  # whether what leases share may change unseen until the next tick
        self._alive: dict[Place, list[float]] = {}
        self._state = 0
        self._late_nodes: set[Node] = set()
        self._late_leases: set[str] = set()

    def candidate(self, asked: Claim, key: Key) -> Candidate:
        """What a request of that class would hold."""
        return Candidate(curve(asked, 0, self._tables(key)), key)

    def cached(self, asked: Claim, key: Key) -> int:
        """Prompt tokens of a request that the engine has computed for others."""
        if not self._ledger.sharing:
            return 0
        match = self._ledger.prefixes.match
        return sum([match(key[0], asked, index).cached for index in range(len(asked.prompts))])

    def weigh(self, candidate: Candidate, asked: Claim) -> Candidate:
        """The candidate with what it would add now: while it waited, those it shared with may have left."""
        if candidate.at == self._state or not asked.prefixes:
            return candidate
        candidate.at = self._state
        candidate.adds, candidate.saved, candidate.cached = candidate, 0, 0
        if self._ledger.sharing and len(asked.prompts) * asked.n == 1:
            self._share_one(candidate, asked)
        elif self._ledger.sharing:
            self._share_many(candidate, asked)
        return candidate

    def _share_one(self, candidate: Candidate, asked: Claim) -> None:
        """For a single sequence: its curve less what it shares, and more where others may leave before it."""
        match = self._ledger.prefixes.match(candidate.key[0], asked, 0)
        living = alive(asked, 0, 0, self._tables(candidate.key))
        candidate.living = [living]
        candidate.saved, candidate.cached = match.tokens, match.cached
        if match.tokens:
            common_part = [(tokens, node.alive) for node, tokens in match.nodes]
            candidate.adds = less_shared(candidate, common_part, match.tokens, living)

    def _share_many(self, candidate: Candidate, asked: Claim) -> None:
        """For several sequences. What its prompts share with each other counts only once it is opened."""
        key = candidate.key
        parts: list[Curve] = []
        means: list[list[float]] = []
        shared: list[int] = []
        candidate.living = []
        saved = cached = 0
        for index, prompt in enumerate(asked.prompts):
            match = self._ledger.prefixes.match(key[0], asked, index)
            living = alive(asked, index, 0, self._tables(key))
            candidate.living.append(living)
            means += [added(tokens, node.alive, living) for node, tokens in match.nodes]
            among = max((prompt - 1) // asked.block * asked.block - match.tokens, 0) if asked.n > 1 else 0
            if among:  # its own sequences share what nobody else holds
                parts.append(common(among, living))
            shared.append(match.tokens + among)
            saved += asked.n * match.tokens + (asked.n - 1) * among
            cached += match.cached
        if any(shared):
            own = curve(asked, 0, self._tables(key), shared)
            own.means = list(map(sum, zip_longest(own.means, *means, fillvalue=0.0)))
            own.most = candidate.most
            candidate.adds = total([own, *parts]) if parts else own
            candidate.saved, candidate.cached = saved, cached

    # --- the peak -----------------------------------------------------------------------------------

    def peak(self) -> float:
        """Forecast peak of what is in flight."""
        self.draw()
        crest = self._forecast.crest
        self.newcomers.looked(crest, self._common)
        return crest.peak

    def peak_with(self, candidate: Candidate) -> float:
        """The same, were ``candidate`` let in too; it was weighed just before, with all curves drawn."""
        self._looked = True
        return self._forecast.peak_with(candidate.adds)

    def draw(self) -> None:
        """Draw the curves of leases that came without one, before the forecast is read."""
        if self._stale:
            self.rebuild()
            return
        if self._undrawn:
            undrawn, self._undrawn = self._undrawn, {}
            self._forecast.draw(
                {one.id: sketch_or_curve(one.claim, 0, self._tables(one.key)) for one in undrawn.values()}
            )

    # --- leases -------------------------------------------------------------------------------------

    @property
    def must_draw(self) -> bool:
        """Whether a lease with known prefixes must not be opened without its curve now."""
        return self._ledger.sharing and not self._unseen

    def opened_unseen(self, lease: Lease) -> None:
        """A lease was opened in the ledger whose curve nobody has looked at."""
        self._state += 1
        self.newcomers.joined(lease.id, lease.claim, lease.key)
        self._undrawn[lease.id] = lease
        if lease.claim.prefixes and self._ledger.sharing:
            self._stale = True

    def opened(self, lease: Lease, asked: Candidate) -> None:
        """A lease was opened in the ledger, weighed just before."""
        self._state += 1
        if self._forecast.add(lease.id, asked.adds):
            self.newcomers.looked(self._forecast.crest, self._common)
        else:
            self.newcomers.joined(lease.id, lease.claim, lease.key)
        if not self._ledger.sharing or not lease.claim.prefixes:
            return
        self._unseen = False  # it may share with another, whose end must now be followed
        prefixes = self._ledger.prefixes
        for index, living in enumerate(asked.living):
            if prefixes.holds(lease.id, index):
                self._alive[lease.id, index] = living
                for node in prefixes.path(lease.id, index):
                    node.alive = _plus(node.alive, living)
        self._changed()
        self._late_leases.add(lease.id)

    def ended(self, lease: Lease) -> float:
        """A lease was taken off the ledger; by how many KV tokens the forecast fell where its peak is."""
        self._state += 1
        self.newcomers.left(lease.id)
        if self._undrawn.pop(lease.id, None) is not None:
            claim, key, node = lease.claim, lease.key, self._forecast.node
            if len(claim.prompts) == 1:
                part = at_node(claim, self._table(key, claim.outputs[0]), node)
            else:
                part = curve(claim, 0, self._tables(key)).point(node)
            fell = self._forecast.beside(part)
        else:
            fell = self._forecast.remove(lease.id)
        if self._ledger.sharing and lease.claim.prefixes:
            fell += self._left_to_others(lease)
        return fell

    def _left_to_others(self, lease: Lease) -> float:
        """Leave to others what it shared with them; returns by how much the forecast fell by that."""
        if self._unseen:
            self._stale = True
            return sum([self._forecast.remove(node) for node in self._ledger.moved.gone])
        before = self._forecast.level
        for node, place in self._ledger.moved.held:
            node.alive = self._without(node, place)
        for index in range(len(lease.claim.prompts)):
            self._alive.pop((lease.id, index), None)
        self._changed()
        self._redraw()
        self.newcomers.unknown()
        return before - self._forecast.level

    def tick(self) -> None:
        """Redraw all curves; what is shared may then change unseen while no decision needs the curve."""
        self._unseen, self._looked, self._stale = not self._looked, False, False
        self.newcomers.redrawn()
        self.rebuild()
        self.peak()

    def rebuild(self) -> None:
        """Redraw all curves."""
        self._state += 1
        self._undrawn.clear()
        if self._stale:  # the curve is needed: until the next tick it follows every change of what is shared
            self._stale = self._unseen = False
        self.newcomers.unknown()
        self._alive.clear()
        self._late_nodes.clear()
        self._late_leases.clear()
        self._common = 0
        curves: dict[str | Node, Curve | Sketch] = {}
        holds, tables_of = self._ledger.prefixes.holds, dict[Key, Callable[[int], Table]]()
        for lease in self._ledger:
            claim, shown, tables = lease.claim, lease.output_per_sequence, tables_of.get(lease.key)
            if tables is None:
                tables = tables_of[lease.key] = _Tables(self._table, lease.key).__getitem__
            shared = self._ledger.prefixes.shared(lease.id, claim) if claim.prefixes else None
            part = curves[lease.id] = sketch_or_curve(claim, shown, tables, shared)
            for index in range(len(claim.prefixes)):
                if holds(lease.id, index):
                    self._alive[lease.id, index] = (
                        part.alive() if isinstance(part, Sketch) else alive(claim, index, shown, tables)
                    )
        for node in self._ledger.prefixes.shared_nodes():
            columns = [self._alive[place] for place in node.ends]
            for child in node.children.values():
                if child.weight == 1:  # nobody else holds it, so it is a leaf
                    child.alive = self._alive[child.only_holder()]
                columns.append(child.alive)
            if node.parent is not None:
                node.alive = _sums(columns)
                curves[node] = common(node.size, node.alive)
                self._common += node.size
        self._forecast.rebuild(curves)

    def _tables(self, key: Key) -> Callable[[int], Table]:
        return lambda cap: self._table(key, cap)

    def _own(self, lease: Lease) -> Curve:
        shared = self._ledger.prefixes.shared(lease.id, lease.claim)
        return curve(lease.claim, lease.output_per_sequence, self._tables(lease.key), shared)

    def _without(self, node: Node, place: Place) -> list[float]:
        if node.weight == 1:
            return self._alive[node.only_holder()]
        return [one - other for one, other in zip_longest(node.alive, self._alive[place], fillvalue=0.0)]

    def _changed(self) -> None:
        """Have what the last opening or end changed redrawn soon."""
        moved = self._ledger.moved
        self._late_nodes.update(moved.reshaped, moved.gone, [node for node, _ in moved.held])
        self._late_leases.update(moved.leases)

    def _redraw(self) -> None:
        forecast = self._forecast
        for node in self._late_nodes:
            forecast.replace(node, common(node.size, node.alive) if node.weight > 1 else None)
        for lease_id in self._late_leases:
            lease = self._ledger.get(lease_id)
            if lease is not None:
                forecast.replace(lease_id, self._own(lease))
        self._late_nodes.clear()
        self._late_leases.clear()


def common(tokens: int, living: Sequence[float]) -> Curve:
    """The curve of ``tokens`` shared by sequences of which ``living[j]`` will live at node j."""
    chances = [1.0 if one >= 1.0 else max(one, 0.0) for one in living]
    spreads = [0.0 if one == 1.0 else tokens * sqrt(one * (1.0 - one)) for one in chances]
    means = [tokens * one for one in chances]
    return Curve(means, spreads, list(map(mul, spreads, spreads)), [tokens] * len(means))


def added(tokens: int, living: Sequence[float], more: Sequence[float]) -> list[float]:
    """By how much the mean of ``common(tokens, living)`` rises when ``more`` join."""
    room = [1.0 - one if one < 1.0 else 0.0 for one in living]
    return [tokens * min(one, free) for one, free in zip_longest(more, room[: len(more)], fillvalue=1.0)]


def less_shared(
    whole: Curve, shared: Sequence[tuple[int, Sequence[float]]], tokens: int, own: Sequence[float]
) -> Curve:
    """What a sequence adds whose chance to live is ``own`` and which shares ``tokens`` of its prompt.

    ``shared``: the parts of these tokens, each with the number of its holders that will live.
    """
    means = whole.means
    for size, living in shared:
        # both fall with time, so the steps at which somebody certainly lives come first
        over = [
            size * (one + other - 1.0 if other < 1.0 else one)
            for one, other in zip(own, living, strict=False)
            if other + one > 1.0
        ]
        means = [*map(sub, means, over), *means[len(over) :]]
    spreads = [
        wide - wide * tokens * one / mean if wide else 0.0  # it spreads in proportion to what it holds
        for wide, mean, one in zip(whole.spreads, whole.means, own, strict=True)
    ]
    return Curve(means, spreads, list(map(mul, spreads, spreads)), whole.most)


class _Tables(dict[int, Table]):
    """The tables of one class by cap, each looked up once."""

    __slots__ = ("_key", "_table")

    def __init__(self, table: Callable[[Key, int], Table], key: Key) -> None:
        super().__init__()
        self._table = table
        self._key = key

    def __missing__(self, cap: int) -> Table:
        found = self[cap] = self._table(self._key, cap)
        return found


def _sums(columns: Sequence[list[float]]) -> list[float]:
    if len(columns) == 1:
        return columns[0]
    return list(map(sum, zip_longest(*columns, fillvalue=0.0)))


def _plus(one: list[float], other: list[float]) -> list[float]:
    if len(one) < len(other):
        one, other = other, one
    return [*map(add, one, other), *one[len(other) :]] if other else one
