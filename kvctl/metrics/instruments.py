"""Counters and histograms that events feed. Plain numbers of one thread: the event loop's.

prometheus_client's own instruments take a lock and walk the buckets at each observation, and write
``_created`` series; these sit on the path of every streamed event.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product

from kvctl.metrics.catalog import Spec
from kvctl.metrics.exposition import Labels, buckets, number, series


class Counter:
    """A counter with a child per label combination."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._keys = tuple(spec.labels)
        self._values: dict[Labels, float] = {}

    def present(self, *fixed: str) -> None:
        """Show every closed combination at 0; ``fixed`` are the values of the leading open labels."""
        for labels in combinations(self.spec, fixed):
            self._values.setdefault(labels, 0.0)

    def add(self, *labels: str) -> None:
        """Count one."""
        self._values[labels] = self._values.get(labels, 0.0) + 1.0

    def adder(self, *labels: str) -> Callable[[], None]:
        """What counts one for these labels, which are shown from now on: the way for what is frequent."""
        values = self._values
        values.setdefault(labels, 0.0)

        def add() -> None:
            values[labels] += 1.0

        return add

    def lines(self) -> Iterator[str]:
        """What the page shows, a series at a time; what appears meanwhile is on the next page."""
        name, keys = self.spec.name, self._keys
        for labels in tuple(self._values):
            yield f"{series(name, keys, labels)}{number(self._values[labels])}\n"


class Histogram:
    """A histogram with a child per label combination.

    Values are put into their buckets several at a time, by ``settle``: each tick calls it, and whoever shows.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._keys = tuple(spec.labels)
        self._bounds = spec.buckets
        self._names = [str(bound) for bound in spec.buckets] + ["+Inf"]
        self._children: dict[Labels, _Child] = {}

    def present(self, *fixed: str) -> None:
        """Show every closed combination at 0; ``fixed`` are the values of the leading open labels."""
        for labels in combinations(self.spec, fixed):
            self._child(labels)

    def observe(self, value: float, *labels: str) -> None:
        """Count one ``value``."""
        self._child(labels).new.append(value)

    def observer(self, *labels: str) -> Callable[[float], None]:
        """What counts a value for these labels, which are shown from now on: the way for what is frequent."""
        return self._child(labels).new.append

    def settle(self) -> None:
        """Put all that came into its buckets."""
        for child in self._children.values():
            child.settle(self._bounds)

    def lines(self) -> Iterator[str]:
        """What the page shows, the buckets of one label set at a time: they are of one moment."""
        for child in tuple(self._children.values()):
            child.settle(self._bounds)
            yield child.text()

    def _child(self, labels: Labels) -> "_Child":
        child = self._children.get(labels)
        if child is None:
            series = buckets(self.spec.name, self._keys, labels, self._names)
            child = self._children[labels] = _Child(series)
        return child


class _Child:
    __slots__ = ("counts", "new", "series", "sum")

    def __init__(self, series: list[str]) -> None:
        """``series`` names the buckets, the count and the sum."""
        self.counts = [0] * (len(series) - 2)
        self.series = series
        self.sum = 0.0
        self.new: list[float] = []  # values that are in no bucket yet

    def settle(self, bounds: Sequence[float]) -> None:
        """By the bounds and not by the values: of these there are many more, where it matters."""
        values, counts = self.new, self.counts
        if not values:
            return
        self.sum = sum(values, self.sum)
        values.sort()
        below = 0
        for bucket, bound in enumerate(bounds):
            up_to = bisect_right(values, bound, below)
            counts[bucket] += up_to - below
            below = up_to
        counts[-1] += len(values) - below
        values.clear()

    def text(self) -> str:
        values = [f"{below}.0" for below in accumulate(self.counts)]
        values += [values[-1], number(self.sum)]
        return "".join([f"{name}{value}\n" for name, value in zip(self.series, values, strict=True)])


def combinations(spec: Spec, fixed: Labels = ()) -> list[Labels]:
    """All label combinations with the leading open labels at ``fixed``; none while others are open."""
    closed = list(spec.labels.values())[len(fixed) :]
    return [(*fixed, *rest) for rest in product(*closed)]
