"""How answers advance: tokens per stream event, and the pace of answers that show nothing until their end.

An event of a stream is not always one token: speculative decoding, parsers and a busy API server put several
into one. The engine's own token counter, compared with the events seen, tells how many. Pages lag, and a
counter that is a second late is far off over a second; so sums over a minute are compared, and only the final
ratio is clamped to its bounds: if each reading were clamped, noise could only push it upwards.
"""

SMOOTHING = 0.2
PRIOR_EVENTS = 100.0  # of one token each, before any was seen
RATIO_HALF_LIFE_S = 60.0
MOST_TOKENS_PER_EVENT = 16.0
UNKNOWN_PACE = 20.0  # tokens a second and sequence, before anything was measured


class Pace:
    """Learns tokens per event and the decode rate of one sequence from pages and streams."""

    def __init__(self) -> None:
        self.tokens_per_event = 1.0
        self.tokens_per_s = UNKNOWN_PACE
        self.first_token_s = 0.0
        self.events = 0.0  # token-bearing events of streams that came through since the last page
        self._all_events = self._all_tokens = PRIOR_EVENTS  # fading
        self._mixed = False
        self._page_at: float | None = None
        self._running = 0

    def others_run(self) -> None:
        """Something generates that shows no events here: the counter cannot be compared with the events."""
        self._mixed = True

    def page(self, generated: float | None, running: int | None, now: float) -> None:
        """A page: ``generated`` tokens since the one before, ``running`` sequences now."""
        before, self._page_at = self._page_at, now
        most = max(running or 0, self._running)  # those that ended in between have generated too
        self._running = running or 0
        if generated is None or before is None or now <= before:
            self._forget()
            return
        if most and generated > 0:
            self._learn_pace(generated / (now - before) / most)
        if not self._mixed:
            self._learn_ratio(generated, now - before)
        self._forget()

    def first_token(self, seconds: float) -> None:
        """A stream's first token came that long after its admission."""
        self.first_token_s += SMOOTHING * (seconds - self.first_token_s)

    def silent_output(self, seconds_since_admission: float) -> float:
        """Tokens that a sequence without visible events has probably made by now."""
        return max(seconds_since_admission - self.first_token_s, 0.0) * self.tokens_per_s

    def _learn_pace(self, pace: float) -> None:
        self.tokens_per_s += SMOOTHING * (pace - self.tokens_per_s)

    def _learn_ratio(self, generated: float, seconds: float) -> None:
        fade = 0.5 ** (seconds / RATIO_HALF_LIFE_S)
        self._all_events = self._all_events * fade + self.events
        self._all_tokens = self._all_tokens * fade + generated
        if self._all_events >= PRIOR_EVENTS:
            ratio = self._all_tokens / self._all_events
            self.tokens_per_event = min(max(ratio, 1.0), MOST_TOKENS_PER_EVENT)

    def _forget(self) -> None:
        self.events = 0.0
        self._mixed = False
