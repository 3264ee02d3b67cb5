"""When to come back: Retry-After from the rate at which forecast occupancy drains.

Clients obey the hint to the millisecond and without jitter of their own, so the spread is added here:
upwards only, 0-50 %, from a seeded low-discrepancy sequence (law 7: no randomness in the core). Without a
rate the hint is as long as callers have been refused by now: it doubles with each return of the same caller,
however many others are refused beside it.
"""

from collections import deque

FLOOR_S = 0.25
UNKNOWN_S = 1.0  # the first hint when nothing is known of the drain rate
SPREAD = 0.5
WINDOW_S = 10.0
FEWEST_ENDS = 3  # ended leases before a rate is used
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 spread evenly


class RetryHints:
    """Measures the drain rate and turns missing tokens into seconds."""

    def __init__(self, *, longest_s: float, seed: float = 0.0) -> None:
        self._longest = longest_s
        self._drained: deque[tuple[float, float]] = deque()
        self._total: float | None = None  # their sum; None: not summed yet
        self._phase = seed % 1.0
        self._refusing_since: float | None = None

    def aim(self, longest_s: float) -> None:
        """Set the longest hint from now on."""
        self._longest = longest_s

    def drained(self, tokens: float, now: float) -> None:
        """A lease ended; the forecast peak fell by ``tokens``."""
        drained = self._drained
        drained.append((now, max(tokens, 0.0)))
        self._total = None
        if drained[0][0] < now - WINDOW_S:
            self._forget(now)

    def rate(self, now: float) -> float | None:
        """Tokens a second over the last seconds; None: too little ended to say."""
        self._forget(now)
        if len(self._drained) < FEWEST_ENDS:
            return None
        seconds = max(now - self._drained[0][0], 1.0)
        if self._total is None:  # refusals come in bursts, and each asks
            self._total = sum(tokens for _, tokens in self._drained)
        return self._total / seconds if self._total > 0 else None

    def ends_per_s(self, now: float) -> float | None:
        """Leases that end in a second; None: too little ended to say."""
        self._forget(now)
        if len(self._drained) < FEWEST_ENDS:
            return None
        return len(self._drained) / max(now - self._drained[0][0], 1.0)

    def admitted(self) -> None:
        """A request got in: the streak of refusals is over."""
        self._refusing_since = None

    def after(self, missing: float, rate: float | None, now: float) -> float:
        """Seconds until ``missing`` will have drained at ``rate`` a second, spread upwards.

        Without a rate it grows with the time for which callers have been refused.
        """
        since = self._refusing_since = now if self._refusing_since is None else self._refusing_since
        if rate is None:
            return self.spread(max(now - since, UNKNOWN_S))
        return self.spread(max(missing / rate, FLOOR_S))

    def spread(self, seconds: float) -> float:
        """``seconds`` plus up to half as much again; the longest hint is spread too, not cut off."""
        self._phase = (self._phase + _GOLDEN) % 1.0
        return min(seconds, self._longest / (1.0 + SPREAD)) * (1.0 + SPREAD * self._phase)

    def _forget(self, now: float) -> None:
        while self._drained and self._drained[0][0] < now - WINDOW_S:
            self._drained.popleft()
            self._total = None
