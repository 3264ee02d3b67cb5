"""LightLLM's past-future, which foresees occupancy by drawing what is left of each answer.

With held tokens ``a`` and ``r`` more to come, a batch sorted by ``r`` downwards peaks at the end of one of
its answers:  peak = max over k of  sum(a[:k]) + k r[k].
"""

import random
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from kvctl.sim.policies import ADMITTED, REFUSED, Door, Offer, Verdict

HISTORY = 200
MOST_LISTS = 5
SAMPLES = 200
KEPT_FREE = 0.05
FIRST_LENGTH = 1024  # what half of the history holds before anything has ended, unless answers may be shorter


@dataclass(slots=True)
class _Flight:
    held: int  # prompt and output so far
    output: int
    cap: int  # most output


def peak(batch: list[tuple[int, int]]) -> int:
    """Highest occupancy of ``(held, left)`` pairs that all advance together."""
    highest = held_so_far = 0
    for count, (held, left) in enumerate(sorted(batch, key=lambda pair: -pair[1]), 1):
        held_so_far += held
        highest = max(highest, held_so_far + count * left)
    return highest


class PastFuture(Door):
    """LightLLM's past-future queue as a gate.

    Lengths are drawn from the last 200, longer than the answer is by now, interpolated between neighbours and
    up to the request's own cap; a newcomer's from all of them. The peak is the largest of up to five such
    draws, and 0.95 of the pool is its limit.
    """

    follows_tokens = True

    def __init__(self, capacity: int, context: int, seed: int) -> None:
        self._context = context
        self._batch: dict[str, _Flight] = {}
        self._limit = capacity * (1.0 - KEPT_FREE)
        first = min(FIRST_LENGTH, context // 2)
        self._history = deque([first] * (HISTORY // 2), maxlen=HISTORY)
        self._random = random.Random(seed)  # noqa: S311 - a reproducible draw

    def arrived(self, offer: Offer, now: float) -> Verdict:  # noqa: ARG002 - one signature
        """Admit while the worst of a few drawn futures fits."""
        running = list(self._batch.values())
        lists = min(MOST_LISTS, SAMPLES // len(running) + 1) if running else 1
        lengths = sorted(self._history)
        for _ in range(lists):
            batch = [(one.held, self._left(one, lengths)) for one in running]
            batch.append((offer.prompt, self._random.choice(lengths)))
            if running and peak(batch) > self._limit:
                return REFUSED
        room = self._context - offer.prompt
        cap = room if offer.cap is None else min(offer.cap, room)
        self._batch[offer.id] = _Flight(offer.prompt, 0, cap)
        return ADMITTED

    def progressed(self, request_id: str, tokens: int, now: float) -> None:  # noqa: ARG002 - one signature
        """The answer has grown."""
        flight = self._batch[request_id]
        flight.held += tokens
        flight.output += tokens

    def ended(self, request_id: str, output_tokens: int, now: float, *, finished: bool, broken: bool) -> None:  # noqa: ARG002
        """One more length in the history."""
        del self._batch[request_id]
        if not broken:
            self._history.append(output_tokens)

    def _left(self, one: _Flight, lengths: list[int]) -> int:
        points = [one.output, *lengths[bisect_right(lengths, one.output) :], max(one.cap, one.output)]
        at = self._random.random() * (len(points) - 1)
        low, high = points[int(at) : int(at) + 2]
        return round(low + (high - low) * (at - int(at))) - one.output
