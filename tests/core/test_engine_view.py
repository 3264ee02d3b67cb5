"""What is believed of an engine, and that no belief lasts by itself."""

from dataclasses import replace

import pytest

from kvctl.core.engine_view import FROZEN_TOKENS, SURVIVED_S, EngineView, ViewConfig
from kvctl.core.outcomes import EngineState, SourceFault
from kvctl.core.telemetry import EngineInfo, GpuSample, RankSample
from tests.core.conversation import PAGE

STALL = ViewConfig().stall_timeout_s


def page(view: EngineView, now: float, **fields: object) -> tuple[str, ...]:
    sample: RankSample = replace(PAGE, at=now, **fields)  # type: ignore[arg-type]
    return view.scraped((sample,), now).restarted


def seen(config: ViewConfig | None = None) -> EngineView:
    view = EngineView(config or ViewConfig())
    page(view, 0.0)
    return view


def busy_and_still(seconds: float) -> EngineView:
    """Requests in flight, pages that answer, and nothing that moves."""
    view = seen()
    view.ledger_busy(busy=True, now=0.0)
    for i in range(1, round(seconds)):
        page(view, float(i), running=2, waiting=5)
        view.state(float(i))
    return view


def test_never_seen_is_starting_and_refused_is_unreachable() -> None:
    view = EngineView(ViewConfig())
    assert view.state(0.0) is EngineState.STARTING
    for _ in range(20):
        view.scrape_failed(SourceFault.TIMEOUT, 1.0)
    assert view.state(1.0) is EngineState.STARTING
    for _ in range(2):
        view.scrape_failed(SourceFault.REFUSED, 2.0)
    assert view.state(2.0) is EngineState.UNREACHABLE
    page(view, 3.0)
    assert view.state(3.0) is EngineState.UP


def test_one_refused_connection_is_not_yet_down() -> None:
    view = seen()
    view.scrape_failed(SourceFault.REFUSED, 0.1)
    assert view.state(0.1) is EngineState.UP
    page(view, 0.15)
    view.connect_failed()
    assert view.state(0.1) is EngineState.UP
    view.connect_failed()
    assert view.state(0.2) is EngineState.UNREACHABLE


def test_age_turns_into_late_and_stale() -> None:
    view = seen()
    states = {at: view.state(at) for at in (1.0, 5.0, 11.0)}
    assert list(states.values()) == [EngineState.UP, EngineState.LATE, EngineState.STALE]


def test_slow_pages_of_a_busy_engine_are_load_and_not_death() -> None:
    """C14: /metrics takes longer than its timeout for minutes while tokens flow."""
    view = seen()
    view.ledger_busy(busy=True, now=0.0)
    for second in range(1, 300):
        view.scrape_failed(SourceFault.TIMEOUT, float(second))
        view.token_seen(50, float(second))
        assert view.state(float(second)) not in {EngineState.UNREACHABLE, EngineState.WEDGED}
    assert view.state(299.0) is EngineState.STALE


def test_an_idle_engine_whose_pages_always_time_out_still_serves() -> None:
    """C24: a page that takes 7 s is no reason to refuse everybody for ever."""
    view = EngineView(ViewConfig())
    view.described(EngineInfo(models=("m",)), 0.0)
    for second in range(1, 300):
        view.scrape_failed(SourceFault.TIMEOUT, float(second))
    assert view.state(300.0) is EngineState.NO_TELEMETRY


def test_a_host_that_answers_nothing_to_anybody_is_unreachable_until_it_does() -> None:
    view = seen()
    view.ledger_busy(busy=True, now=1.0)
    for second in range(2, 40):
        view.scrape_failed(SourceFault.TIMEOUT, float(second))
        state = view.state(float(second))
    assert state is EngineState.UNREACHABLE
    page(view, 41.0)
    assert view.state(41.0) is EngineState.WEDGED, "it answers, but its counters did not move in 40 s"
    view.ledger_busy(busy=False, now=42.0)
    page(view, 43.0, prompt_tokens_total=5.0)
    assert view.state(43.0) is EngineState.UP


def test_frozen_counters_with_requests_in_flight_are_a_wedge() -> None:
    """C12: gauges frozen at running 2, waiting 5, counters flat, every page a good 200."""
    assert busy_and_still(STALL - 1).state(STALL - 1) is EngineState.UP
    view = busy_and_still(STALL + 3)
    assert view.state(STALL + 3) is EngineState.WEDGED
    page(view, STALL + 4, generation_tokens_total=7.0)
    assert view.state(STALL + 4) is EngineState.UP


def test_an_idle_engine_is_never_wedged() -> None:
    view = seen()
    for second in range(1, 600):
        page(view, float(second))
        assert view.state(float(second)) is EngineState.UP


@pytest.mark.parametrize("proof", ["token", "answer", "counter", "restart", "usage"])
def test_any_sign_of_life_ends_a_wedge(proof: str) -> None:
    view, now = busy_and_still(STALL + 3), STALL + 4
    assert view.state(now) is EngineState.WEDGED
    match proof:
        case "token":
            view.token_seen(1, now)
        case "answer":
            view.answered(now)
        case "counter":
            page(view, now, prompt_tokens_total=9.0)
        case "restart":
            page(view, now, started_at=2000.0)
        case _:
            page(view, now, kv_usage_ratio=0.5)
    assert view.state(now) is not EngineState.WEDGED


def test_a_wedge_does_not_outlive_its_traffic_for_ever() -> None:
    """All callers gave up and the engine is well again: idle counters never move, so somebody must try."""
    view = busy_and_still(STALL + 3)
    view.ledger_busy(busy=False, now=STALL + 4)
    assert view.state(STALL + 5) is EngineState.WEDGED
    trial_at = 2 * STALL + 6
    page(view, trial_at)
    assert view.state(trial_at) is EngineState.TRIAL
    view.tried(trial_at)
    assert view.state(trial_at) is EngineState.WEDGED, "one at a time"
    assert view.state(trial_at + 1) is EngineState.WEDGED
    view.token_seen(1, trial_at + 1)
    page(view, trial_at + 1)
    assert view.state(trial_at + 1) is EngineState.UP


def test_a_page_whose_counters_stand_still_while_tokens_flow_is_old() -> None:
    view = seen()
    for i in range(1, 200):
        now = i * 0.1
        page(view, now)
        view.token_seen(FROZEN_TOKENS / 10, now)
    assert view.age(20.0) == pytest.approx(20.0)
    assert view.state(20.0) is EngineState.STALE
    page(view, 20.1, generation_tokens_total=5.0)
    assert view.state(20.1) is EngineState.UP


def test_counters_that_fall_are_another_process_and_no_negative_rate() -> None:
    """C16: preemptions 500 then 3, tokens 1e9 then 200."""
    view = EngineView(ViewConfig())
    first = replace(PAGE, started_at=None, preemptions_total=500.0, generation_tokens_total=1e9)
    view.scraped((first,), 1.0)
    again = replace(first, preemptions_total=3.0, generation_tokens_total=200.0)
    moved = view.scraped((again,), 2.0)
    assert moved.restarted == ("0",)
    assert (moved.preempted, moved.generated) == (None, None)
    later = view.scraped((replace(again, preemptions_total=4.0, generation_tokens_total=260.0),), 3.0)
    assert (later.preempted, later.generated, later.restarted) == (1.0, 60.0, ())


def test_a_start_time_that_moved_is_another_process_and_the_rank_is_named() -> None:
    view = EngineView(ViewConfig())
    ranks = (PAGE, replace(PAGE, rank="1"))
    view.scraped(ranks, 1.0)
    assert view.scraped((ranks[0], replace(ranks[1], started_at=1001.0)), 2.0).restarted == ("1",)


def test_counters_that_vanish_or_appear_are_unknown_and_not_a_jump() -> None:
    view = EngineView(ViewConfig())
    view.scraped((replace(PAGE, preemptions_total=None, generation_tokens_total=50.0),), 1.0)
    moved = view.scraped((replace(PAGE, preemptions_total=900.0, generation_tokens_total=None),), 2.0)
    assert (moved.preempted, moved.generated, moved.restarted) == (None, None, ())


def test_a_sleeping_rank_puts_the_engine_to_sleep_until_it_wakes() -> None:
    """C19: awake 0 while all gauges look idle."""
    view = seen()
    page(view, 1.0, awake=False)
    assert view.state(1.0) is EngineState.ASLEEP
    page(view, 2.0, awake=True)
    assert view.state(2.0) is EngineState.UP


def test_a_page_without_engine_series_is_no_telemetry_and_serves() -> None:
    """C07: 200, but nothing of the engine on it."""
    view = EngineView(ViewConfig())
    view.scrape_failed(SourceFault.NO_SERIES, 1.0)
    assert view.state(1.0) is EngineState.NO_TELEMETRY
    page(view, 2.0)
    for i in range(15, 40):
        view.scrape_failed(SourceFault.NO_SERIES, i * 0.2)
    assert view.state(8.0) is EngineState.NO_TELEMETRY


def card(*, errors: int | None = None, lost: bool = False) -> GpuSample:
    return GpuSample(uuid="GPU-0", at=0.0, ecc_uncorrected_total=errors, lost=lost)


def test_a_lost_card_is_a_fault_while_it_is_lost() -> None:
    view = seen()
    view.cards_read([card(lost=True)])
    assert view.state(1.0) is EngineState.FAULT
    view.cards_read([card()])
    assert view.state(1.0) is EngineState.UP


def test_a_broken_card_that_may_be_another_engines_closes_nothing() -> None:
    """D12: of eight cards that nobody named one is lost; all lost is a fault, and so is a named one."""
    cards = [replace(card(errors=0), uuid=f"GPU-{i}") for i in range(8)]
    lost = [replace(each, lost=True) for each in cards]
    worn = [replace(each, ecc_uncorrected_total=3) for each in cards]
    for named, broken, state in (
        (False, [*cards[:3], lost[3], *cards[4:]], EngineState.UP),
        (False, [*cards[:3], worn[3], *cards[4:]], EngineState.UP),
        (False, lost, EngineState.FAULT),
        (False, worn, EngineState.FAULT),
        (True, [*cards[:3], lost[3], *cards[4:]], EngineState.FAULT),
    ):
        view = seen(ViewConfig(cards_named=named))
        view.cards_read(cards)
        view.cards_read(broken)
        assert view.state(1.0) is state


def test_new_uncorrectable_errors_are_a_fault_until_the_engine_restarts() -> None:
    for down_and_up in (False, True):
        view = seen()
        view.cards_read([card(errors=7)])
        assert view.state(1.0) is EngineState.UP, "old errors are history"
        view.cards_read([card(errors=8)])
        view.cards_read([card(errors=8)])
        assert view.state(1.0) is EngineState.FAULT
        if down_and_up:
            view.connect_failed()
            view.connect_failed()
            page(view, 2.0)
        else:
            page(view, 2.0, started_at=5000.0)
        assert view.state(2.0) is EngineState.UP


def test_an_error_that_ends_the_work_on_a_card_is_a_fault_until_the_engine_restarts() -> None:
    view = seen()
    view.cards_read([card()])
    view.cards_failed(["GPU-0"], 1.0)
    assert view.state(1.0) is EngineState.FAULT
    view.cards_read([card()])
    assert view.state(2.0) is EngineState.FAULT, "it reads well; the engine's work on it is over all the same"
    view.connect_failed()
    view.connect_failed()
    page(view, 3.0)
    assert view.state(3.0) is EngineState.UP


def test_what_goes_on_making_tokens_was_not_ended() -> None:
    """Law 10: an engine that answers long after the error was not who it ended."""
    view = seen()
    view.cards_read([card()])
    view.cards_failed(["GPU-0"], 1.0)
    view.token_seen(1.0, 1.0 + SURVIVED_S)  # may have been under way
    assert view.state(1.0) is EngineState.FAULT
    view.token_seen(1.0, 1.1 + SURVIVED_S)
    page(view, 1.1 + SURVIVED_S)
    assert view.state(1.1 + SURVIVED_S) is EngineState.UP


def test_what_is_known_of_an_engines_cards_goes_before_what_is_configured() -> None:
    cards = [replace(card(), uuid=f"GPU-{i}") for i in range(3)]
    for configured in (False, True):
        view = seen(ViewConfig(cards_named=configured))
        view.cards_read(cards, named=False)
        view.cards_failed(["GPU-2"], 1.0)
        assert view.state(1.0) is EngineState.UP, "one of the machine's"
        view.cards_read(cards[:2], named=True)
        assert view.state(1.0) is EngineState.UP, "another's"
        view.cards_failed(["GPU-1"], 1.0)
        assert view.state(1.0) is EngineState.FAULT
