"""Least squares without negative coefficients."""

import pytest

from kvctl.sim.fitting import fit


def test_finds_what_made_the_values() -> None:
    rows = [(1.0, float(n % 7), float(n * n % 11) * 1000) for n in range(60)]
    values = [0.5 + 2.0 * b + 3e-4 * c for _, b, c in rows]
    assert fit(rows, values) == pytest.approx([0.5, 2.0, 3e-4])


def test_nothing_is_below_zero() -> None:
    rows = [(1.0, float(n)) for n in range(20)]
    base, slope = fit(rows, [10.0 - 0.1 * n for n in range(20)])
    assert slope == 0.0
    assert base == pytest.approx(sum(10.0 - 0.1 * n for n in range(20)) / 20)


def test_columns_that_say_the_same_do_not_stop_it() -> None:
    rows = [(1.0, float(n), 2.0 * n) for n in range(10)]
    found = fit(rows, [3.0 * n for n in range(10)])
    assert found[1] + 2.0 * found[2] == pytest.approx(3.0)
