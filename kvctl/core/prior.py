"""What is believed of output lengths before, and beyond, what a class has shown by itself.

At the start nobody has got far, and the forecast lives by what is believed of the lengths beyond. A quarter
of the cap, taken at its word, held half of a pool back for as long as the first long answers took. So
stretches of length that double are gone through in order, and each says of the next what to expect: its
hazard per token, drawn half way back, as ratios go, to the one that caps suggest. Where nobody was seen yet
that is nearly the last stretch's, and some stretches on the caps' own. With ``d`` ends seen over an exposure
of ``e`` tokens (answers at risk, times the tokens that they went through), in a stretch of ``w`` tokens,

    h      = sqrt(hazard of the stretch before x hazard by the caps)
    t      = min(w, 1 / h)
    hazard = (PRIOR_WEIGHT t h + d) / (PRIOR_WEIGHT t + e)

so that the belief counts as that many answers that came so far. A stretch that somebody went through and
where nobody ended is no proof that nobody ever ends there, nor is one end the proof of a rate.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import exp, isinf, log1p, sqrt

from kvctl.core.slots import LONGEST, SLOT_ENDS, SLOT_STARTS
from kvctl.core.telemetry import LengthHistogram

CAP_MOST = 4096  # a longer cap says "whatever fits" and not "long"
HISTOGRAM_MIN = 200  # answers the engine's histogram needs before it is believed
PRIOR_WEIGHT = 20.0  # answers that a belief counts as

_OCTAVES = [(0, 16), *((16 << k, 32 << k) for k in range(17))]
_SLOTS_OF_OCTAVES = [
    (bisect_left(SLOT_STARTS, start), bisect_left(SLOT_STARTS, end)) for start, end in _OCTAVES
]


def mean_of_cap(cap: int) -> float:
    """Tokens of an answer as its cap suggests them."""
    return min(cap, CAP_MOST) / 4.0


def seen_by_octave(finished: Sequence[int], beyond: Sequence[int]) -> list[tuple[int, float]]:
    """Ends in each octave, and the slots that answers went through in it, half of the one where each left.

    ``finished`` by slot, ``beyond``: at risk at the start of each, and after the last.
    """
    return [
        (sum(finished[first:last]), sum(beyond[first:last]) - 0.5 * (beyond[first] - beyond[last]))
        for first, last in _SLOTS_OF_OCTAVES
    ]


def learned_hazards(seen: Sequence[tuple[int, float]], by_caps: float) -> list[float]:
    """Hazard of each slot as a history shows it, octave by octave.

    ``seen`` as ``seen_by_octave`` has it; ``by_caps``: the hazard per token where nothing is known.
    """
    rate = by_caps
    hazards: list[float] = []
    for (first, last), (ended, exposure) in zip(_SLOTS_OF_OCTAVES, seen, strict=True):
        width = SLOT_ENDS[first] - SLOT_STARTS[first]  # of all slots in an octave
        rate = _hazard(sqrt(rate * by_caps), width * (last - first), ended, exposure * width)
        hazards += [1.0 - exp(-rate * width)] * (last - first)
    return hazards


def _hazard(expected: float, span: float, ended: float, exposure: float) -> float:
    """Hazard per token of a stretch of ``span`` tokens, with what was seen in it."""
    believed = PRIOR_WEIGHT * min(span, 1.0 / expected)
    return (believed * expected + ended) / (believed + exposure)


def histogram_hazards(histogram: LengthHistogram, in_flight: Iterable[int] = ()) -> list[float] | None:
    """Hazard of each slot from the engine's cumulative histogram; None while it has too few answers.

    It knows finished answers only, and short ones finish first: those ``in_flight`` were at risk too, up to
    their present lengths, and for half of the bucket that they are in.
    """
    if histogram.total < HISTOGRAM_MIN:
        return None
    present, by_caps = sorted(in_flight), 1.0 / mean_of_cap(CAP_MOST)
    rates: list[tuple[float, float]] = []
    rate, before, start = by_caps, 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if isinf(bound):
            break
        ended, first, last = count - before, bisect_left(present, start), bisect_left(present, bound)
        at_risk = histogram.total - before + len(present) - 0.5 * (first + last)
        span = max(bound - start, 1.0)
        rate = _hazard(sqrt(rate * by_caps), span, ended, _exposure(ended, at_risk) * span)
        rates.append((bound, rate))
        before, start = count, bound
    while start < LONGEST:
        start = 2.0 * start or 16.0
        rate = sqrt(rate * by_caps)
        rates.append((start, rate))
    return _hazards_of_slots(rates, by_caps)


def _exposure(ended: float, at_risk: float) -> float:
    """What ``at_risk`` answers went through of a bucket, in its widths, with a constant hazard in it."""
    if ended <= 0.0:
        return max(at_risk, 0.0)
    return ended / -log1p(-min(ended / at_risk, 0.999))


def merged(histograms: Sequence[LengthHistogram]) -> LengthHistogram:
    """The sum of the histograms of several ranks; those with other bounds than the first are left out."""
    bounds = histograms[0].bounds
    counts = [histogram.counts for histogram in histograms if histogram.bounds == bounds]
    return LengthHistogram(bounds=bounds, counts=tuple(map(sum, zip(*counts, strict=True))))


def _hazards_of_slots(rates: Sequence[tuple[float, float]], beyond: float) -> list[float]:
    """Hazard of each slot from hazards per token: pairs of (end, rate), and the rate ``beyond`` them."""
    return [_slot_hazard(a, b, rates, beyond) for a, b in zip(SLOT_STARTS, SLOT_ENDS, strict=True)]


def _slot_hazard(start: int, end: int, rates: Sequence[tuple[float, float]], beyond: float) -> float:
    """Hazard of one slot that may span several stretches."""
    integral, at = 0.0, float(start)
    for bound, rate in rates:
        if bound > at:
            reach = min(bound, end)
            integral += (reach - at) * rate
            at = reach
        if at >= end:
            break
    integral += (end - at) * beyond
    return 1.0 - exp(-integral)
