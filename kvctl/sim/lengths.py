"""How long answers are when the request does not say: a seeded log-normal, cut at both ends."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths with that mean and sigma of the logarithm, held to ``low`` .. ``high`` tokens."""

    mean: float
    sigma: float
    low: int = 1
    high: int = 1_000_000

    def draw(self, source: random.Random) -> int:
        """One length in tokens."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(self.low, min(self.high, round(source.lognormvariate(mu, self.sigma))))


ANSWERS = LogNormal(mean=180, sigma=0.9, low=2, high=4096)
"""Chat answers: right-skewed, a mean of some 180 tokens, one in a hundred past 900."""
