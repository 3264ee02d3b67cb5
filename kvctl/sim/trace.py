"""Request traces as CSV, one request a row, plain or gzipped.

Columns: ``t_s, input_tokens, output_tokens``, and where known ``client_id`` (the tenant), ``parent_row`` and
``shared_prefix_tokens`` (the prompt begins with that many tokens of that row's prompt). Other columns are
left alone. Rows are numbered from 0 in the file's order; a parent stands before its children.
"""

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TextIO

NEEDED = ("t_s", "input_tokens", "output_tokens")
BROKEN = (OSError, EOFError, zlib.error)
"""What a cut or broken archive raises."""


class TraceError(ValueError):
    """A file that is no trace; the text says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request of a trace. ``parent`` None: shares its prefix with nobody.

    ``lineage`` is the same to the first of its ancestors: ``(end, row)``, rising: the tokens up to ``end``
    were first in the prompt of that row.
    """

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    parent: int | None = None
    shared_tokens: int = 0
    lineage: tuple[tuple[int, int], ...] = ()


def read_trace(path: Path) -> list[Row]:
    """All rows in order of arrival. Raises TraceError, or OSError where the file cannot be read."""
    with opened(path) as file:
        reader = csv.DictReader(file)
        try:
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            rows: list[Row] = []
            for number, cells in enumerate(() if missing else reader):
                rows.append(_descended(_row(number, cells), rows))
        except (ValueError, TypeError, csv.Error) as error:
            raise TraceError(f"{path}, line {max(reader.line_num, 1)}: {error}") from None
        except BROKEN as error:
            raise TraceError(f"{path}, line {max(reader.line_num, 1)}: {error}") from None
    if missing:
        raise TraceError(f"{path}: no column {', '.join(missing)}")
    if not rows:
        raise TraceError(f"{path}: no requests")
    return sorted(rows, key=lambda row: row.at_s)


def window(rows: Sequence[Row], start: int, count: int | None) -> list[Row]:
    """``count`` rows from the ``start``-th arrival on (None: to the end), with times from 0.

    Raises TraceError if the trace has no such row.
    """
    chosen = rows[start:] if count is None else rows[start : start + count]
    if not chosen:
        raise TraceError(f"the trace has {len(rows)} requests, none from {start} on")
    first = chosen[0].at_s
    return [replace(row, at_s=row.at_s - first) for row in chosen]


def at_rate(rows: Sequence[Row], per_s: float | None) -> list[Row]:
    """The same arrivals, stretched so that the mean rate is ``per_s``; None: as recorded."""
    span = rows[-1].at_s
    if per_s is None or span <= 0.0:
        return list(rows)
    stretch = (len(rows) - 1) / per_s / span
    return [replace(row, at_s=row.at_s * stretch) for row in rows]


def that_fit(rows: Sequence[Row], context_tokens: int) -> list[Row]:
    """Those whose prompt and answer fit a context: the rest no engine of that size would serve."""
    return [row for row in rows if row.prompt_tokens + row.output_tokens <= context_tokens]


@contextmanager
def opened(path: Path, errors: str = "strict") -> Iterator[TextIO]:
    """The text of a file, plain or gzipped. ``errors``: of what is not UTF-8."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    plain = "utf-8-sig"  # spreadsheets put a mark before it
    if packed:
        with gzip.open(path, "rt", encoding=plain, errors=errors, newline="") as file:
            yield file
    else:
        with path.open(encoding=plain, errors=errors, newline="") as file:
            yield file


def _row(number: int, cells: dict[str, str]) -> Row:
    parent = int(cells.get("parent_row") or -1)
    row = Row(
        number=number,
        at_s=float(cells["t_s"]),
        prompt_tokens=int(cells["input_tokens"]),
        output_tokens=int(cells["output_tokens"]),
        tenant=cells.get("client_id") or "",
        parent=parent if parent >= 0 else None,
        shared_tokens=int(cells.get("shared_prefix_tokens") or 0),
    )
    if not isfinite(row.at_s):
        raise ValueError(f"not a time: {cells['t_s']}")
    if row.prompt_tokens < 1 or row.output_tokens < 1:
        raise ValueError(f"not a request: {row.prompt_tokens} tokens in, {row.output_tokens} out")
    return row


def _descended(row: Row, earlier: Sequence[Row]) -> Row:
    """The row with its lineage. Raises ValueError where its parent is no earlier row."""
    if row.parent is None:
        return row
    if row.parent >= len(earlier):
        raise ValueError(f"row {row.parent} is no parent of row {row.number}: it comes later")
    parent = earlier[row.parent]
    shared = min(row.shared_tokens, parent.prompt_tokens, row.prompt_tokens)
    lineage = [(end, owner) for end, owner in parent.lineage if end < shared]
    first = next((owner for end, owner in parent.lineage if end >= shared), parent.number)
    return replace(row, lineage=(*lineage, (shared, first))) if shared > 0 else row
