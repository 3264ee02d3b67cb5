"""The simulated engine in virtual time.

Between two events nothing but time passes, and while all that runs decodes and nobody can start, a step is
like the one before: such steps are glided over in bulk. What comes of it is what step by step would give, to
the last token and the last bit of the clock.
"""

from bisect import bisect_right
from itertools import accumulate, chain
from math import inf

from kvctl.sim.observed import Histogram, one_two_five
from kvctl.sim.scheduler import EngineConfig, Plan, Sampled, Scheduler, Sequence

LONGEST_GLIDE = 256  # steps; admissions cut most glides long before
SHORTEST_GLIDE = 2


class VirtualEngine:
    """A scheduler and the moment ``due`` at which its step, or the last step of its glide, ends."""

    def __init__(self, config: EngineConfig) -> None:
        self.scheduler = Scheduler(config)
        self.lengths = Histogram(one_two_five(config.max_model_len))  # of the answers that ended
        self.due = inf
        self._plan: Plan | None = None
        self._ends: list[float] = []  # of the glide's steps
        self._glided = 0  # steps of the glide that the sequences show already

    def add(self, sequence: Sequence, now: float) -> None:
        """A sequence comes in; it can start when the step under way is over."""
        self._stop_glide(now)
        self.scheduler.add(sequence)
        if self._plan is None:
            self._next(now)

    def look(self, now: float) -> None:
        """Let sequences, pool and counters show what they are ``now``."""
        done = bisect_right(self._ends, now)
        if done > self._glided:
            self.scheduler.glide(done - self._glided, under_way=done < len(self._ends))
            self._glided = done

    def step_done(self) -> list[Sampled]:
        """What ended at ``due``: the tokens of a step. Those of a glide are only counted."""
        now, sampled = self.due, []
        if self._plan is not None:
            sampled, self._plan = self.scheduler.commit(self._plan), None
            for one in sampled:
                if one.finish is not None:
                    self.lengths.add(one.sequence.output)
        else:
            self.look(now)
        self._next(now)
        return sampled

    def _next(self, now: float) -> None:
        self._ends, self._glided = [], 0
        steps = self.scheduler.glidable(LONGEST_GLIDE)
        if steps >= SHORTEST_GLIDE:
            self._ends = list(accumulate(chain((now,), self.scheduler.glide_seconds(steps))))[1:]
            self.due = self._ends[-1]
            self.scheduler.glide(0, under_way=True)
            return
        self._plan = self.scheduler.plan()
        self.due = inf if self._plan is None else now + self._plan.seconds

    def _stop_glide(self, now: float) -> None:
        """Go on step by step: the step under way ends when it would have."""
        if not self._ends:
            return
        self.look(now)
        self.due = self._ends[self._glided]
        self._plan = self.scheduler.step_under_way()
        self._ends, self._glided = [], 0
