"""When to try again: at once, then after 1, 2, 4 ... 60 seconds."""


class Backoff:
    """Doubling pauses between failures. Seconds, on whatever clock the caller's ``now`` has."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 60.0) -> None:
        self._first = first_s
        self._longest = longest_s
        self._pause = 0.0
        self._due_at = 0.0

    def due(self, now: float) -> bool:
        """Whether the pause after the last failure is over."""
        return not self._pause or now >= self._due_at

    def failed(self, now: float) -> None:
        """It failed at ``now``: pause, longer than the last time."""
        self._pause = min(self._pause * 2, self._longest) if self._pause else self._first
        self._due_at = now + self._pause

    def reset(self) -> None:
        """It works again."""
        self._pause = 0.0
