"""Least squares with no coefficient below zero, for a handful of them."""

from collections.abc import Iterable, Sequence
from itertools import combinations

_SINGULAR = 1e-9


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients ``c`` with ``sum(row * c)`` nearest to the values; 0 for whatever explains nothing.

    Every subset of the columns is tried, so it is exact, and for few columns.
    """
    size = len(rows[0])
    scale = [max(row[at] for row in rows) or 1.0 for at in range(size)]
    scaled = [[amount / most for amount, most in zip(row, scale, strict=True)] for row in rows]
    best, least = [0.0] * size, float("inf")
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            found = _solve([[row[at] for at in chosen] for row in scaled], values)
            if found is None or min(found) < 0.0:
                continue
            whole = [0.0] * size
            for at, value in zip(chosen, found, strict=True):
                whole[at] = value
            error = sum((_dot(row, whole) - value) ** 2 for row, value in zip(scaled, values, strict=True))
            if error < least:
                best, least = whole, error
    return [value / most for value, most in zip(best, scale, strict=True)]


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _solve(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """The normal equations by elimination; None where they have no one answer."""
    size = len(rows[0])
    matrix = [
        [*(_dot((row[i] for row in rows), (row[j] for row in rows)) for j in range(size)), 0.0]
        for i in range(size)
    ]
    for at in range(size):
        matrix[at][size] = _dot((row[at] for row in rows), values)
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(matrix[row][at]))
        if abs(matrix[pivot][at]) < _SINGULAR:
            return None
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        for row in range(size):
            if row != at:
                factor = matrix[row][at] / matrix[at][at]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[at], strict=True)]
    return [matrix[at][size] / matrix[at][at] for at in range(size)]
