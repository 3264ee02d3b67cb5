"""The gate as a conversation: preemptions and GPU memory."""

from dataclasses import replace
from itertools import pairwise

import pytest

from kvctl.core.events import (
    GpuReadFailed,
    Noted,
)
from kvctl.core.outcomes import (
    BudgetReason,
    Note,
    Pressure,
    SourceFault,
)
from tests.core.conversation import GIB, PAGE, Conversation


def test_a_preemption_storm_lowers_the_budget_and_lets_it_rise_slowly() -> None:
    """E05: five a second at usage 0.99 for 30 s, then none."""
    talk, budgets = Conversation().up(), []
    for i in range(150):
        talk.tick()
        talk.page(preemptions_total=float(i), kv_usage_ratio=0.99)
        budgets.append(talk.budget)
    assert budgets[-1] < 0.75 * budgets[0]
    assert talk.changes()[-1].reason in {BudgetReason.PREEMPTION, BudgetReason.RECOVERY}
    assert BudgetReason.PREEMPTION in {change.reason for change in talk.changes()}
    assert sum(b < a for a, b in pairwise(budgets)) <= 7, "not one cut a poll"
    talk.page(kv_usage_ratio=0.5)
    talk.live(60.0)
    assert talk.budget == 45_600


def test_one_full_rank_is_over_admitted_whatever_the_average_says() -> None:
    """Data parallel: 0.99 and 0.02 are 0.5 on average, and the preemptions are ours all the same."""
    other = replace(PAGE, rank="1", kv_usage_ratio=0.02)
    talk = Conversation().up(replace(PAGE, kv_usage_ratio=0.99), other)
    talk.page(preemptions_total=3.0)
    assert talk.status.pressure[Pressure.PREEMPTION] == pytest.approx(0.9)


def test_what_a_preemption_sets_free_does_not_hide_it() -> None:
    """The page after it shows the pool without the blocks of a large victim."""
    talk = Conversation().up()
    talk.page(kv_usage_ratio=0.98)
    talk.page(kv_usage_ratio=0.55, preemptions_total=1.0)
    assert talk.status.pressure[Pressure.PREEMPTION] == pytest.approx(0.9)


def test_preemptions_of_an_empty_pool_are_remarked_once_and_cost_nothing() -> None:
    talk = Conversation().up()
    for i in range(50):
        talk.tick()
        talk.page(preemptions_total=float(i), kv_usage_ratio=0.1)
    remarks = [command for command in talk.told if isinstance(command, Noted)]
    assert [remark.word for remark in remarks].count(Note.PREEMPTION_IGNORED) == 1
    assert talk.budget == 45_600


def test_free_memory_says_nothing_of_kv_use() -> None:
    """D20: 600 MB free, flat, seen before and after the start; usage 0, 0.9 and 0 again."""
    talk = Conversation()
    talk.cards(79 * GIB)
    talk.cards(600 << 20)
    talk.up()
    for usage in (0.0, 0.5, 0.9, 0.3, 0.0):
        talk.cards(600 << 20)
        talk.page(kv_usage_ratio=usage)
        assert talk.budget == 45_600


def test_an_engine_that_came_up_after_a_dead_port_is_measured_from_its_own_start() -> None:
    """D20: cards were read while the engine was still down: 79 GB free is not what it leaves."""
    talk = Conversation()
    talk.starve(1.0, SourceFault.REFUSED)
    talk.cards(79 * GIB)
    talk.up()
    talk.cards(600 << 20)
    talk.live(3.0)
    assert talk.budget == 45_600


def test_a_neighbour_moves_the_budget_within_one_reading_and_back() -> None:
    talk = Conversation().up()
    talk.cards(4 * GIB)
    talk.cards(GIB // 2)
    assert talk.budget == 22_800
    assert talk.changes()[-1].reason is BudgetReason.GPU_MEMORY
    talk.say(GpuReadFailed(SourceFault.TIMEOUT))
    assert talk.budget == 22_800
    talk.cards(4 * GIB)
    assert talk.budget == 45_600
    assert talk.changes()[-1].reason is BudgetReason.RECOVERY


@pytest.mark.parametrize("dated", [1000.0, None])
def test_the_first_page_ends_what_was_learned_of_the_empty_card(dated: float | None) -> None:
    """D20: the port was dead, then a page came before anything else."""
    talk = Conversation()
    talk.starve(1.0, SourceFault.REFUSED)
    talk.cards(79 * GIB)
    talk.page(started_at=dated)
    talk.cards(600 << 20)
    talk.live(3.0)
    assert talk.budget == 45_600


def test_a_lost_connection_does_not_make_the_neighbour_the_normal_state() -> None:
    talk = Conversation().up()
    talk.cards(4 * GIB)
    talk.cards(GIB // 2)
    talk.starve(1.0, SourceFault.REFUSED)
    talk.up()
    talk.cards(GIB // 2)
    talk.live(3.0)
    assert talk.budget == 22_800
