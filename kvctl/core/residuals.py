"""How good the forecast is: what leases came to hold against what was forecast for them.

Now and then the leases in flight are noted with the mean and the upper bound that the forecast gives for them
``AHEAD`` decode steps ahead. When the first of them has made that many more tokens, or all have ended, what
those still open hold is compared; later arrivals have no part in it. Steps are counted by tokens and not by
the measured pace, which is off by half while prompts are computed and so showed an excess where there was
none. If the spread is right and leases are many, a bound at two deviations is exceeded about once in forty
times. If it is exceeded more often for long, lengths vary together more than is assumed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvctl.core.correlation import RHO_MOST
from kvctl.core.curves import Curve
from kvctl.core.ledger import Ledger
from kvctl.core.survival import STEPS

AHEAD = 64  # decode steps
NODE = STEPS.index(AHEAD)
NOTED_EVERY_S = 1.0
FEWEST_LEASES = 4  # with fewer there is no occupancy to speak of
FEWEST_LOOKS = 30  # before a share is reported
MEMORY = 1000.0  # looks


@dataclass(frozen=True, slots=True)
class Note:
    """The forecast for some leases, KV tokens, at ``AHEAD`` tokens beyond what each had ``made``."""

    made: Mapping[str, int]  # output per sequence, by lease
    mean: float
    bound: float

    def due(self, ledger: Ledger) -> bool:
        """Whether it can be compared now."""
        anybody = False
        for one, made in self.made.items():
            lease = ledger.get(one)
            if lease is not None:
                if lease.output_per_sequence >= made + AHEAD:
                    return True
                anybody = True
        return not anybody


class Residuals:
    """Keeps one note at a time, and fading sums of the comparisons."""

    def __init__(self) -> None:
        self._note: Note | None = None
        self._noted_at = float("-inf")
        self._looks = 0
        self._weight = self._exceeded = self._error = 0.0

    @property
    def exceeded_ratio(self) -> float | None:
        """Share of looks at which more was held than the forecast's bound; None: too few looks."""
        return self._exceeded / self._weight if self._looks >= FEWEST_LOOKS else None

    @property
    def error_ratio(self) -> float | None:
        """How far what was held lies above the forecast's mean, on average; below: negative."""
        return self._error / self._weight if self._looks >= FEWEST_LOOKS else None

    def tick(self, ledger: Ledger, forecast: Curve, now: float, rho: float = RHO_MOST) -> None:
        """Time passes: look at what is due, and note what is next."""
        if self._note is not None and self._note.due(ledger):
            self._look(self._note, ledger)
            self._note = None
        if self._note is None and now - self._noted_at >= NOTED_EVERY_S:
            self._noted_at = now
            self._note = self._noted(ledger, forecast, rho)

    def _noted(self, ledger: Ledger, forecast: Curve, rho: float) -> Note | None:
        """None where it could not be compared: nothing to speak of, or prefixes held in common."""
        if len(ledger) < FEWEST_LEASES or ledger.shared_tokens or len(forecast.means) <= NODE:
            return None
        at = slice(NODE, NODE + 1)
        there = Curve(forecast.means[at], forecast.spreads[at], forecast.squares[at], forecast.most[at])
        made = {lease.id: lease.output_per_sequence for lease in ledger}
        return Note(made, there.means[0], max(there.peak(rho), there.means[0]))

    def _look(self, note: Note, ledger: Ledger) -> None:
        held = sum(lease.held_tokens() for one in note.made if (lease := ledger.get(one)) is not None)
        fade = 1.0 - 1.0 / MEMORY
        self._looks += 1
        self._weight = self._weight * fade + 1.0
        self._exceeded = self._exceeded * fade + (held > note.bound)
        self._error = self._error * fade + (held - note.mean) / max(note.mean, 1.0)
