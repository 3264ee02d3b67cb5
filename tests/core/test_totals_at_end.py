"""Engines whose token totals move only when a request ends, and gauges that are no measure of leases."""

from kvctl.core.engine_view import EngineView, ViewConfig
from kvctl.core.events import EngineDescribed, Scraped
from kvctl.core.gate import Gate
from kvctl.core.outcomes import CapacitySource, EngineState
from kvctl.core.supply import GateConfig, Supply
from kvctl.core.telemetry import EngineInfo, RankSample


def at_end(at: float, *, steps: float | None, made: float = 0.0, running: int = 4) -> tuple[RankSample, ...]:
    return (
        RankSample(
            rank="0",
            at=at,
            running=running,
            generation_tokens_total=made,
            steps_total=steps,
            counts_at_end=True,
        ),
    )


def test_a_page_whose_steps_move_is_fresh_however_long_the_totals_stand() -> None:
    view = EngineView(ViewConfig())
    for second in range(20):
        view.scraped(at_end(float(second), steps=50.0 * second), float(second))
        view.token_seen(200.0, second + 0.5)
    assert view.state(19.6) is EngineState.UP


def test_a_page_on_which_nothing_moves_while_tokens_flow_is_not() -> None:
    view = EngineView(ViewConfig())
    for second in range(20):
        view.scraped(at_end(float(second), steps=50.0), float(second))
        view.token_seen(200.0, second + 0.5)
    assert view.state(19.6) is not EngineState.UP


def test_tokens_between_two_pages_are_steps_of_those_that_ran_through() -> None:
    view = EngineView(ViewConfig())
    view.scraped(at_end(0.0, steps=10.0, running=4), 0.0)
    moved = view.scraped(at_end(1.0, steps=60.0, running=3, made=900.0), 1.0)
    assert moved.generated == 150.0  # not the 900 of the one that ended


def test_without_steps_nothing_is_known_of_the_time_between() -> None:
    view = EngineView(ViewConfig())
    view.scraped(at_end(0.0, steps=None), 0.0)
    assert view.scraped(at_end(1.0, steps=None, made=900.0), 1.0).generated is None


def test_a_fall_of_the_steps_is_a_restart() -> None:
    view = EngineView(ViewConfig())
    view.scraped(at_end(0.0, steps=500.0), 0.0)
    assert view.scraped(at_end(1.0, steps=3.0), 1.0).restarted == ("0",)


def test_usage_that_counts_reservations_is_shown_and_charged_to_nobody() -> None:
    supply = Supply(GateConfig())
    for second in range(30):
        reserved = RankSample(
            rank="0",
            at=float(second),
            kv_usage_ratio=0.9,
            capacity_tokens=10_000,
            usage_comparable=False,
        )
        supply.page((reserved,), float(second))
        supply.reconcile(float(second))
    assert supply.usage_ratio() == 0.9
    assert supply.unattributed == 0.0


def test_a_described_pool_counts_with_a_page_that_has_none_and_without_a_page() -> None:
    gate = Gate(GateConfig())
    info = EngineInfo(engine="e", models=("m",), rank_capacity_tokens=5_000, ranks=2, max_num_seqs=7)
    gate.handle(EngineDescribed(info), 0.0)
    status = gate.status(0.0)
    assert (status.capacity_tokens, status.capacity_source) == (10_000, CapacitySource.ENGINE)
    assert status.guards.slots == 7
    gate.handle(Scraped(at_end(1.0, steps=1.0), 1.0), 1.0)
    assert gate.status(1.0).capacity_tokens == 5_000


def test_another_kind_of_engine_brings_its_own_pool() -> None:
    gate = Gate(GateConfig(fallback_budget_tokens=1_234))
    gate.handle(EngineDescribed(EngineInfo(engine="a", rank_capacity_tokens=5_000)), 0.0)
    gate.handle(EngineDescribed(EngineInfo(engine="b")), 1.0)
    status = gate.status(1.0)
    assert (status.capacity_tokens, status.capacity_source) == (1_234, CapacitySource.FALLBACK)


def test_an_engine_says_itself_whether_it_clamps() -> None:
    supply = Supply(GateConfig(clamps_output=True))
    supply.described(EngineInfo(clamps_output=False), 0.0)
    assert not supply.limits.clamps_output
