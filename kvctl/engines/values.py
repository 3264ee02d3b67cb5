"""A reading's number or text -> a good value, or the word for why there is none.

Law 3: unknown is not zero. Nothing here clamps: what is out of range is absent.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

from kvctl.core.outcomes import Absence
from kvctl.core.telemetry import LengthHistogram

_MOST = 2**53  # whole numbers beyond are not exact in a double, and no engine counts that far
_DIGITS = 15

T = TypeVar("T")


def ratio(value: float) -> float | Absence:
    """A share of 0 to 1."""
    if not math.isfinite(value):
        return Absence.NOT_FINITE
    return value if 0 <= value <= 1 else Absence.OUT_OF_RANGE


def counter(value: float) -> float | Absence:
    """A running total."""
    if not math.isfinite(value):
        return Absence.NOT_FINITE
    return value if 0 <= value <= _MOST else Absence.OUT_OF_RANGE


def count(value: float) -> int | Absence:
    """A whole number of things."""
    checked = counter(value)
    if isinstance(checked, Absence):
        return checked
    return int(checked) if checked.is_integer() else Absence.OUT_OF_RANGE


def flag(value: float) -> bool | Absence:
    """A gauge that is 0 or 1."""
    if not math.isfinite(value):
        return Absence.NOT_FINITE
    return bool(value) if value in (0, 1) else Absence.OUT_OF_RANGE


def positive(text: str | None) -> int | Absence:
    """A label that holds a whole number above zero. The text ``None`` is how Python engines say nothing."""
    if text is None or text in ("None", ""):
        return Absence.MISSING
    if not (text.isascii() and text.isdigit()):
        return Absence.UNPARSABLE
    if len(text) > _DIGITS or int(text) == 0:
        return Absence.OUT_OF_RANGE
    return int(text)


def truth(text: str | None) -> bool | Absence:
    """A label that holds a Python boolean."""
    if text is None or text in ("None", ""):
        return Absence.MISSING
    return text == "True" if text in ("True", "False") else Absence.UNPARSABLE


def lengths(buckets: Sequence[tuple[str, float]]) -> LengthHistogram | Absence:
    """``(le, cumulative count)`` pairs of one histogram, in any order."""
    if not buckets:
        return Absence.MISSING
    try:
        pairs = sorted((float(bound), number) for bound, number in buckets)
    except ValueError:
        return Absence.UNPARSABLE
    bounds = tuple(bound for bound, _ in pairs)
    counts = tuple(number for _, number in pairs)
    if any(math.isnan(bound) for bound in bounds) or not all(map(math.isfinite, counts)):
        return Absence.NOT_FINITE
    if len(set(bounds)) < len(bounds) or list(counts) != sorted(counts) or counts[0] < 0:
        return Absence.OUT_OF_RANGE
    return LengthHistogram(bounds=bounds, counts=counts)


def known(value: T | Absence) -> T | None:
    """The value, or None where it is an absence."""
    return None if isinstance(value, Absence) else value
