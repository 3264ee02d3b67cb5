"""Gates that foresee occupancy by sorting what is left of each answer: past-future, and the clairvoyant.

With held tokens ``a`` and ``r`` more to come, a batch sorted by ``r`` downwards peaks at the end of one of
its answers:  peak = max over k of  sum(a[:k]) + k r[k].  Past-future draws ``r`` from recent lengths, the
clairvoyant knows it.
"""

import random
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from kvctl.core.retry import RetryHints
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
    true_output: int


def peak(batch: list[tuple[int, int]]) -> int:
    """Highest occupancy of ``(held, left)`` pairs that all advance together."""
    highest = held_so_far = 0
    for count, (held, left) in enumerate(sorted(batch, key=lambda pair: -pair[1]), 1):
        held_so_far += held
        highest = max(highest, held_so_far + count * left)
    return highest


class _Foreseeing(Door):
    """Keeps the batch in flight."""

    follows_tokens = True

    def __init__(self, context: int) -> None:
        self._context = context
        self._batch: dict[str, _Flight] = {}

    def progressed(self, request_id: str, tokens: int, now: float) -> None:  # noqa: ARG002 - one signature
        """The answer has grown."""
        flight = self._batch[request_id]
        flight.held += tokens
        flight.output += tokens

    def ended(self, request_id: str, output_tokens: int, now: float, *, finished: bool, broken: bool) -> None:  # noqa: ARG002
        """Out of the batch."""
        del self._batch[request_id]

    def _enter(self, offer: Offer) -> _Flight:
        room = self._context - offer.prompt
        cap = room if offer.cap is None else min(offer.cap, room)
        flight = _Flight(offer.prompt, 0, cap, min(offer.true_output, cap))
        self._batch[offer.id] = flight
        return flight


class PastFuture(_Foreseeing):
    """LightLLM's past-future queue as a gate.

    Lengths are drawn from the last 200, longer than the answer is by now, interpolated between neighbours and
    up to the request's own cap; a newcomer's from all of them. The peak is the largest of up to five such
    draws, and 0.95 of the pool is its limit.
    """

    def __init__(self, capacity: int, context: int, seed: int) -> None:
        super().__init__(context)
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
        self._enter(offer)
        return ADMITTED

    def ended(self, request_id: str, output_tokens: int, now: float, *, finished: bool, broken: bool) -> None:
        """One more length in the history."""
        super().ended(request_id, output_tokens, now, finished=finished, broken=broken)
        if not broken:
            self._history.append(output_tokens)

    def _left(self, one: _Flight, lengths: list[int]) -> float:
        points = [one.output, *lengths[bisect_right(lengths, one.output) :], max(one.cap, one.output)]
        at = self._random.random() * (len(points) - 1)
        low, high = points[int(at) : int(at) + 2]
        return round(low + (high - low) * (at - int(at))) - one.output


class Clairvoyant(_Foreseeing):
    """Knows every length, admits whoever fits in order of arrival, says when to come back as the gate does."""

    def __init__(self, budget: float, context: int, block: int, retry_after_max_s: float, seed: float) -> None:
        super().__init__(context)
        self._budget = budget
        self._block = block
        self._retry = RetryHints(longest_s=retry_after_max_s, seed=seed)

    def arrived(self, offer: Offer, now: float) -> Verdict:
        """Admit when the very peak fits."""
        before = dict(self._batch)
        self._enter(offer)
        missing = self._peak() - self._budget
        if missing <= 0 or not before:
            self._retry.admitted()
            return ADMITTED
        self._batch = before
        return Verdict(admitted=False, retry_after_s=self._retry.after(missing, now))

    def ended(self, request_id: str, output_tokens: int, now: float, *, finished: bool, broken: bool) -> None:
        """Out of the batch; the fall of the peak is the drain."""
        before = self._peak()
        super().ended(request_id, output_tokens, now, finished=finished, broken=broken)
        self._retry.drained(before - self._peak(), now)

    def _peak(self) -> int:
        """Whole blocks: at most one block more than its tokens for each sequence."""
        return peak([(one.held + self._block - 1, one.true_output - one.output) for one in self._batch.values()])
