"""Those who were let in without a look at the curve: what the peak is at most with them.

The peak is the lesser of two heights, mean with spread and what all can hold (``curves.Crest``). Each of
them is for a sum at most the sum of the parts' highest. So what stood at the last look, with the highest of
each who came since and is still there, bounds the peak, whoever has left: as long as that bound is within the
budget, nobody's curve need be drawn. The next tick draws them all.
"""

from bisect import bisect_left
from collections.abc import Callable
from math import ceil, inf, sqrt
from operator import truediv

from kvctl.core.claim import Claim
from kvctl.core.curves import Crest, Z, curve
from kvctl.core.survival import STEPS, Key, Table

STEEPEST = 0.5 + 0.5 * sqrt(1.0 + Z * Z)
"""Mean and spread of one sequence are at most so many times what it holds, whatever its chance to live."""
FEW = 8  # prompts of a request that are looked at one by one

Reach = tuple[float, float]
"""Mean and spread of one that holds ``p`` tokens in prompts are at most ``first x p + second``."""


class Newcomers:
    """Bounds the peak in a few additions. KV tokens in whole numbers: nothing is left when all have left."""

    def __init__(self, table: Callable[[Key, int], Table]) -> None:
        self._table = table
        self._tall_before = self._most_before = inf
        self._tall = self._most = 0
        self._open: dict[str, tuple[int, int]] = {}
        self._judged: tuple[Claim | None, int] = None, 0
        self._reach: dict[tuple[Key, int], Reach] = {}
        self._reach_of: dict[tuple[Table, int], Reach] = {}

    def looked(self, crest: Crest, common: int = 0) -> None:
        """The forecast of all in flight was evaluated. ``common``: KV tokens that several hold together.

        What one leaves to the others is certain while many hold it, and spreads when few are left.
        """
        self._tall_before, self._most_before = crest.tall + STEEPEST * common, crest.most
        self._tall = self._most = 0
        self._open.clear()

    def unknown(self) -> None:
        """The forecast may have risen without anybody coming: nothing is bounded until it is evaluated."""
        self._tall_before = self._most_before = inf

    def redrawn(self) -> None:
        """Survival tables are others from now on, and so is the forecast."""
        self.unknown()
        self._reach.clear()
        self._reach_of.clear()

    def tall(self, asked: Claim, key: Key) -> int:
        """Mean and spread of a request that has shown nothing, at most, at any time."""
        if len(asked.prompts) == 1:  # nearly all
            cap = asked.outputs[0]
            slope, least = self._reach.get((key, cap)) or self._reach_for(key, cap)
            return int(asked.n * (slope * (asked.prompts[0] + asked.block) + least)) + 1
        if len(asked.prompts) > FEW:
            return ceil(STEEPEST * asked.tokens)
        tall = 0.0
        for prompt, cap in zip(asked.prompts, asked.outputs, strict=True):
            slope, least = self._reach.get((key, cap)) or self._reach_for(key, cap)
            tall += slope * (prompt + asked.block) + least
        return int(asked.n * tall) + 1

    def peak_with(self, asked: Claim, key: Key, claimed: float = inf) -> float:
        """The peak of what is in flight at most, were one more let in; all together claim ``claimed``."""
        tall = self.tall(asked, key)
        self._judged = asked, tall
        one, other = self._tall_before + self._tall + tall, self._most_before + self._most + asked.tokens
        return min(one, other, claimed)

    def joined(self, lease_id: str, asked: Claim, key: Key) -> None:
        """One was let in."""
        judged, tall = self._judged
        if judged is not asked:
            tall = self.tall(asked, key)
        self._open[lease_id] = tall, asked.tokens
        self._tall += tall
        self._most += asked.tokens

    def left(self, lease_id: str) -> None:
        """A lease is over, of a newcomer or not."""
        was = self._open.pop(lease_id, None)
        if was is not None:
            self._tall -= was[0]
            self._most -= was[1]

    def _reach_for(self, key: Key, cap: int) -> Reach:
        """Read off the curve of one without a prompt, for all caps that end before the same step."""
        table, nodes = self._table(key, cap), bisect_left(STEPS, cap) or 1
        reach = self._reach_of.get((table, nodes))
        if reach is None:
            longest = STEPS[nodes] if nodes < len(STEPS) else cap
            asked = Claim(prompts=(0,), outputs=(longest,), n=1, block=1, tokens=longest, sequences=1)
            drawn = curve(asked, 0, lambda _: table)
            tall = [mean + Z * spread for mean, spread in zip(drawn.means, drawn.spreads, strict=True)]
            reach = max(map(truediv, tall, drawn.most)), max(tall)
            if nodes < len(STEPS):
                self._reach_of[table, nodes] = reach
        self._reach[key, cap] = reach
        return reach
