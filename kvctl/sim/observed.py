"""The histograms an engine keeps of its requests, with vLLM's buckets."""

from bisect import bisect_left
from dataclasses import dataclass, field

from kvctl.sim.scheduler import Sequence

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to ``limit``: vLLM's buckets of token counts."""
    values, decade = [], 1
    while decade <= limit:
        values += [float(step * decade) for step in (1, 2, 5) if step * decade <= limit]
        decade *= 10
    return tuple(values)


@dataclass(slots=True)
class Histogram:
    """Counts by bucket; ``bounds`` ascending, one more bucket above the last."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Observed:
    """What clients got, as the engine saw it."""

    def __init__(self, max_model_len: int) -> None:
        token_counts = one_two_five(max_model_len)
        self.first_token = Histogram(_FIRST_TOKEN_S)
        self.between_tokens = Histogram(_BETWEEN_TOKENS_S)
        self.generation_tokens = Histogram(token_counts)
        self.prompt_tokens = Histogram(token_counts)

    def token(self, *, since: float, now: float, first: bool) -> None:
        """A token came ``now``; the one before (or the request) at ``since``."""
        (self.first_token if first else self.between_tokens).add(now - since)

    def finished(self, sequence: Sequence) -> None:
        """A sequence ended by itself."""
        self.generation_tokens.add(sequence.output)
        self.prompt_tokens.add(sequence.prompt)
