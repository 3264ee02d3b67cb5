"""Output-length distributions: S(x) = P(output > x), per class of request.

Law 10: the request in hand beats the estimate. Tables are read conditionally, S(g + t) / S(g), with g the
tokens that the request has shown already.

Kaplan-Meier on slots of output length. Answers that are cut (client gone, error, cap reached) and requests
still in flight are censored at their present length: they were at risk that far and no further. Fed with
finished lengths only, the start of a burst of equal long answers would look three to five times too short.

Where callers know their lengths (classification, extraction, benchmarks) they send caps that their answers
fill. A distribution over the class forgets that each answer's own cap is known; then the cap is the length.

Cold start: ``PRIOR_WEIGHT`` pseudo-requests drawn from a prior stand in the same table. For a whole table
that is S = (k prior + n history) / (k + n); written per slot it also holds where history is censored, and
where nobody of the history is left at risk the prior alone speaks. The prior of a (model, route, tenant) is
(model, route), of that (model), of that the engine's own histogram of output lengths, else what the model's
own answers let one believe of the next stretch of lengths (``prior``), and at the very start the cap. One
beyond ``CAP_MOST`` counts as that: it says "whatever fits" and not "long". Taken at its word, a context of
32,768 let four callers without a limit into a pool of 48,000 where twenty-five fit, and with so few in flight
it took a minute to learn better.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, islice
from math import log, sqrt
from operator import add, itemgetter, mul, neg, sub
from typing import NamedTuple

from kvctl.core.correlation import RHO_MOST, correlation
from kvctl.core.prior import (
    CAP_MOST,
    PRIOR_WEIGHT,
    histogram_hazards,
    learned_hazards,
    mean_of_cap,
    merged,
    seen_by_octave,
)
from kvctl.core.slots import LONGEST, SLOT_OF, SLOTS, slot_of
from kvctl.core.telemetry import LengthHistogram

Key = tuple[str, ...]
Answer = tuple[Key, int, bool, int | None]
"""Its class, tokens per sequence, whether it ended by itself, and the cap where nothing else could cut it."""

WINDOW = 2000  # answers remembered per class
KEPT = 20  # of them, whatever is forgotten
MOST_CLASSES = 1024  # classes remembered; the one whose last answer is longest ago goes first
TAKEN_IN_AT_ONCE = 64  # answers: what runs often in a row costs less than between other code
MOST_TABLES = 4096  # callers name models as they like, and each name is a class
RENEWED_PER_REFRESH = 8  # tables; with more classes than that in flight, each is renewed in its turn
FINE_STEPS = 16384  # tokens ahead up to which survival is read at three steps to an octave, then at two
CAPPED_OF = 60  # answers over which it is judged whether caps bind
CAPPED_FEWEST = 20  # answers before it is judged at all
CAPPED_SHARE = 0.9  # of the output that callers allowed: with more of it made, the cap is the length
_CLASS_OF_CAP = [max(cap - 1, 15).bit_length() for cap in range(CAP_MOST + 1)]
"""The prior by cap is made for powers of two; the engine's histogram knows no cap."""
_FLOOR = 1e-12  # keeps S(g) a divisor; a request out there is taken to run to its cap


def _steps() -> list[int]:
    steps, width = [0, 8, 16, 32, 48], 64
    while width <= LONGEST:
        steps += [width + eighths * width // 8 for eighths in ((0, 2, 5) if width < FINE_STEPS else (0, 4))]
        width *= 2
    return steps


STEPS: Sequence[int] = _steps()
"""Decode steps ahead at which survival is read: multiples of 8, geometric past 64.

Each lease is charged what it holds at the end of an interval, so wide intervals overcharge all of them.
"""


@lru_cache(maxsize=1 << 14)
def _slots_ahead(at: int, nodes: int) -> Callable[[Sequence[float]], tuple[float, ...]]:
    """What picks S at the first STEPS ahead of an answer that has shown 8 x ``at`` tokens."""
    return itemgetter(*[SLOT_OF[at + (step >> 3)] for step in STEPS[:nodes]])


def survival_from_hazards(hazards: Iterable[float]) -> list[float]:
    """S at the start of each slot (the first is 1.0), floored above zero."""
    survivors = list(islice(accumulate([1.0 - h for h in hazards], mul, initial=1.0), SLOTS))
    known = bisect_left(survivors, -_FLOOR, key=neg)
    return survivors[:known] + [_FLOOR] * (len(survivors) - known)


class Ahead(NamedTuple):
    """What lies ahead of an answer of a given length, at the first of STEPS."""

    alive: list[float]  # S(g + t) / S(g)
    spread: list[float]  # sqrt(alive (1 - alive))


class Table:
    """S at each slot start for one class, read conditionally; ``factor``: by which its hazards are scaled."""

    __slots__ = ("_ahead", "_factor", "survival")

    def __init__(self, survival: Sequence[float], factor: float = 1.0) -> None:
        self.survival = survival
        self._factor = factor
        self._ahead: dict[int, Ahead] = {}

    @property
    def to_the_cap(self) -> bool:
        """Whether nothing but the cap ends these answers."""
        return self.survival is TO_THE_CAP

    def hazard(self, start: int, end: int) -> float:
        """The cumulated hazard, unscaled, that an answer passes through from ``start`` tokens to ``end``."""
        survival = self.survival
        first, last = survival[SLOT_OF[min(start, LONGEST) >> 3]], survival[SLOT_OF[min(end, LONGEST) >> 3]]
        return log(first / last) / self._factor

    def ahead(self, shown: int, nodes: int = len(STEPS)) -> Ahead:
        """What lies ahead of an answer that has shown ``shown`` tokens (alike for eight lengths in a row).

        At the first ``nodes`` of STEPS, or at more of them.
        """
        at = shown >> 3 if shown < LONGEST else LONGEST >> 3
        found = self._ahead.get(at)
        if found is None or len(found.alive) < nodes:
            base = self.survival[SLOT_OF[at]]
            alive = [s / base for s in _slots_ahead(at, -(-nodes // 8) * 8)(self.survival)]
            found = self._ahead[at] = Ahead(alive, [sqrt(a * (1.0 - a)) for a in alive])
        return found


TO_THE_CAP: Sequence[float] = [1.0] * SLOTS
"""S of a class whose answers run to their caps: each is charged what it may make, for as long as it may."""


class CapUse:
    """How much of what callers allowed the last ``CAPPED_OF`` answers of a class made, in tokens.

    Tokens are compared and not answers: a crowd of one-token answers with a cap of one must not charge the
    worst case to the few that may talk at length.
    """

    __slots__ = ("_answers",)

    def __init__(self) -> None:
        self._answers: deque[tuple[int, int]] = deque(maxlen=CAPPED_OF)

    def take(self, answers: Iterable[tuple[int, int]]) -> None:
        """Answers that came to their ends: the tokens that each sequence made, and that it was allowed."""
        self._answers.extend(answers)

    def binds(self) -> bool | None:
        """Whether answers of this class run to their caps; None: too few to say."""
        if len(self._answers) < CAPPED_FEWEST:
            return None
        made, allowed = map(sum, zip(*self._answers, strict=True))
        return made >= CAPPED_SHARE * allowed


def mark_of(output_tokens: int, *, finished: bool) -> int:
    """The slot of an answer that ended by itself, ``~slot`` of one that was cut."""
    slot = slot_of(output_tokens)
    return slot if finished else ~slot


class LengthHistory:
    """The last ``WINDOW`` answers of one class, counted by slot; ``whole``: how many of them nobody cut."""

    __slots__ = ("_records", "_whole", "cap_use", "censored", "finished", "whole")

    def __init__(self) -> None:
        self.cap_use = CapUse()
        self._records: deque[int] = deque()  # marks
        self._whole: deque[bool] = deque()  # of each, whether it came to its end or its cap
        self.whole = 0
        self.finished = [0] * SLOTS
        self.censored = [0] * SLOTS

    def __len__(self) -> int:
        return len(self._records)

    def take(self, marks: Sequence[int], whole: Sequence[bool]) -> None:
        """Answers that ended, each as ``mark_of`` has it, and whether it came to its end or its cap."""
        finished, censored = self.finished, self.censored
        for mark in marks:
            if mark >= 0:
                finished[mark] += 1
            else:
                censored[~mark] += 1
        self._records.extend(marks)
        self._whole.extend(whole)
        self.whole += sum(whole)
        self.forget(len(self._records) - WINDOW)

    def forget(self, answers: int) -> None:
        """The oldest answers count no more."""
        for _ in range(answers):
            old = self._records.popleft()
            self.whole -= self._whole.popleft()
            if old >= 0:
                self.finished[old] -= 1
            else:
                self.censored[~old] -= 1

    def cut(self, in_flight: Iterable[int]) -> list[int]:
        """By slot: answers that were cut there, and those in flight that have got so far by now."""
        cut = self.censored.copy()
        for slot in in_flight:
            cut[slot] += 1
        return cut

    def at_risk(self, cut: Sequence[int]) -> "AtRisk":
        """Who was seen in each slot, ``cut`` as the method of that name has it."""
        gone = list(map(add, self.finished, cut))
        beyond = list(accumulate(gone, sub, initial=sum(gone)))
        seen = beyond.index(0)
        # The actuarial convention: who is censored within a slot was at risk for half of it.
        exposed = [there - 0.5 * left for there, left in zip(beyond[:seen], cut, strict=False)]
        ended = list(map(float, self.finished[:seen]))
        return AtRisk(ended, exposed, seen_by_octave(self.finished, beyond))


class AtRisk(NamedTuple):
    """What a history tells of each slot that anybody got to, and of each octave. The same for all caps."""

    ended: list[float]
    exposed: list[float]  # answers that went through it
    octaves: list[tuple[int, float]]

    def learned(self, by_caps: float) -> list[float]:
        """What these answers let one believe of others like them: a prior for every slot."""
        return learned_hazards(self.octaves, by_caps)

    def blended(self, prior: Sequence[float]) -> list[float]:
        """Hazard of each slot: these answers, and the prior's pseudo-requests, which speak alone beyond."""
        hazards, prior_alive = [], PRIOR_WEIGHT
        for died, there, prior_hazard in zip(self.ended, self.exposed, prior, strict=False):
            prior_died = prior_alive * prior_hazard
            hazards.append((died + prior_died) / (there + prior_alive))
            prior_alive -= prior_died
        return hazards + list(prior[len(hazards) :])


class SurvivalModel:
    """Survival tables of all classes of one engine. ``table`` is read; ``ended`` and ``refresh`` feed it."""

    def __init__(self) -> None:
        self.factor = 1.0  # on all hazards, of tables made from now on
        self._histories: dict[Key, LengthHistory] = {}
        self._ended: list[Answer] = []  # that they have yet to take in
        self._histogram: list[float] | None = None
        self._histogram_total = 0.0
        self._in_flight: Mapping[Key, Sequence[int]] = {}
        self._present: dict[Key, list[int]] = {}  # slots that those in flight have got to
        self._hazards: dict[tuple[Key, int], list[float]] = {}
        self._cut: dict[Key, list[int]] = {}
        self._at_risk: dict[Key, AtRisk] = {}  # the same for all caps
        self._tables: dict[tuple[Key, int], Table] = {}  # the one made longest ago first

    def ended(self, key: Key, output_tokens: int, *, finished: bool, allowed: int | None = None) -> None:
        """An answer of ``output_tokens`` per sequence came to its natural end, or was cut there.

        ``allowed`` is its cap, where nothing but the cap could have cut it. Several are taken in at once,
        before anything is read of them.
        """
        self._ended.append((key, output_tokens, finished, allowed))
        if len(self._ended) >= TAKEN_IN_AT_ONCE:
            self._take_in()

    def _take_in(self) -> None:
        ended, self._ended = self._ended, []
        if ended:
            self._at_risk.clear()
        for key, alike in groupby(ended, itemgetter(0)):
            answers = list(alike)
            marks = [mark_of(made, finished=finished) for _, made, finished, _ in answers]
            allowed = [(made, cap) for _, made, _, cap in answers if cap is not None]
            whole = [finished or cap is not None for _, _, finished, cap in answers]
            for level in _levels(key):
                history = self._histories.pop(level, None)
                if history is None:
                    history = LengthHistory()
                self._histories[level] = history  # the dict's order is that of the last answers
                history.take(marks, whole)
                history.cap_use.take(allowed)
            while len(self._histories) > MOST_CLASSES:
                del self._histories[next(iter(self._histories))]

    def forget(self, share: float) -> None:
        """So much of what each class remembers counts no more, the oldest first, down to KEPT answers."""
        self._take_in()
        for history in self._histories.values():
            spare = len(history) - KEPT
            if spare > 0:
                history.forget(min(int(share * len(history)) + 1, spare))

    def believe(self, histograms: Sequence[LengthHistogram]) -> None:
        """The engine's own histograms of output lengths, one per rank that has one, as the last prior."""
        total = sum(histogram.total for histogram in histograms)
        if histograms and (total > self._histogram_total * 1.1 or total < self._histogram_total):
            present = [tokens for lengths in self._in_flight.values() for tokens in lengths]
            self._histogram = histogram_hazards(merged(histograms), present)
            self._histogram_total = total

    def refresh(self, in_flight: Mapping[Key, Sequence[int]]) -> None:
        """Present output lengths of the requests in flight, by class; tables are made anew when read."""
        self._hazards.clear()
        self._cut.clear()
        self._at_risk.clear()
        for place in list(islice(self._tables, RENEWED_PER_REFRESH)):
            del self._tables[place]
        self._in_flight = in_flight
        self._present.clear()
        for key, lengths in in_flight.items():
            slots = [SLOT_OF[tokens >> 3] if tokens < LONGEST else SLOTS - 1 for tokens in lengths]
            for level in _levels(key):
                self._present.setdefault(level, []).extend(slots)

    def correlation(self) -> float:
        """How far the lengths of those in flight vary together, by what is known of their classes."""
        if self.factor < 1.0:
            return RHO_MOST
        self._take_in()
        known = {key: history.whole for key in self._in_flight if (history := self._histories.get(key))}
        return correlation((len(leases), known.get(key, 0)) for key, leases in self._in_flight.items())

    def table(self, key: Key, cap: int) -> Table:
        """S for requests of that class and output cap (the cap itself not applied)."""
        place = key, _CLASS_OF_CAP[min(cap, CAP_MOST)] if self._histogram is None else 0
        table = self._tables.get(place)
        if table is None:
            table = self._made(*place)
            if len(self._tables) >= MOST_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[place] = table
        return table

    def _made(self, key: Key, cap_class: int) -> Table:
        self._take_in()
        if self._caps_bind(key):
            return Table(TO_THE_CAP)
        hazards, factor = self._class_hazards(key, cap_class), self.factor
        if factor < 1.0:
            hazards = [factor * hazard for hazard in hazards]
        return Table(survival_from_hazards(hazards), factor)

    def _caps_bind(self, key: Key) -> bool:
        """By the class itself, or by the nearest of its parents that has seen enough."""
        for level in _levels(key):
            history = self._histories.get(level)
            binds = None if history is None else history.cap_use.binds()
            if binds is not None:
                return binds
        return False

    def _class_hazards(self, key: Key, cap_class: int) -> list[float]:
        if not key and self._histogram is not None:
            return self._histogram
        place = (key, cap_class)
        hazards = self._hazards.get(place)
        if hazards is None:
            hazards = self._hazards[place] = self._blended(key, cap_class)
        return hazards

    def _blended(self, key: Key, cap_class: int) -> list[float]:
        at_risk = self._at_risk.get(key) or self._seen(key)
        if len(key) <= 1 and self._histogram is None:
            prior = at_risk.learned(1.0 / mean_of_cap(1 << cap_class))
        else:
            prior = self._class_hazards(key[:-1], cap_class)
        return at_risk.blended(prior) if at_risk.exposed else prior

    def _seen(self, key: Key) -> AtRisk:
        history = self._histories.get(key) or LengthHistory()
        if key not in self._cut:
            self._cut[key] = history.cut(self._present.get(key, ()))
        seen = self._at_risk[key] = history.at_risk(self._cut[key])
        return seen


@lru_cache(maxsize=MOST_CLASSES)
def _levels(key: Key) -> tuple[Key, ...]:
    """The class itself and its parents: (model, route, tenant), (model, route), (model,)."""
    return tuple([key[:n] for n in range(len(key), 0, -1)])
