"""Prefixes that live leases share: counted once while any holder lives.

An engine with prefix caching keeps the blocks of a common beginning once, however many sequences read them. A
prompt describes its beginning by borders, ``(tokens, hash)``: equal borders mean equal beginnings. The
borders form a tree; a node is a run of borders that the same sequences hold, and its ``weight`` is how many
do. Whole blocks count, each to the node in which it ends, and of a prompt at most what lies before its last
token: the engine computes that one anew.

    saved = sum over nodes of (weight - 1) x size

is what the leases save by sharing. It changes with every lease, in integers, so it is exactly zero when
nobody shares. Borders that two prompts do not have in common are never taken as shared, so prompts with other
borders share less than they might, but nothing wrongly.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvctl.core.claim import Claim, Prefix

DEEPEST = 16
"""The most nodes that a new prompt walks down: what lies deeper is its own. Bounds the time of a decision."""

Border = tuple[int, int]
Place = tuple[str, int]  # lease id, and which of its prompts
Root = tuple[str, int]  # model, block: caches of different models have nothing in common


@dataclass(slots=True, eq=False)
class Node:
    """Tokens ``start`` to ``end`` (whole blocks) of all prompts that go through it.

    ``ends`` are the prompts that end here, with their sequences. ``ready``: some holder is past its prefill,
    so the engine has the blocks. ``alive`` is the sum of the holders' chances to live, at each step of the
    forecast.
    """

    start: int
    end: int
    borders: list[Border]
    parent: "Node | None"
    children: dict[Border, "Node"] = field(default_factory=dict)
    ends: dict[Place, int] = field(default_factory=dict)
    weight: int = 0
    ready: bool = False
    alive: list[float] = field(default_factory=list)

    @property
    def size(self) -> int:
        """KV tokens in whole blocks."""
        return self.end - self.start

    def upwards(self) -> Iterator["Node"]:
        """This node and those above it, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def only_holder(self) -> Place:
        """The prompt that holds a node of weight one."""
        node = self
        while not node.ends:
            (node,) = node.children.values()
        (place,) = node.ends
        return place


@dataclass(slots=True)
class Match:
    """What a prompt shares with live ones: nodes with the tokens of each; how many are computed already."""

    nodes: list[tuple[Node, int]]
    tokens: int
    cached: int


class Changes:
    """What an opening or an end changed.

    ``held``: nodes that a prompt joined or left, with that prompt. ``reshaped``: nodes that keep their
    holders but begin elsewhere. ``gone``: nodes that no longer exist, of weight 0. ``leases``: other leases
    that begin or cease to share.
    """

    __slots__ = ("gone", "held", "leases", "reshaped")

    def __init__(self) -> None:
        self.held: list[tuple[Node, Place]] = []
        self.reshaped: list[Node] = []
        self.gone: list[Node] = []
        self.leases: list[str] = []


class Prefixes:
    """The tree of the prompts of all leases that may share."""

    def __init__(self) -> None:
        self._roots: dict[Root, Node] = {}
        self._leaves: dict[Place, Node] = {}
        self._serial = 0
        self.saved = 0

    def __len__(self) -> int:
        """Prompts in the tree."""
        return len(self._leaves)

    def match(self, model: str, claim: Claim, index: int) -> Match:
        """What one prompt of a request shares with live ones now."""
        chain = _chain(claim, index)
        found = Match([], 0, 0)
        node = self._roots.get((model, claim.block))
        at, depth = 0, 0
        while node is not None and at < len(chain) and depth < DEEPEST:
            node = node.children.get(chain[at])
            if node is None:
                break
            same = _common(node.borders, chain, at)
            end = node.end if same == len(node.borders) else _whole(chain[at + same - 1][0], claim.block)
            found.nodes.append((node, end - node.start))
            found.tokens = end
            if node.ready:
                found.cached = end
            if same < len(node.borders):
                break
            at, depth = at + same, depth + 1
        return found

    def open(self, lease_id: str, model: str, claim: Claim) -> Changes:
        """The prompts of a lease join."""
        changes = Changes()
        for index in range(len(claim.prefixes)):
            chain = _chain(claim, index)
            last = claim.prompts[index] - 1
            if claim.n > 1 and last > (chain[-1][0] if chain else 0):
                self._serial -= 1
                chain = [*chain, (last, self._serial)]  # its sequences share it among themselves
            if chain:
                self._add((lease_id, index), (model, claim.block), chain, claim.n, changes)
        return changes

    def end(self, lease_id: str, claim: Claim) -> Changes:
        """The prompts of a lease leave; those that are left hold the rest."""
        changes = Changes()
        if self._leaves:
            for index in range(len(claim.prompts)):
                leaf = self._leaves.pop((lease_id, index), None)
                if leaf is not None:
                    self._remove((lease_id, index), leaf, changes)
            changes.leases = [one for one in changes.leases if one != lease_id]
        return changes

    def computed(self, lease_id: str, claim: Claim) -> None:
        """The first token of a lease came: its prompts are in the engine's cache."""
        for index in range(len(claim.prompts)):
            for node in self.path(lease_id, index):
                if node.ready:
                    break
                node.ready = True

    def shared(self, lease_id: str, claim: Claim) -> tuple[int, ...] | None:
        """Tokens of each prompt that others (or its own sequences) hold too; None: none of it."""
        if not self._leaves:
            return None
        if len(claim.prompts) == 1:  # nearly always, and a tick asks for every lease
            own = self._shared_of((lease_id, 0))
            return (own,) if own else None
        shared = tuple([self._shared_of((lease_id, index)) for index in range(len(claim.prompts))])
        return shared if any(shared) else None

    def path(self, lease_id: str, index: int) -> Iterator[Node]:
        """The nodes of a prompt, from its end upwards."""
        leaf = self._leaves.get((lease_id, index))
        return leaf.upwards() if leaf is not None else iter(())

    def holds(self, lease_id: str, index: int) -> bool:
        """Whether a prompt is in the tree."""
        return (lease_id, index) in self._leaves

    def shared_nodes(self) -> list[Node]:
        """The roots, and all nodes that more than one sequence holds, each after those below it."""
        found, waiting = [], list(self._roots.values())
        while waiting:
            node = waiting.pop()
            found.append(node)
            waiting += [child for child in node.children.values() if child.weight > 1]
        return found[::-1]

    # --- the tree -----------------------------------------------------------------------------------

    def _shared_of(self, place: Place) -> int:
        node = self._leaves.get(place)
        while node is not None and node.weight == 1:
            node = node.parent
        return 0 if node is None else node.end  # a root's end is 0

    def _add(self, place: Place, key: Root, chain: Sequence[Border], weight: int, changes: Changes) -> None:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(0, 0, [], None)
        node, at, depth, block = root, 0, 0, key[1]
        while at < len(chain) and depth < DEEPEST and (child := node.children.get(chain[at])) is not None:
            same = _common(child.borders, chain, at)
            node = child if same == len(child.borders) else self._split(child, same, block, changes)
            at, depth = at + same, depth + 1
        lone = node
        while lone.parent is not None and lone.weight != 1:
            lone = lone.parent
        if lone is not root:
            changes.leases.append(lone.only_holder()[0])
        if at < len(chain) and depth < DEEPEST:
            rest = list(chain[at:])
            leaf = Node(node.end, _whole(rest[-1][0], block), rest, node)
            node.children[rest[0]] = leaf
            node = leaf
        node.ends[place] = weight
        self._leaves[place] = node
        while node.parent is not None:
            self.saved += (node.end - node.start) * (weight if node.weight else weight - 1)
            node.weight += weight
            changes.held.append((node, place))
            node = node.parent

    def _remove(self, place: Place, leaf: Node, changes: Changes) -> None:
        weight = leaf.ends.pop(place)
        for node in list(leaf.upwards()):
            node.weight -= weight
            self.saved -= (node.end - node.start) * (weight if node.weight else weight - 1)
            if node.weight == 0:
                self._cut(node, changes)
                continue
            if node.weight == 1:
                changes.leases.append(node.only_holder()[0])
            if not node.ends and len(node.children) == 1:
                self._join(node, changes)
            else:
                changes.held.append((node, place))

    def _cut(self, node: Node, changes: Changes) -> None:
        parent = node.parent
        assert parent is not None  # noqa: S101 - roots have no weight
        del parent.children[node.borders[0]]
        changes.gone.append(node)
        if parent.parent is None and not parent.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not parent}

    @staticmethod
    def _split(child: Node, same: int, block: int, changes: Changes) -> Node:
        """The upper part of a node, ``same`` borders long, as a node of its own."""
        parent = child.parent
        assert parent is not None  # noqa: S101 - a root has no borders
        upper = Node(child.start, _whole(child.borders[same - 1][0], block), child.borders[:same], parent)
        upper.weight, upper.ready, upper.alive = child.weight, child.ready, child.alive
        parent.children[upper.borders[0]] = upper
        child.borders, child.start, child.parent = child.borders[same:], upper.end, upper
        upper.children[child.borders[0]] = child
        changes.reshaped.append(child)
        return upper

    @staticmethod
    def _join(node: Node, changes: Changes) -> None:
        """Merge a node in which nobody ends with its only child."""
        (child,) = node.children.values()
        parent = node.parent
        assert parent is not None  # noqa: S101 - roots are not joined
        child.borders, child.start, child.parent = node.borders + child.borders, node.start, parent
        child.ready = child.ready and node.ready
        parent.children[child.borders[0]] = child
        node.weight = 0
        changes.gone.append(node)
        changes.reshaped.append(child)


def _chain(claim: Claim, index: int) -> Sequence[Border]:
    """The borders of a prompt that lie before its last token and are at least one block long."""
    chain: Prefix = claim.prefixes[index]
    if chain and chain[-1][0] >= claim.prompts[index]:
        chain = chain[: bisect_left(chain, (claim.prompts[index],))]
    return chain


def _common(borders: Sequence[Border], chain: Sequence[Border], at: int) -> int:
    """How many borders a node and a chain share from ``at`` on: at least the first, by which it was found."""
    most = min(len(borders), len(chain) - at)
    if borders[most - 1] == chain[at + most - 1]:
        return most  # equal hashes mean equal beginnings, so all before are equal too
    low, high = 1, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if borders[middle - 1] == chain[at + middle - 1] else (low, middle - 1)
    return low


def _whole(tokens: int, block: int) -> int:
    return tokens // block * block
