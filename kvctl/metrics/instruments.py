"""Counters and histograms that events feed. Plain numbers of one thread: the event loop's.

prometheus_client's own instruments take a lock and walk the buckets at each observation, and write
``_created`` series; these sit on the path of every streamed event.
"""

from bisect import bisect_left
from itertools import accumulate, product

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from kvctl.metrics.catalog import Spec

Labels = tuple[str, ...]


class Counter:
    """A counter with a child per label combination."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._values: dict[Labels, float] = {}

    def present(self, *fixed: str) -> None:
        """Show every closed combination at 0; ``fixed`` are the values of the leading open labels."""
        for labels in combinations(self.spec, fixed):
            self._values.setdefault(labels, 0.0)

    def add(self, *labels: str) -> None:
        """Count one."""
        self._values[labels] = self._values.get(labels, 0.0) + 1.0

    def family(self) -> CounterMetricFamily:
        """What the page shows."""
        made = CounterMetricFamily(self.spec.name, self.spec.help, labels=list(self.spec.labels))
        for labels, value in self._values.items():
            made.add_metric(labels, value)
        return made


class Histogram:
    """A histogram with a child per label combination."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._bounds = spec.buckets
        self._names = [str(bound) for bound in spec.buckets] + ["+Inf"]
        self._children: dict[Labels, _Child] = {}

    def present(self, *fixed: str) -> None:
        """Show every closed combination at 0; ``fixed`` are the values of the leading open labels."""
        for labels in combinations(self.spec, fixed):
            self._children.setdefault(labels, _Child(len(self._names)))

    def observe(self, value: float, *labels: str) -> None:
        """Count one ``value``."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = _Child(len(self._names))
        child.counts[bisect_left(self._bounds, value)] += 1
        child.sum += value

    def family(self) -> HistogramMetricFamily:
        """What the page shows."""
        made = HistogramMetricFamily(self.spec.name, self.spec.help, labels=list(self.spec.labels))
        for labels, child in self._children.items():
            buckets = list(zip(self._names, map(float, accumulate(child.counts)), strict=True))
            made.add_metric(labels, buckets, child.sum)
        return made


class _Child:
    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0


def combinations(spec: Spec, fixed: Labels = ()) -> list[Labels]:
    """All label combinations with the leading open labels at ``fixed``; none while others are open."""
    closed = list(spec.labels.values())[len(fixed) :]
    return [(*fixed, *rest) for rest in product(*closed)]
