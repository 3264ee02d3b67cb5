"""Prometheus text -> the few samples that an adapter reads.

A page is mostly buckets that nobody reads: lines are filtered by name first and only the rest is parsed
(a 49 kB page of 600 lines costs about a tenth of a full parse, less where little moved). Law 6: nothing
slow. The page is cut in slices so that another thread gets its turn between them, and what is parsed is
bounded in lines and in characters a line; a series that dumps a whole configuration into its labels is
dropped, never parsed.
"""

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client.parser import text_string_to_metric_families

from kvctl.core.outcomes import SourceFault
from kvctl.engines.base import PageError

MAX_PAGE_LINES = 400_000  # of a whole page; 128 ranks have about 77,000
MAX_LINES = 20_000  # wanted lines; 128 ranks have about 5,000
MAX_WANTED_CHARS = 2_097_152  # of those together; 128 ranks have about 800,000
_ESCAPE_CHARS = 16  # as which each escape counts: the parser takes so much longer for it
MAX_LINE_CHARS = 16_384  # the longest line of a real page has 1,300
_SLICE_CHARS = 262_144

_PROBE = 0.8414709848078965
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{1,18})?(?:e[+-]?\d\d)?", re.ASCII)  # as most values are written
_SERIES = re.compile(r"[a-zA-Z_:][\w:]*(?:\{.*\})?[ \t]+\S", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample as exposed."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Page:
    """The readings of the wanted series, and which of the marked prefixes the page has series of."""

    readings: tuple[Reading, ...]
    marks: frozenset[str]


def read_page(page: str, wanted: AbstractSet[str], marks: tuple[str, ...] = ()) -> Page:
    """Readings of the series named in ``wanted``; presence of series that start with one of ``marks``.

    Raises PageError: ``unparsable`` when the text is no exposition or a wanted line is broken,
    ``too_large`` when there are more lines, or more to be parsed of them, than any real engine has.
    """
    kept: list[str] = []
    seen: set[str] = set()
    for lines in _slices(page):
        known: dict[str, bool] = {}  # what stands before labels: many lines have it in common
        for line in lines:
            if line.startswith("#"):
                continue
            head = line.partition("{")[0]
            keep = known.get(head)
            if keep is None:
                keep = known[head] = _is_wanted(head, wanted)
                if not keep and head.startswith(marks):
                    seen |= _marks_of(head, marks)
            if keep and len(line) <= MAX_LINE_CHARS:
                kept.append(line)
            elif keep:
                seen |= _marks_of(head, marks)
        if len(kept) > MAX_LINES:
            raise PageError(SourceFault.TOO_LARGE, f"more than {MAX_LINES} lines of known series")
    _bound_cost(kept)
    if not kept and not is_exposition(page):
        raise PageError(SourceFault.UNPARSABLE, "not a Prometheus exposition")
    readings = (reading for line in kept for reading in _parse(line.strip()))
    return Page(tuple(readings), frozenset(seen))


def _bound_cost(lines: list[str]) -> None:
    """Raises PageError where parsing these would take seconds."""
    if sum(map(len, lines)) + _ESCAPE_CHARS * sum(line.count("\\") for line in lines) > MAX_WANTED_CHARS:
        raise PageError(SourceFault.TOO_LARGE, f"more than {MAX_WANTED_CHARS} characters of known series")


def is_exposition(page: str) -> bool:
    """Whether the first lines with anything on them are comments or series (an empty page passes)."""
    lines = (line for line in page[:_SLICE_CHARS].split("\n") if line.strip())
    first = next(lines, "#").lstrip()
    return first.startswith("#") or _SERIES.match(first) is not None


def _slices(page: str) -> Iterator[list[str]]:
    """Lines, some at a time. Only a line feed ends one: label values may hold every other separator.

    Raises PageError where there are too many.
    """
    if page.count("\n") > MAX_PAGE_LINES:
        raise PageError(SourceFault.TOO_LARGE, f"more than {MAX_PAGE_LINES} lines")
    start = 0
    while start < len(page):
        end = page.find("\n", start + _SLICE_CHARS)
        end = len(page) if end < 0 else end
        yield page[start:end].split("\n")
        start = end + 1


def _marks_of(head: str, marks: tuple[str, ...]) -> set[str]:
    return {mark for mark in marks if head.startswith(mark)}


def _is_wanted(head: str, wanted: AbstractSet[str]) -> bool:
    """Whether what stands before the labels of a line, if it has any, begins with a wanted name."""
    words = head.split(None, 1)
    return bool(words) and words[0] in wanted


@lru_cache(maxsize=1024)
def _parse(line: str) -> tuple[Reading, ...]:
    """Kept, since most lines stay from poll to poll: the info series, which costs most, and many buckets."""
    head, _, value = line.rpartition(" ")
    if _NUMBER.fullmatch(value) and (series := _series(head)) is not None:
        return (Reading(series.name, series.labels, float(value)),)
    return _parse_all(line)


@lru_cache(maxsize=1024)
def _series(head: str) -> Reading | None:
    """What stands before a lone value: kept, since only values move. None: that is not all that ``head`` is.

    Its reading has a value that no engine wrote: what is read of a line with it is a line's last word.
    """
    if repr(_PROBE) in head:
        return None
    try:
        read = _parse_all(f"{head} {_PROBE!r}")
    except PageError:
        return None
    return read[0] if len(read) == 1 and read[0].value == _PROBE else None


def _parse_all(line: str) -> tuple[Reading, ...]:
    try:
        return tuple(
            Reading(sample.name, sample.labels, float(sample.value))
            for family in text_string_to_metric_families(line)
            for sample in family.samples
        )
    except Exception as error:  # noqa: BLE001 - a stranger's text; the parser's errors are not documented
        raise PageError(SourceFault.UNPARSABLE, f"broken line: {str(error)[:200]}") from None
