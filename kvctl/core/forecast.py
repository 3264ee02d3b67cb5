"""What is forecast for all leases together: the sum of their curves, kept between two ticks."""

from collections.abc import Hashable, Sequence
from typing import Any

from kvctl.core.correlation import RHO_MOST
from kvctl.core.curves import FLAT, NOTHING, NOWHERE, Crest, Curve, Point, Sketch, minus, plus, together


class Forecast:
    """The sum of the curves of all leases, rebuilt every tick; between ticks curves are put on and taken off.

    What is taken off is exactly the curve that was put on, so nothing drifts for longer than a tick. It is
    taken off the sum when that is next read; at the node of the last peak it is seen at once.
    """

    def __init__(self) -> None:
        self._rho = RHO_MOST
        self._curves: dict[Any, Curve | Sketch] = {}
        self._sum = NOTHING
        self._gone: list[Curve | Sketch] = []  # of the sum
        self._crest: Crest | None = FLAT  # of the sum, None: not known
        self._talls: Sequence[float] = ()  # mean and spread of the sum when its peak was last read
        self._touched = 0  # so many of its nodes are others since then
        self.node = 0  # where the peak was when it was last read
        self._point = NOWHERE  # the sum there now
        self._tried: tuple[Curve, Curve, Curve, Crest] | None = None  # sum, candidate, both, their crest

    @property
    def rho(self) -> float:
        """How far lengths vary together, from the next time that the forecast is read."""
        return self._rho

    @rho.setter
    def rho(self, rho: float) -> None:
        if rho != self._rho:
            self._rho = rho
            self._crest, self._talls, self._tried = None, (), None

    def rebuild(self, curves: dict[Any, Curve | Sketch]) -> None:
        """Replace all curves."""
        self._curves = curves
        self._sum = together(curves.values())
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
        self._put(one)
        return False

    def draw(self, parts: dict[Any, Curve | Sketch]) -> None:
        """Put on the curves of leases that were let in without."""
        if parts:
            self._put(together(parts.values()))
            self._curves |= parts

    def _put(self, one: Curve) -> None:
        self._sum, self._crest = plus(self.sum, one), None
        self._touched = max(self._touched, one.nodes)
        self._point = self._point.plus(one.point(self.node))

    def remove(self, key: Hashable) -> float:
        """Take off the curve of a lease that ended.

        Returns by how much the forecast fell where its peak was, in KV tokens.
        """
        old = self._curves.pop(key, None)
        if old is None:
            return 0.0
        self._gone.append(old)
        self._crest = None
        self._touched = max(self._touched, old.nodes)
        before = self._point
        self._point = before.plus(old.point(self.node), -1.0) if self._curves else NOWHERE
        return before.height(self._rho) - self._point.height(self._rho)

    @property
    def level(self) -> float:
        """What is forecast where the peak was when it was last read, KV tokens."""
        return self._point.height(self._rho)

    def beside(self, part: Point) -> float:
        """How much higher ``part`` makes the forecast where the peak was, KV tokens."""
        if part is NOWHERE:
            return 0.0
        here = self._point
        return here.plus(part).height(self._rho) - here.height(self._rho)

    def replace(self, key: Hashable, one: Curve | None) -> None:
        """Put ``one`` in the place of what stands under ``key``, if anything does; None: nothing."""
        self.remove(key)
        if one is not None:
            self.add(key, one)

    @property
    def sum(self) -> Curve:
        """The curve of all leases together."""
        if self._gone:
            gone = together(self._gone)
            self._gone.clear()
            if self._curves:
                self._sum = minus(self._sum, gone)
            else:
                self._sum, self._talls = NOTHING, ()
        return self._sum

    @property
    def crest(self) -> Crest:
        """The peak of what is in flight, KV tokens."""
        return self._crest or self._read(self.sum, self.sum.crest(self._talls[self._touched :], self._rho))

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
        both = plus(whole, candidate)
        crest = both.crest(self._talls[max(self._touched, len(candidate.means)) :], self._rho)
        self._tried = whole, candidate, both, crest
        return crest

    def peak_with(self, candidate: Curve) -> float:
        """Forecast peak were ``candidate`` admitted too."""
        return self.crest_with(candidate).peak
