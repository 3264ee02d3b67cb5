"""The gate as a conversation: engines that are down, stuck, asleep, silent, and back."""

from dataclasses import replace

import pytest

from kvctl.core.engine_view import ViewConfig
from kvctl.core.events import (
    CapacityPlanned,
    ConnectFailed,
    DrainChanged,
    EngineDescribed,
    EngineRestarted,
    GpusRead,
)
from kvctl.core.outcomes import (
    BudgetReason,
    Decision,
    EndReason,
    EngineState,
    Pressure,
    RejectReason,
    SourceFault,
)
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, GpuSample
from tests.core.conversation import GIB, PAGE, Conversation, is_refused, shape

STALL = ViewConfig().stall_timeout_s


def test_an_engine_that_is_down_gets_503_never_400_and_serves_within_a_poll() -> None:
    """C27: refused for three minutes at the start and again later, a small request each second."""
    talk = Conversation()
    assert talk.refuse().reason is RejectReason.ENGINE_STARTING
    for outage in range(2):
        for _ in range(180):
            talk.starve(1.0, SourceFault.REFUSED)
            refused = talk.refuse(shape(10, 10))
            assert is_refused(refused, Decision.UNAVAILABLE, RejectReason.ENGINE_UNREACHABLE), outage
            assert refused.retry_after_s
        talk.up()
        assert talk.admit(shape(10, 10))


def test_a_wedged_engine_fails_fast_and_recovers_when_counters_move() -> None:
    """C12: running 2, waiting 5, counters flat, every page a 200."""
    talk = Conversation().up()
    stuck = [talk.admit(), talk.admit(shape(stream=False))]
    talk.page(running=2, waiting=5)
    talk.live(STALL + 1)
    assert talk.state is EngineState.WEDGED
    assert is_refused(talk.refuse(), Decision.UNAVAILABLE, RejectReason.ENGINE_WEDGED)
    talk.live(0.4, moving=True)
    assert talk.states()[-1] is EngineState.UP
    assert talk.admit()
    for request_id in stuck:
        talk.end(request_id)


@pytest.mark.parametrize("stream", [True, False])
def test_a_wedge_that_is_over_is_found_out_by_one_request_on_trial(stream: bool) -> None:
    """All callers gave up; an idle engine moves no counter: one in thirty seconds may try, no more."""
    talk = Conversation().up()
    stuck = talk.admit()
    talk.live(STALL + 1)
    talk.end(stuck, EndReason.CLIENT_GONE)
    assert talk.refuse().reason is RejectReason.ENGINE_WEDGED
    talk.live(STALL + 1)
    assert talk.state is EngineState.TRIAL
    on_trial = talk.admit(shape(stream=stream))
    assert talk.admitted_of(20, shape()) == 0
    if stream:
        talk.tokens(on_trial, 1)
    else:
        talk.end(on_trial, EndReason.FINISHED, 20)
    talk.live(3.0)
    assert talk.states()[-1] is EngineState.UP
    assert talk.admit()


def test_a_wedge_that_goes_on_costs_one_request_in_thirty_seconds() -> None:
    """E16: twenty clients that try again for ten minutes."""
    talk = Conversation().up()
    talk.admit()
    talk.live(STALL + 1)
    admitted = 0
    for _ in range(600):
        talk.tick(1.0)
        talk.page()
        admitted += talk.admitted_of(3, shape(500, 50))
    assert 1 <= admitted <= 20


def test_a_long_silent_prefill_is_no_wedge_while_usage_moves() -> None:
    talk = Conversation().up()
    talk.admit(shape(30_000, 10))
    for i in range(300):
        talk.tick()
        talk.page(kv_usage_ratio=i / 600)
    assert talk.state is EngineState.UP


def test_a_client_that_stopped_reading_is_no_wedge() -> None:
    """The engine is done and idle; the stream stays open until the client's write timeout."""
    talk = Conversation().up()
    slow = talk.admit(shape(100, 50))
    talk.tokens(slow, 20)
    talk.page(running=0, waiting=0, generation_tokens_total=50.0)
    talk.live(3 * STALL)
    assert talk.state is EngineState.UP
    assert talk.admit()
    talk.live(STALL + 1)
    assert talk.states()[-1] is EngineState.WEDGED, (
        "a paused engine shows empty gauges, but a new request owes a token"
    )


@pytest.mark.parametrize("gauges", [(1, 0), (0, 1), (None, 0)])
def test_a_stream_that_stops_in_the_middle_is_a_wedge_unless_the_engine_is_empty(
    gauges: tuple[int | None, int],
) -> None:
    talk = Conversation().up()
    talk.tokens(talk.admit(shape(100, 50)), 20)
    talk.page(running=gauges[0], waiting=gauges[1], generation_tokens_total=20.0)
    talk.live(STALL + 1)
    assert talk.state is EngineState.WEDGED


def test_slow_pages_never_close_the_gate_while_tokens_flow() -> None:
    """C14: pages time out for a minute under load; the budget shrinks to the fallback, nobody gets 503."""
    talk = Conversation(GateConfig(fallback_budget_tokens=16_000)).up()
    busy = talk.admit(shape(100, 8000))
    for _ in range(300):
        talk.tick()
        talk.no_page()
        talk.tokens(busy, 5)
        assert talk.state in {EngineState.UP, EngineState.LATE, EngineState.STALE}
    assert talk.budget == pytest.approx(16_000, abs=1)
    assert talk.admit()
    talk.live(3.0, moving=True)
    assert talk.budget == 45_600


def test_a_sleeping_engine_is_503_and_resumes_by_itself() -> None:
    """C19."""
    talk = Conversation().up()
    talk.page(awake=False)
    refused = talk.refuse()
    assert is_refused(refused, Decision.UNAVAILABLE, RejectReason.ENGINE_ASLEEP)
    assert refused.retry_after_s
    talk.page(awake=True)
    assert talk.admit()


def test_memory_that_sleep_set_free_is_not_what_the_engine_usually_leaves() -> None:
    """C19, D20: the 70 GB that were free during sleep must not make 600 MB look like distress after it."""
    talk = Conversation().up(replace(PAGE, started_at=None))
    talk.cards(600 << 20)
    talk.page(awake=False)
    talk.cards(70 * GIB)
    talk.page(awake=True)
    talk.cards(600 << 20)
    assert talk.status.pressure[Pressure.GPU_MEMORY] == 1.0


def test_after_an_outage_the_gate_opens_step_by_step() -> None:
    talk = Conversation().up()
    full = talk.budget
    talk.starve(1.0, SourceFault.REFUSED)
    talk.page()
    opened = [talk.budget]
    for _ in range(12):
        talk.tick()
        talk.page()
        opened.append(talk.budget)
    assert opened[0] == pytest.approx(0.1 * full, rel=0.01)
    assert opened == sorted(opened)
    assert opened[-1] == full
    assert talk.changes()[-1].reason is BudgetReason.RECOVERY


def test_after_an_outage_a_large_request_does_not_shut_out_the_small_ones() -> None:
    """One of 7,000 tokens in a pool of 32,000 just after recovery: the next of 16 gets in within a tick."""
    talk = Conversation().up(replace(PAGE, capacity_tokens=32_000))
    talk.starve(1.0, SourceFault.REFUSED)
    talk.page()
    assert talk.budget < 7000
    talk.admit(shape(6900, 100))
    assert talk.refuse(shape(8, 8)).reason is RejectReason.KV_BUDGET
    talk.tick()
    talk.page()
    assert talk.admit(shape(8, 8))


def test_after_an_outage_callers_do_not_come_in_as_one_wave() -> None:
    """Two hundred wait for a pool that holds sixty: a tenth of it opens in each tick, and no more."""
    talk = Conversation().up()
    talk.starve(1.0, SourceFault.REFUSED)
    talk.page()
    one, admitted = shape(700, 20), []
    for _ in range(12):
        admitted.append(talk.admitted_of(200, one))
        talk.tick()
        talk.page()
    step = 0.1 * 45_600 / 720
    assert max(admitted) <= 1.5 * step + 1
    assert sum(admitted) >= 55


def test_a_page_that_says_nothing_leaves_the_fallback() -> None:
    """C07: 200 without a series of the engine, after it had been good."""
    talk = Conversation().up()
    talk.starve(10.0, SourceFault.NO_SERIES)
    assert talk.state is EngineState.NO_TELEMETRY
    assert talk.budget == pytest.approx(16_384, abs=1)
    assert talk.admit()
    talk.live(3.0)
    assert (talk.state, talk.budget) == (EngineState.UP, 45_600)


def test_no_telemetry_from_the_start_serves_within_the_fallback() -> None:
    """C07: an engine that runs without statistics."""
    talk = Conversation()
    talk.say(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=8192)))
    talk.starve(120.0, SourceFault.NO_SERIES)
    assert talk.budget == int(16_384 * 0.95)
    assert talk.admitted_of(40, shape(990, 10)) == 15


def test_tokens_of_others_seen_before_the_page_was_lost_do_not_shut_the_gate_for_good() -> None:
    talk = Conversation().up()
    for _ in range(30):
        talk.tick()
        talk.page(kv_usage_ratio=0.9)
    talk.starve(60.0, SourceFault.NO_SERIES)
    assert talk.admitted_of(40, shape(990, 10)) > 10


def test_connections_refused_on_the_data_plane_close_the_gate_at_once() -> None:
    talk = Conversation().up()
    talk.say(ConnectFailed())
    talk.say(ConnectFailed())
    assert talk.refuse().reason is RejectReason.ENGINE_UNREACHABLE


def test_a_lost_card_is_503_and_comes_back() -> None:
    talk = Conversation().up()
    talk.say(GpusRead((GpuSample(uuid="GPU-0", at=talk.now, lost=True),)))
    assert is_refused(talk.refuse(), Decision.UNAVAILABLE, RejectReason.GPU_FAULT)
    talk.cards(4 * GIB)
    assert talk.admit()


def test_drain_refuses_what_is_new_and_keeps_what_runs() -> None:
    talk = Conversation().up()
    running = talk.admit()
    talk.say(DrainChanged(draining=True))
    refused = talk.refuse()
    assert is_refused(refused, Decision.UNAVAILABLE, RejectReason.DRAINING)
    assert refused.retry_after_s
    talk.end(running)
    talk.say(DrainChanged(draining=False))
    assert talk.admit()


def test_a_restart_is_told_and_starts_from_the_new_pool() -> None:
    """C16: counters fall, another pool, no cut for the preemptions of the old process."""
    talk = Conversation().up(replace(PAGE, preemptions_total=500.0, generation_tokens_total=1e9))
    talk.page(kv_usage_ratio=0.99)
    told = talk.page(
        preemptions_total=3.0, generation_tokens_total=200.0, capacity_tokens=24_000, started_at=2000.0
    )
    assert EngineRestarted("0") in told
    assert talk.status.pressure[Pressure.PREEMPTION] == 1.0
    assert talk.budget == 22_800


def test_an_engine_that_never_shows_a_page_is_gated_on_the_plan_where_there_is_one() -> None:
    """--disable-log-stats: it answers, and says nothing of its pool. Before the plan: the fallback."""
    talk = Conversation(GateConfig(fallback_budget_tokens=16_384))
    talk.say(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=8_192)))
    talk.starve(30.0, SourceFault.NO_SERIES)
    assert talk.state is EngineState.NO_TELEMETRY
    assert talk.budget <= 16_384
    talk.say(CapacityPlanned(40_000))
    talk.starve(10.0, SourceFault.NO_SERIES)
    assert talk.budget == 38_000
    talk.say(CapacityPlanned(None))
    talk.starve(30.0, SourceFault.NO_SERIES)
    assert talk.budget <= 16_384


def test_a_pool_that_was_known_shrinks_to_the_fallback_all_the_same() -> None:
    """A page that vanished is an outage: the plan is no reason to go on blind."""
    talk = Conversation(GateConfig(fallback_budget_tokens=16_384)).up()
    talk.say(CapacityPlanned(40_000))
    talk.starve(60.0, SourceFault.NO_SERIES)
    assert talk.budget <= 16_384


def test_a_pool_once_told_holds_until_the_engine_restarts() -> None:
    """A page that lacks the capacity is no other pool; but it proves no 400 any more."""
    talk = Conversation(context=131_072).up()
    talk.page(capacity_tokens=None, capacity_exact=False)
    assert talk.status.capacity_tokens == 48_000
    assert talk.status.capacity_known
    talk.admit()
    assert talk.refuse(shape(60_000, 1000)).decision is Decision.REJECT_LATER
    talk.page(capacity_tokens=None, capacity_exact=False, started_at=2000.0)
    assert not talk.status.capacity_known
