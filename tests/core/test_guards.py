"""The other limits. Times are seconds, rates prompt tokens a second."""

from itertools import pairwise
from math import inf

import pytest

from kvctl.core.claim import Limits, Shape, claim
from kvctl.core.guards import (
    FEWEST_RATES,
    DecodeGuard,
    Guards,
    PrefillGuard,
    SlotGuard,
)
from kvctl.core.ledger import Lease, Ledger
from kvctl.core.outcomes import EndReason, RejectReason


def lease(name: str, prompt: int = 1000, n: int = 1, at: float = 0.0) -> Lease:
    shape = Shape(route="chat", model="m", prompts=(prompt,), n=n, asked_output=1000, stream=True)
    asked = claim(shape, Limits(context=32768, block=16))
    return Lease(id=name, key=("m", "chat", ""), claim=asked, streaming=True, admitted_at=at)


def busy(guard: PrefillGuard, rate: float, stretches: int, start: float = 0.0) -> float:
    """Prompts of 1,000 tokens, always one waiting behind, taken in at ``rate``; returns the time after."""
    now, number = start, 0
    waiting = lease("first")
    guard.admitted(waiting, now)
    while stretches > 0:
        number += 1
        following = lease(f"l{number}")
        guard.admitted(following, now)
        now += 1000 / rate
        guard.first_token(waiting, now)
        waiting = following
        stretches -= now - start >= 1.0 and (now - start) % 1.0 < 1000 / rate
    guard.first_token(waiting, now + 1000 / rate)
    return now


def test_nothing_is_enforced_before_the_rate_is_known() -> None:
    guard = PrefillGuard(2.0)
    guard.admitted(lease("a", 100_000), 0.0)
    assert guard.rate(1.0) is None
    assert guard.wait(100_000, 1.0) == 0.0


def test_the_rate_is_read_from_busy_stretches() -> None:
    guard = PrefillGuard(2.0)
    now = busy(guard, 4000.0, FEWEST_RATES + 2)
    rate = guard.rate(now)
    assert rate is not None
    assert 3800 <= rate <= 4200
    assert guard.backlog == 0


def test_idle_time_does_not_lower_the_rate_and_old_stretches_are_forgotten() -> None:
    guard = PrefillGuard(2.0)
    now = busy(guard, 4000.0, FEWEST_RATES + 2)
    single = lease("late", at=now + 20)
    guard.admitted(single, now + 20)
    guard.first_token(single, now + 20.05)
    rate = guard.rate(now + 21)
    assert rate is not None
    assert rate >= 3800
    assert guard.rate(now + 100) is None


def test_a_prompt_waits_no_longer_than_its_share_of_the_target() -> None:
    guard = PrefillGuard(2.0)
    now = busy(guard, 4000.0, FEWEST_RATES + 2)
    guard.admitted(lease("ahead", 2000), now)
    assert guard.wait(1000, now) == 0.0
    guard.admitted(lease("more", 2000), now)
    over = guard.wait(1000, now)
    assert 0.2 <= over <= 0.3  # 5,000 tokens at 4,000 a second, one second allowed


def test_a_prompt_longer_than_the_target_still_gets_in() -> None:
    guard = PrefillGuard(2.0)
    now = busy(guard, 4000.0, FEWEST_RATES + 2)
    guard.admitted(lease("ahead", 1000), now)
    assert guard.wait(20_000, now) == 0.0
    guard.admitted(lease("more", 9000), now)
    assert guard.wait(20_000, now) > 0.0


def test_a_request_that_left_before_its_first_token_leaves_the_backlog() -> None:
    guard = PrefillGuard(2.0)
    gone = lease("gone", 5000)
    guard.admitted(gone, 0.0)
    guard.gone(gone)
    assert guard.backlog == 0


def decoding(ledger: Ledger, pace: float, until: float, since: float) -> None:
    """Every lease shows tokens at ``pace`` seconds each."""
    for one in ledger:
        if one.first_token_at is None:
            one.first_token_at = since
        one.output_tokens = (until - one.first_token_at) / pace
        one.last_token_at = until


def crowd(size: int) -> Ledger:
    ledger = Ledger()
    for i in range(size):
        ledger.open(lease(f"c{i}"))
    return ledger


def test_a_slow_pace_cuts_the_concurrency_and_a_good_one_grows_it() -> None:
    guard, ledger = DecodeGuard(0.1), crowd(20)
    for second in range(1, 6):
        decoding(ledger, 0.2, float(second), 0.0)
        guard.adjust(ledger, ledger.sequences, float(second))
    assert guard.measured_s is not None
    assert guard.limit < 20
    cut = guard.limit
    for second in range(6, 12):  # more run than the limit allows: the cut has not shown yet
        decoding(ledger, 0.2, float(second), 0.0)
        guard.adjust(ledger, ledger.sequences, float(second))
    assert guard.limit == cut
    small = crowd(int(cut))
    for second in range(12, 40):
        decoding(small, 0.02, float(second), 11.0)
        guard.adjust(small, small.sequences, float(second))
    assert guard.limit > cut


def test_just_after_a_slow_pace_it_grows_at_half_speed() -> None:
    guard, ledger = DecodeGuard(0.1), crowd(20)
    for second in range(1, 11):
        decoding(ledger, 0.2, float(second), 0.0)
        guard.adjust(ledger, ledger.sequences, float(second))
    small, limits = crowd(16), []
    for second in range(11, 24):
        decoding(small, 0.02, float(second), 10.0)
        guard.adjust(small, max(int(guard.limit), 1), float(second))
        limits.append(guard.limit)
    steps = [after / before for before, after in pairwise(limits)]
    assert steps[0] > 1.0
    assert max(steps[:2]) < min(steps[6:8])


def test_a_limit_that_does_not_bind_is_left_alone() -> None:
    guard, ledger = DecodeGuard(0.1), crowd(4)
    for second in range(1, 60):
        decoding(ledger, 0.02, float(second), 0.0)
        guard.adjust(ledger, ledger.sequences, float(second))
    assert guard.limit == inf


def test_without_a_target_no_paces_are_remembered() -> None:
    """Whatever comes to its end: nobody would ever forget them."""
    guard = DecodeGuard(None)
    for second in range(100):
        over = crowd(3)
        decoding(over, 0.02, second + 0.5, float(second))
        for one in over:
            guard.ended(one, second + 0.5)
        guard.adjust(over, 0, second + 0.5)
    assert not guard._finished
    assert guard.limit == inf


def refused_for_decode(guards: Guards, ledger: Ledger, now: float) -> bool:
    refusal = guards.refuse(lease("next").claim, ledger, now)
    if refusal is not None:
        guards.turned_away(refusal.reason)
    return refusal is not None and refusal.reason is RejectReason.DECODE_CONCURRENCY


@pytest.mark.parametrize("limit", [1.5, 2.9, 6.9, 7.0, 8.95, 40.0])
def test_no_limit_is_a_lock_in_between_two_whole_numbers(limit: float) -> None:
    """At 6.9 six run, less than 90 % of it: a replay stayed at six, with a fifth of the target used."""
    guards, ledger = Guards(None, 0.1, None), crowd(int(limit))
    guards.decode.limit = limit
    for second in range(1, 20):
        decoding(ledger, 0.02, float(second), 0.0)
        refused_for_decode(guards, ledger, float(second))
        guards.decode.adjust(ledger, ledger.sequences, float(second))
    assert not refused_for_decode(guards, ledger, 20.0)


def test_a_request_of_many_sequences_moves_the_limit_that_refuses_it() -> None:
    """Eight at a time under a limit of 15: one request runs, and the next needs a higher limit."""
    guards, ledger = Guards(None, 0.1, None), Ledger()
    ledger.open(lease("many", n=8))
    guards.decode.limit = 15.0
    for second in range(1, 10):
        decoding(ledger, 0.02 / 8, float(second), 0.0)
        refusal = guards.refuse(lease("next", n=8).claim, ledger, float(second))
        if refusal is not None:
            guards.turned_away(refusal.reason)
        guards.decode.adjust(ledger, ledger.sequences, float(second))
    assert guards.decode.limit >= 16.0


def test_a_limit_left_by_streams_is_tried_again_where_no_pace_is_seen_any_more() -> None:
    """Answers of a few tokens, or none shown until their end: nothing is read, and nothing may stay shut."""
    guards, ledger = Guards(None, 0.1, None), crowd(3)
    guards.decode.limit = 3.0
    for second in range(1, 30):
        if not refused_for_decode(guards, ledger, float(second)):
            break
        guards.decode.adjust(ledger, ledger.sequences, float(second))
    assert guards.decode.limit >= 4.0
    assert guards.decode.measured_s is None


def test_a_standing_engine_does_not_open_the_gate() -> None:
    """No token for some seconds is no good pace."""
    guards, ledger = Guards(None, 0.1, None), crowd(10)
    guards.decode.limit = 10.0
    for second in (8.0, 10.0):
        decoding(ledger, 0.08, second, 0.0)
        guards.decode.adjust(ledger, ledger.sequences, second)
    before = guards.decode.limit
    assert guards.decode.measured_s is not None
    ledger.open(lease("one more"))
    ledger.open(lease("and another"))
    for second in range(12, 16):
        assert refused_for_decode(guards, ledger, float(second))
        guards.decode.adjust(ledger, ledger.sequences, float(second))
    assert guards.decode.limit == before


def test_a_crowd_of_the_past_is_not_held_against_a_long_answer() -> None:
    guard, ledger = DecodeGuard(0.1), crowd(1)
    one = next(iter(ledger))
    one.first_token_at, one.output_tokens = 0.0, 100.0  # 100 s for 100 tokens: a crowd, long ago
    for second in range(100, 110):
        one.output_tokens += 50.0
        one.last_token_at = float(second)
        guard.adjust(ledger, ledger.sequences, float(second))
    assert guard.limit == inf
    assert guard.measured_s == 0.02


def pages(
    guard: SlotGuard, count: int, start: float = 0.0, *, usage: float = 0.3, prefilling: int = 10
) -> float:
    """Pages with 64 running and 10 waiting, a lease ending between each two; returns the time after."""
    for number in range(count):
        guard.page(64, 10, usage, prefilling, start + number * 0.2)
        guard.ended()
    return start + count * 0.2


def test_slots_are_inferred_from_a_plateau_with_an_empty_pool() -> None:
    guard = SlotGuard(None)
    now = pages(guard, 4)
    assert guard.limit == inf
    now = pages(guard, 2, now)
    assert guard.limit == 64


def test_an_inferred_limit_is_tried_again() -> None:
    guard = SlotGuard(None)
    now = pages(guard, 6)
    guard.page(64, 0, 0.3, 0, now + 20)
    assert guard.limit == 64
    guard.page(64, 0, 0.3, 0, now + 40)
    assert guard.limit == inf


def test_waiting_on_a_full_pool_or_behind_a_prompt_says_nothing_of_slots() -> None:
    guard = SlotGuard(None)
    pages(guard, 20, usage=0.95)
    assert guard.limit == inf
    pages(guard, 20, prefilling=11)
    assert guard.limit == inf


def test_a_standing_engine_says_nothing_of_slots() -> None:
    guard = SlotGuard(None)
    for number in range(20):
        guard.page(64, 10, 0.3, 10, number * 0.2)
    assert guard.limit == inf


def test_configured_slots_win() -> None:
    guards, ledger = Guards(2.0, 0.1, 4), crowd(4)
    asked = lease("one").claim
    refusal = guards.refuse(asked, ledger, 0.0)
    assert refusal is not None
    assert refusal.reason is RejectReason.SEQUENCE_SLOTS
    ledger.end("c0", EndReason.FINISHED, 1.0)
    assert guards.refuse(asked, ledger, 1.0) is None


def test_an_idle_engine_is_never_guarded() -> None:
    guards = Guards(2.0, 0.1, 1)
    assert guards.refuse(lease("many", n=8).claim, Ledger(), 0.0) is None
