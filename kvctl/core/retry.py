"""When to come back: Retry-After from the rate at which forecast occupancy drains.

Clients obey the hint to the millisecond and without jitter of their own, so the spread is put on here:
upwards only, 0-50 %, from a seeded low-discrepancy sequence (law 7: no randomness in the core).
"""

from collections import deque

FLOOR_S = 0.25
SPREAD = 0.5
WINDOW_S = 10.0
FEWEST_ENDS = 3  # ended leases before a rate is believed
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 spread evenly


class RetryHints:
    """Measures the drain rate and turns missing tokens into seconds."""

    def __init__(self, *, longest_s: float, seed: float = 0.0) -> None:
        self._longest = longest_s
        self._drained: deque[tuple[float, float]] = deque()
        self._phase = seed % 1.0
        self._streak = 0

    def drained(self, tokens: float, now: float) -> None:
        """A lease ended; the forecast peak fell by ``tokens``."""
        self._drained.append((now, max(tokens, 0.0)))
        self._forget(now)

    def rate(self, now: float) -> float | None:
        """Tokens a second over the last seconds; None: too little ended to say."""
        self._forget(now)
        if len(self._drained) < FEWEST_ENDS:
            return None
        seconds = max(now - self._drained[0][0], 1.0)
        total = sum(tokens for _, tokens in self._drained)
        return total / seconds if total > 0 else None

    def admitted(self) -> None:
        """A request got in: the streak of refusals is over."""
        self._streak = 0

    def after(self, missing_tokens: float, now: float) -> float:
        """Seconds until ``missing_tokens`` will have drained, spread upwards; without a rate it grows."""
        rate = self.rate(now)
        if rate is None:
            seconds = min(2.0 ** min(self._streak, 10), self._longest)
            self._streak += 1
        else:
            seconds = missing_tokens / rate
        return self.spread(max(seconds, FLOOR_S))

    def spread(self, seconds: float) -> float:
        """``seconds`` and up to half as much again, never beyond the longest."""
        self._phase = (self._phase + _GOLDEN) % 1.0
        return min(seconds * (1.0 + SPREAD * self._phase), self._longest)

    def _forget(self, now: float) -> None:
        while self._drained and self._drained[0][0] < now - WINDOW_S:
            self._drained.popleft()
