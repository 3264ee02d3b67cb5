"""Readings of a metrics page -> fields of a sample: the part that every adapter shares.

Law 3: unknown is not zero. A field is a value or the word for why there is none.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvctl.core.outcomes import Absence, SourceFault
from kvctl.core.telemetry import MAX_RANKS, LengthHistogram, RankSample
from kvctl.engines.base import PageError
from kvctl.engines.page import Reading
from kvctl.engines.values import known, lengths

Value = float | int | bool | Absence
Series = Mapping[str, Sequence[Reading]]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a field of RankSample is found: the first of ``names`` that is on the page counts."""

    field: str
    names: tuple[str, ...]
    read: Callable[[float], Value]
    where: tuple[str, str] | None = None  # a label and the value it must have
    summed: bool = False  # copies are parts, told apart by labels, and add up


def by_name(readings: Iterable[Reading], names: Iterable[str], prefixes: Sequence[str] = ("",)) -> Series:
    """Readings by name without prefix. A re-exported copy (a later prefix) counts if the original lacks."""
    found: defaultdict[str, list[Reading]] = defaultdict(list)
    for reading in readings:
        found[reading.name].append(reading)
    return {name: next((found[p + name] for p in prefixes if found[p + name]), []) for name in names}


def of_engine(ranks: list[str]) -> list[str]:
    """``ranks`` of a page, where one engine can have so many. Raises PageError."""
    if len(ranks) > MAX_RANKS:
        raise PageError(SourceFault.TOO_LARGE, f"the page has {len(ranks)} ranks, more than {MAX_RANKS}")
    return ranks


def wanted(names: Iterable[str], prefixes: Sequence[str]) -> frozenset[str]:
    """Full names of the series to keep of a page."""
    return frozenset(prefix + name for prefix in prefixes for name in names)


def agreed(readings: Sequence[Reading], read: Callable[[float], Value]) -> Value:
    """What all copies say; NOT_SUPPORTED where they contradict each other."""
    values = {read(reading.value) for reading in readings}
    if not values:
        return Absence.MISSING
    return values.pop() if len(values) == 1 else Absence.NOT_SUPPORTED


def total(readings: Sequence[Reading], read: Callable[[float], Value]) -> Value:
    """The sum of the parts; the first bad one's word where any is bad."""
    values = [read(reading.value) for reading in readings]
    bad = next((value for value in values if isinstance(value, Absence)), None)
    if not values:
        return Absence.MISSING
    return bad if bad is not None else sum(value for value in values if not isinstance(value, Absence))


def field_of(source: Source, series: Series) -> Value:
    """The preferred name that is there speaks alone, even if what it says is no good."""
    for name in source.names:
        readings = series.get(name, ())
        if source.where is not None:
            label, value = source.where
            readings = [reading for reading in readings if reading.labels.get(label) == value]
        if readings:
            return (total if source.summed else agreed)(readings, source.read)
    return Absence.MISSING


def length_histogram(buckets: Sequence[Reading]) -> LengthHistogram | Absence:
    """The histogram of one rank's buckets; NOT_SUPPORTED where copies contradict each other."""
    pairs = {(bucket.labels.get("le", ""), bucket.value) for bucket in buckets}
    if len(pairs) > len({bound for bound, _ in pairs}):
        return Absence.NOT_SUPPORTED
    return lengths(list(pairs))


def label_of(series: Series, label: str) -> str:
    """The one value that ``label`` has on all readings that carry it, else ""."""
    values = {r.labels[label] for readings in series.values() for r in readings if label in r.labels}
    return values.pop() if len(values) == 1 else ""


def name_of(readings: Sequence[Reading]) -> str:
    """What the page calls a series, "" where it is not there."""
    return readings[0].name if readings else ""


def sample_of(rank: str, at: float, found: Mapping[str, Any], **plain: Any) -> RankSample:
    """A sample whose fields ``found`` are values or absences; ``plain`` fields are taken as they are."""
    absent = {name: value for name, value in found.items() if isinstance(value, Absence)}
    values: dict[str, Any] = {name: known(value) for name, value in found.items()}
    return RankSample(rank=rank, at=at, absent=absent, **values, **plain)


def length(value: object) -> int | None:
    """A count of tokens or sequences in an engine's JSON: a whole number above zero, else None."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value < 1 << 53 else None


def text(value: object) -> str | None:
    """A name in an engine's JSON."""
    return value if isinstance(value, str) and value else None


def json_object(body: str | bytes | None) -> Mapping[str, Any]:
    """The JSON object that an engine answered; empty for anything else."""
    try:
        found = json.loads(body or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def inside(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object within an engine's JSON; empty where there is none."""
    found = answer.get(name)
    return found if isinstance(found, Mapping) else {}
