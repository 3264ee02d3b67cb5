"""Each term of the pressure: how it falls, that it recovers, and what it must not learn."""

from itertools import pairwise

import pytest

from kvctl.core.pressure import FLOOR, HOLD_S, MEMORY_FLOOR, MemoryTerm, PreemptionTerm, TelemetryTerm
from kvctl.core.telemetry import GpuSample
from tests.core.conversation import GIB

MIB = 1 << 20


def card(free: int | None, uuid: str = "GPU-0", *, lost: bool = False) -> GpuSample:
    return GpuSample(uuid=uuid, at=0.0, free_bytes=free, lost=lost)


def test_one_cut_per_episode_of_preemptions_not_per_page() -> None:
    term = PreemptionTerm()
    for page in range(8):
        assert term.observe(3, 0.99, page * 0.2)
    assert term.value == pytest.approx(0.9, rel=0.02)


def test_a_storm_lowers_step_by_step_to_a_floor_and_recovers_by_time_alone() -> None:
    """E05: five preemptions a second for 30 s at usage 0.99, then none; no swing with the polls."""
    term, values = PreemptionTerm(), []
    for page in range(150):
        term.observe(1, 0.99, page * 0.2)
        values.append(term.value)
    assert FLOOR <= values[-1] < 0.75
    assert sum(b < a for a, b in pairwise(values)) <= 6
    for second in range(30, 75):
        term.recover(float(second))
    assert term.value == 1.0


def test_a_storm_without_end_stays_above_the_floor() -> None:
    term = PreemptionTerm()
    for page in range(3000):
        term.observe(1, 1.0, page * 0.2)
        assert term.value >= FLOOR


def test_preemptions_of_a_half_empty_pool_are_not_over_admission() -> None:
    term = PreemptionTerm()
    assert not term.observe(40, 0.2, 1.0)
    assert term.value == 1.0
    assert term.observe(1, None, 2.0), "unknown usage is no excuse"


def test_a_small_constant_free_memory_is_no_pressure() -> None:
    """D20: 600 MB free, flat, is what this engine leaves free."""
    term = MemoryTerm(GIB)
    for _ in range(100):
        term.observe([card(600 * MIB)], 1.0)
        assert term.value == 1.0


def test_a_neighbour_that_takes_memory_is_pressure_until_it_leaves() -> None:
    term = MemoryTerm(GIB)
    term.observe([card(4 * GIB)], 1.0)
    term.observe([card(GIB // 2)], 2.0)
    assert term.value == 0.5
    term.observe([card(10 * MIB)], 3.0)
    assert term.value == MEMORY_FLOOR
    term.observe([card(4 * GIB)], 4.0)
    assert term.value == 1.0


def test_what_was_free_before_the_engine_started_is_no_measure() -> None:
    """The empty card's 80 GB must not make the engine's own 600 MB look like distress."""
    term = MemoryTerm(GIB)
    term.observe([card(80 * GIB)], 1.0)
    term.observe([card(600 * MIB)], 2.0)
    assert term.value < 1.0
    term.engine_started()
    assert term.value == 1.0
    term.observe([card(600 * MIB)], 3.0)
    assert term.value == 1.0
    term.observe([card(300 * MIB)], 4.0)
    assert term.value == 0.5


def test_a_neighbour_that_was_there_first_does_not_disarm_the_guard_for_good() -> None:
    """kvctl comes late: once the neighbour left, its return is seen for what it is."""
    term = MemoryTerm(GIB)
    for free, expected in ((100 * MIB, 1.0), (20 * GIB, 1.0), (100 * MIB, MEMORY_FLOOR)):
        term.observe([card(free)], 1.0)
        assert term.value == expected


def test_the_worst_card_speaks_and_those_without_a_reading_do_not() -> None:
    term = MemoryTerm(GIB)
    term.observe([card(4 * GIB), card(4 * GIB, "GPU-1"), card(None, "GPU-2")], 1.0)
    term.observe([card(4 * GIB), card(GIB // 2, "GPU-1"), card(None, "GPU-2")], 2.0)
    assert term.value == 0.5
    term.observe([card(4 * GIB), card(0, "GPU-1", lost=True)], 3.0)
    assert term.value == 1.0


def test_one_failed_reading_does_not_open_the_gate() -> None:
    """Law 3: unknown is not zero, and not "all is well" either; but it does not last for ever."""
    term = MemoryTerm(GIB)
    term.observe([card(4 * GIB)], 1.0)
    term.observe([card(GIB // 2)], 2.0)
    term.unknown(3.0)
    assert term.value == 0.5
    term.observe([card(None)], 4.0)
    assert term.value == 0.5
    term.unknown(2.0 + HOLD_S + 0.1)
    assert term.value == 1.0


def test_telemetry_shrinks_to_the_fallback_and_reopens_step_by_step() -> None:
    term = TelemetryTerm()
    for _ in range(100):
        term.shrink(0.34)
    assert term.value == 0.34
    term.reopen()
    assert term.value == pytest.approx(0.44)
    for _ in range(10):
        term.reopen()
    assert term.value == 1.0
    for _ in range(100):
        term.shrink(7.0)
    assert term.value == 1.0, "a pool smaller than the fallback has nothing to shrink to"


def test_after_an_outage_callers_do_not_come_in_as_one_wave() -> None:
    term = TelemetryTerm()
    term.outage_over()
    assert term.value == pytest.approx(0.1)
    term.shrink(1.0)
    assert term.value == 1.0
