"""Forecast of what leases share: each lease's own part, and what several hold together once.

Beside the curve of each lease stands one for each node of the tree of prefixes that more than one sequence
holds. A newcomer is put on as it was judged, with what it adds to those nodes; whose curves are then drawn
anew by the next tick, or the next end of any that shares. So between two ticks, too, a common part is there
once as long as anyone holds it: the last holder's own curve inherits it.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from operator import add

from kvctl.core.claim import Claim
from kvctl.core.forecast import Curve, Forecast, added, alive, common, curve, less_shared, total
from kvctl.core.ledger import Lease, Ledger
from kvctl.core.prefixes import Node, Place
from kvctl.core.survival import Key, Table


class Candidate(Curve):
    """What a request will hold by itself and, where that is less, what it adds to what is in flight.

    ``saved``: KV tokens of its claim that others hold, or its own sequences together. ``cached``: prompt
    tokens that the engine has computed for others. ``at``: the state of the tree for which these three hold.
    """

    __slots__ = ("adds", "at", "cached", "key", "living", "saved")

    def __init__(self, whole: Curve, key: Key) -> None:
        super().__init__(whole.means, whole.spreads, whole.squares, whole.most)
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
        self._alive: dict[Place, list[float]] = {}
        self._state = 0
        self._late_nodes: set[Node] = set()
        self._late_leases: set[str] = set()

    def candidate(self, asked: Claim, key: Key) -> Candidate:
        """What a request of that class would hold."""
        return Candidate(curve(asked, 0, self._tables(key)), key)

    def weigh(self, candidate: Candidate, asked: Claim) -> Candidate:
        """The same candidate with what it would add now: one that waited may have lost its companions."""
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
        """A single sequence: its curve less what it shares, and more where others may leave before it."""
        match = self._ledger.prefixes.match(candidate.key[0], asked, 0)
        living = alive(asked, 0, 0, self._tables(candidate.key))
        candidate.living = [living]
        candidate.saved, candidate.cached = match.tokens, match.cached
        if match.tokens:
            common_part = [(tokens, node.alive) for node, tokens in match.nodes]
            candidate.adds = less_shared(candidate, common_part, match.tokens, living)

    def _share_many(self, candidate: Candidate, asked: Claim) -> None:
        """Several sequences. What its prompts share with each other is seen when it is opened, not before."""
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

    def opened(self, lease: Lease, asked: Candidate) -> None:
        """A lease was opened in the ledger, weighed just before."""
        self._state += 1
        self._forecast.add(lease.id, asked.adds)
        if not self._ledger.sharing or not lease.claim.prefixes:
            return
        prefixes = self._ledger.prefixes
        for index, living in enumerate(asked.living):
            if prefixes.holds(lease.id, index):
                self._alive[lease.id, index] = living
                for node in prefixes.path(lease.id, index):
                    node.alive = _plus(node.alive, living)
        self._changed()
        self._late_leases.add(lease.id)

    def ended(self, lease: Lease) -> float:
        """A lease was taken off the ledger; by how many KV tokens the forecast peak fell."""
        self._state += 1
        before = self._forecast.peak()
        self._forecast.replace(lease.id, None)
        if self._ledger.sharing and lease.claim.prefixes:
            for node, place in self._ledger.moved.held:
                node.alive = self._without(node, place)
            for index in range(len(lease.claim.prompts)):
                self._alive.pop((lease.id, index), None)
            self._changed()
            self._redraw()
        return before - self._forecast.peak()

    def rebuild(self) -> None:
        """All curves anew."""
        self._state += 1
        self._alive.clear()
        self._late_nodes.clear()
        self._late_leases.clear()
        curves: dict[str | Node, Curve] = {}
        holds = self._ledger.prefixes.holds
        for lease in self._ledger:
            claim, shown, tables = lease.claim, lease.output_per_sequence, self._tables(lease.key)
            shared = self._ledger.prefixes.shared(lease.id, claim) if claim.prefixes else None
            curves[lease.id] = curve(claim, shown, tables, shared)
            for index in range(len(claim.prefixes)):
                if holds(lease.id, index):
                    self._alive[lease.id, index] = alive(claim, index, shown, tables)
        for node in self._ledger.prefixes.shared_nodes():
            columns = [self._alive[place] for place in node.ends]
            for child in node.children.values():
                if child.weight == 1:  # nobody else holds it, so it is a leaf
                    child.alive = self._alive[child.only_holder()]
                columns.append(child.alive)
            if node.parent is not None:
                node.alive = _sums(columns)
                curves[node] = common(node.size, node.alive)
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
        """What the last opening or end moved is drawn anew before long."""
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


def _sums(columns: Sequence[list[float]]) -> list[float]:
    if len(columns) == 1:
        return columns[0]
    return list(map(sum, zip_longest(*columns, fillvalue=0.0)))


def _plus(one: list[float], other: list[float]) -> list[float]:
    if len(one) < len(other):
        one, other = other, one
    return [*map(add, one, other), *one[len(other) :]] if other else one
