"""Checks the local tokenizer's counts against what the engine says of real traffic.

Whatever the engine tells afterwards (``usage`` of a finished answer, its ``/tokenize`` asked on the side) is
compared with what was counted before. If ``MOST_WRONG`` of the last ``WINDOW`` comparisons differ, the
tokenizer is doubted: a tokenizer of another model is nearly always wrong, a template that renders some shape
differently is wrong now and then. It is trusted again after ``ENOUGH_RIGHT`` agreeing comparisons in a row,
and twice as many each time that trust was lost with the same engine.

Law 4: while it is doubted, no 400 rests on it.
"""

from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum

WINDOW = 20
MOST_WRONG = 5
ENOUGH_RIGHT = 10
SAMPLE_EVERY_S = 5.0
MOST_AT_ONCE = 4
_MOST_DOUBLINGS = 6


class Witness(StrEnum):
    """Where the true count came from: metric label."""

    USAGE = "usage"
    TOKENIZE = "tokenize"


class Calibration:
    """The comparisons of one tokenizer with one engine.

    ``changed(sentence)`` is called whenever trust is lost or won; ``doubted`` says which.
    """

    def __init__(self) -> None:
        self.doubted = False
        self.why = ""  # while it is doubted: why, in words
        self.changed: Callable[[str], None] = lambda _: None
        self.samples: Counter[tuple[Witness, bool]] = Counter()  # by witness and whether both agree
        self._recent: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._right = 0  # comparisons in a row that agreed, while it is doubted
        self._losses = 0  # of trust, with this engine
        self._asked = 0  # times a comparison with /tokenize was due since the last change
        self._sampled_at = float("-inf")
        self.sampling = 0  # comparisons with /tokenize that are under way

    @property
    def error_ratio(self) -> float | None:
        """Tokens miscounted over true ones, of the last comparisons; None: there are none."""
        true = sum(told for _, told in self._recent)
        return sum(abs(own - told) for own, told in self._recent) / true if true else None

    def saw(self, witness: Witness, own: int, true: int) -> None:
        """Compare one count with the true one."""
        self.samples[witness, own == true] += 1
        self._recent.append((own, true))
        wrong = sum(mine != told for mine, told in self._recent)
        if not self.doubted and wrong >= MOST_WRONG:
            self._doubt(
                f"{wrong} of the last {len(self._recent)} requests count otherwise "
                f"(the last one {own} tokens, {true} by the engine)"
            )
        elif self.doubted:
            self._right = self._right + 1 if own == true else 0
            if self._right >= ENOUGH_RIGHT << min(max(self._losses - 1, 0), _MOST_DOUBLINGS):
                self.trust(f"the last {self._right} requests count as the engine does")

    def probed(self, wrong: int, of: int) -> None:
        """An engine came up and was asked for counts of ``of`` probes."""
        self._clear()
        self._losses = 0
        if wrong:
            self._doubt(f"{wrong} of {of} probes count otherwise")
        else:
            self.trust("all probes count as the engine does")

    def trust(self, sentence: str) -> None:
        """Trust the tokenizer: earlier differences no longer count."""
        self._clear()
        before, self.doubted, self.why = self.doubted, False, ""
        if before:
            self.changed(sentence)

    def _doubt(self, why: str) -> None:
        before, self.doubted, self.why = self.doubted, True, why
        self._clear()
        if not before:
            self._losses += 1
            self.changed(why)

    def _clear(self) -> None:
        self._recent.clear()
        self._right = self._asked = 0

    def due(self, now: float) -> bool:
        """Whether a request should now be counted by the other source too; asking uses up the turn."""
        new = self._asked < WINDOW or self.doubted  # while in doubt this costs the engine nothing extra
        if self.sampling >= MOST_AT_ONCE or not (new or now - self._sampled_at >= SAMPLE_EVERY_S):
            return False
        self._asked += 1
        self._sampled_at = now
        return True
