"""The gate as a conversation: leases, what their lengths teach, and traffic of others."""

from dataclasses import replace

import pytest

from kvctl.core.events import (
    LeaseEnded,
    Progressed,
)
from kvctl.core.ledger import LedgerError
from kvctl.core.outcomes import (
    Decision,
    EndReason,
    Policy,
    RejectReason,
)
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import LengthHistogram
from tests.core.conversation import GIB, PAGE, Conversation, is_refused, shape

STATIC = GateConfig(policy=Policy.STATIC)


def test_traffic_that_bypasses_the_gate_is_charged_and_named() -> None:
    talk = Conversation().up()
    for _ in range(40):
        talk.tick()
        talk.page(kv_usage_ratio=0.5)
    assert talk.status.unattributed_tokens == pytest.approx(24_000, rel=0.02)
    assert talk.admitted_of(100, shape(990, 10)) == pytest.approx(21, abs=1)


def test_generations_that_outlive_their_clients_stay_charged() -> None:
    """B04: clients are gone and the ledger is empty, but the engine runs on at usage 0.4 for ten minutes."""
    talk = Conversation(STATIC).up()
    ids = [talk.admit(shape(6_000, 400)) for _ in range(3)]
    talk.live(2)
    for request_id in ids:
        talk.end(request_id, EndReason.CLIENT_GONE)
    for minute in range(10):
        for poll in range(20):
            talk.tick(3.0)
            talk.page(kv_usage_ratio=0.4, running=3, generation_tokens_total=1000.0 * minute + poll)
        assert talk.status.leases == 0
        assert talk.status.unattributed_tokens == pytest.approx(0.4 * 48_000, rel=0.05)
    assert talk.admitted_of(100, shape(990, 10)) == pytest.approx((0.95 - 0.4) * 48, abs=2)


@pytest.mark.parametrize("stream", [True, False])
def test_own_traffic_is_nobody_elses(stream: bool) -> None:
    """Answers that show nothing until their end must not look like foreign tokens while they grow."""
    talk = Conversation().up()
    ids = [talk.admit(shape(500, 1000, stream=stream)) for _ in range(20)]
    for i in range(1, 150):
        talk.tick()
        if stream:
            for request_id in ids:
                talk.tokens(request_id, 6)
        used = 20 * (500 + min(6 * i, 1000))
        talk.page(kv_usage_ratio=used / 48_000, running=20, generation_tokens_total=float(20 * 6 * i))
        assert talk.status.unattributed_tokens < 0.02 * 48_000


def test_others_tokens_do_not_make_own_streams_look_longer() -> None:
    """Half of what the engine generates is not ours: an event is one token all the same."""
    talk = Conversation().up()
    ids = [talk.admit(shape(100, 4000)) for _ in range(5)]
    for i in range(1, 200):
        talk.tick()
        for request_id in ids:
            talk.tokens(request_id, 4)
        talk.page(running=10, generation_tokens_total=float(40 * i))
    assert talk.status.held_tokens == pytest.approx(5 * (100 + 199 * 4), rel=0.02)


def test_own_answers_that_show_nothing_do_not_make_streams_look_longer() -> None:
    talk = Conversation().up()
    streams = [talk.admit(shape(100, 4000)) for _ in range(5)]
    for _ in range(5):
        talk.admit(shape(100, 4000, stream=False))
    for i in range(1, 200):
        talk.tick()
        for request_id in streams:
            talk.tokens(request_id, 4)
        talk.page(running=10, generation_tokens_total=float(40 * i))
    seen = [talk.end(request_id).record.output_tokens for request_id in streams]
    assert seen == [199 * 4] * 5


def test_speculative_engines_show_more_tokens_than_events() -> None:
    talk = Conversation().up()
    ids = [talk.admit(shape(100, 8000)) for _ in range(5)]
    for i in range(1, 200):
        talk.tick()
        for request_id in ids:
            talk.tokens(request_id, 4)
        talk.page(running=5, generation_tokens_total=float(60 * i))
    assert talk.status.held_tokens > 5 * (100 + 2.2 * 199 * 4)


def test_a_pool_of_another_size_holds_nothing_of_the_old_one() -> None:
    talk = Conversation().up(replace(PAGE, started_at=None))
    for _ in range(30):
        talk.tick()
        talk.page(kv_usage_ratio=0.9)
    talk.page(capacity_tokens=10_000, kv_usage_ratio=0.0)
    assert talk.status.unattributed_tokens == 0


def test_gauges_that_mean_something_else_are_not_compared() -> None:
    talk = Conversation().up()
    talk.page(kv_usage_ratio=0.9, unsupported="kv connector")
    for _ in range(30):
        talk.tick()
        talk.page()
    assert talk.status.unattributed_tokens == 0


@pytest.mark.parametrize("reason", list(EndReason))
def test_every_end_frees_everything(reason: EndReason) -> None:
    """Law 1."""
    talk = Conversation().up()
    ids = [talk.admit(shape(100 * i, 50, stream=i % 2 == 0)) for i in range(1, 20)]
    talk.tick()
    for i, request_id in enumerate(ids):
        talk.tokens(request_id, i)
        talk.end(request_id, reason)
    status = talk.status
    assert (status.leases, status.claimed_tokens, status.held_tokens) == (0, 0, 0)
    assert status.forecast_peak_tokens == 0.0


def test_a_second_end_and_a_second_id_are_defects_of_the_caller() -> None:
    talk = Conversation().up()
    request_id = talk.admit()
    with pytest.raises(LedgerError):
        talk.ask(shape(), request_id)
    talk.end(request_id)
    with pytest.raises(LedgerError):
        talk.end(request_id)
    assert talk.say(Progressed(request_id, 5)) == []
    assert talk.status.leases == 0


def test_learned_lengths_open_the_gate_for_callers_that_ask_for_much_and_use_little() -> None:
    talk = Conversation().up()
    request = shape(100, 4096)
    before = Conversation().up().admitted_of(500, request)
    for _ in range(300):
        talk.end(talk.admit(request), EndReason.FINISHED, 60)
        talk.now += 0.01
    talk.tick()
    assert talk.admitted_of(500, request) > 4 * before


def test_answers_of_unknown_length_are_not_short_answers() -> None:
    """A non-streaming answer without usage figures: its length is a guess and must not teach "short"."""
    talk = Conversation().up()
    for _ in range(300):
        talk.end(talk.admit(shape(100, 4096, stream=False)), EndReason.FINISHED)
    talk.tick()
    assert talk.admitted_of(500, shape(100, 4096)) <= Conversation().up().admitted_of(500, shape(100, 4096))


def test_answers_cut_at_their_cap_are_not_short_answers() -> None:
    talk = Conversation().up()
    for _ in range(300):
        talk.end(talk.admit(shape(100, 64)), EndReason.CAPPED, 64)
    talk.tick()
    assert talk.admitted_of(500, shape(100, 4096)) <= Conversation().up().admitted_of(500, shape(100, 4096))


def test_a_burst_in_flight_teaches_what_the_first_to_finish_do_not() -> None:
    """Twenty short answers came first, twenty others are past 400 tokens: a new request is not short."""
    few, many = Conversation().up(), Conversation().up()
    for talk in (few, many):
        for _ in range(20):
            talk.end(talk.admit(shape(10, 4096)), EndReason.FINISHED, 20)
    ids = [many.admit(shape(10, 4096)) for _ in range(20)]
    many.tick()
    for request_id in ids:
        many.tokens(request_id, 400)
    many.tick()
    for request_id in ids:
        many.end(request_id, EndReason.ENGINE_REFUSED, 0)
    few.tick()
    assert few.admitted_of(500, shape(10, 4096)) > 1.5 * many.admitted_of(500, shape(10, 4096))


def test_refusals_of_the_engine_teach_nothing() -> None:
    talk = Conversation().up()
    for _ in range(300):
        talk.end(talk.admit(shape(100, 4096)), EndReason.ENGINE_REFUSED)
    talk.tick()
    assert talk.admitted_of(500, shape(100, 4096)) <= Conversation().up().admitted_of(500, shape(100, 4096))


def test_the_engines_histogram_opens_the_gate_before_the_first_answer() -> None:
    lengths = LengthHistogram(bounds=(50.0, 100.0, 200.0, 5000.0), counts=(600.0, 900.0, 1000.0, 1000.0))
    talk = Conversation().up(replace(PAGE, output_lengths=lengths))
    assert talk.admitted_of(500, shape(100, 4096)) > 2 * Conversation().up().admitted_of(
        500, shape(100, 4096)
    )


def test_a_refusal_says_what_was_missing_and_when_to_come_back() -> None:
    talk = Conversation(STATIC).up()
    assert talk.admitted_of(10, shape(7_990, 10)) == 5
    refused = talk.refuse(shape(7_990, 10))
    assert is_refused(refused, Decision.REJECT_LATER, RejectReason.KV_BUDGET)
    assert (refused.needed_tokens, refused.headroom_tokens, refused.limit_tokens) == (8_000, 5_600, 45_600)
    assert refused.retry_after_s
    for i in range(5):
        talk.now += 1.0
        talk.end(f"r{i + 1}")
    assert talk.admitted_of(5, shape(7_990, 10)) == 5
    drained = talk.refuse(shape(7_990, 10)).retry_after_s
    assert drained is not None
    assert 0.25 <= drained < 3.0


def test_ended_leases_are_told_with_their_record() -> None:
    talk = Conversation().up()
    request_id = talk.admit(shape(100, 50))
    talk.tokens(request_id, 7)
    talk.now += 2.0
    ended = talk.end(request_id, EndReason.CLIENT_GONE)
    assert isinstance(ended, LeaseEnded)
    assert (ended.record.reason, ended.record.output_tokens, ended.record.at) == (
        EndReason.CLIENT_GONE,
        7,
        talk.now,
    )


def test_the_status_sentence_says_what_binds() -> None:
    talk = Conversation().up()
    talk.cards(4 * GIB)
    talk.cards(GIB // 2)
    sentence = talk.status.sentence
    for part in ("22,800", "48,000", "gpu_memory", "engine up"):
        assert part in sentence
    assert talk.status.headroom_tokens == 22_800
