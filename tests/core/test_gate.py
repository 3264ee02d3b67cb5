"""The gate as a conversation: what is admitted and refused. Each field case is named by its id."""

from dataclasses import replace

from kvctl.core.events import (
    Admit,
    CapacityPlanned,
    EngineDescribed,
    KnobsChanged,
    Noted,
)
from kvctl.core.outcomes import (
    BudgetReason,
    Decision,
    Policy,
    RejectReason,
)
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo
from tests.core.conversation import PAGE, Conversation, is_refused, shape

STATIC = GateConfig(policy=Policy.STATIC)


def test_simultaneous_requests_cannot_pass_on_the_same_free_tokens() -> None:
    """E06: 50,000 free, twenty requests of 10,000 at once: four with a margin of 5 %, five without."""
    for margin, fit in ((0.05, 4), (0.0, 5)):
        talk = Conversation(GateConfig(margin_ratio=margin)).up(replace(PAGE, capacity_tokens=50_000))
        assert talk.admitted_of(20, shape(9_990, 10)) == fit


def test_what_telemetry_cannot_have_seen_yet_counts_all_the_same() -> None:
    """C11: the page is 10 s late; thirty requests of 5,000 within 2 s into 60,000: eleven with the margin."""
    talk = Conversation().up(replace(PAGE, capacity_tokens=60_000))
    admitted = 0
    for _ in range(30):
        admitted += talk.admitted_of(1, shape(4_990, 10))
        talk.page(late_s=10.0)
        talk.tick(0.067)
    assert admitted == 11


def test_the_ledger_charges_whole_blocks() -> None:
    """E18: 500 requests of 65 tokens in blocks of 256: 190 fit into 51,200 less 5 %, not 748."""
    talk = Conversation().up(replace(PAGE, capacity_tokens=51_200, block_size=256))
    assert talk.admitted_of(500, shape(65, 0)) == 190
    assert talk.status.held_tokens == 190 * 256


def test_the_forecast_admits_what_worst_cases_would_keep_out() -> None:
    """A01: callers that send no limit are not charged the rest of the context each."""
    request = shape(100, None)
    forecast, static = Conversation().up(), Conversation(STATIC).up()
    assert static.admitted_of(50, request) == 1
    assert forecast.admitted_of(50, request) >= 15


def test_a_forecast_never_refuses_what_the_worst_case_would_admit() -> None:
    """Few leases: mean and twice the spread may pass the worst case, and then the worst case counts."""
    page = replace(PAGE, capacity_tokens=8_192)
    for request in (shape(64, 960), shape(512, 512), shape(1000, 2000)):
        forecast = Conversation().up(page).admitted_of(50, request)
        assert forecast >= Conversation(STATIC).up(page).admitted_of(50, request)


def test_tokens_streamed_so_far_raise_the_forecast_of_a_long_answer() -> None:
    """Law 10: the request in hand beats the estimate."""
    talk = Conversation().up()
    ids = [talk.admit(shape(100, 8000)) for _ in range(5)]
    talk.tick()
    before = talk.status.forecast_peak_tokens
    for request_id in ids:
        talk.tokens(request_id, 4000)
    talk.tick()
    assert talk.status.held_tokens == 5 * 4112
    assert talk.status.forecast_peak_tokens > before + 5 * 2000


def test_the_margin_in_force_moves_the_threshold_at_once() -> None:
    talk = Conversation(STATIC).up()
    assert talk.budget == 45_600
    changed = talk.say(KnobsChanged(0.5, Policy.STATIC))
    assert [command.reason for command in talk.changes()][-1] is BudgetReason.MARGIN
    assert changed
    assert talk.budget == 24_000
    assert talk.admitted_of(10, shape(7_990, 10)) == 3


def test_policy_none_admits_everything_that_can_be_served() -> None:
    talk = Conversation(GateConfig(policy=Policy.NONE)).up()
    assert talk.admitted_of(100, shape(4_000, 4_000)) == 100
    assert talk.refuse(shape(60_000, 10)).decision is Decision.REJECT_NEVER


def test_what_is_beyond_the_pool_gets_a_400_and_the_rest_is_served() -> None:
    """E01: a pool of 37,392 and a context of 262,144; a prompt of 60,000, then ten small ones."""
    talk = Conversation(context=262_144).up(replace(PAGE, capacity_tokens=37_392))
    refused = talk.refuse(shape(60_000, 100))
    assert is_refused(refused, Decision.REJECT_NEVER, RejectReason.CAPACITY)
    assert (refused.needed_tokens, refused.limit_tokens, refused.retry_after_s) == (60_112, 37_392, None)
    assert talk.admitted_of(10, shape(100, 100)) == 10


def test_one_rank_must_hold_it_not_all_of_them_together() -> None:
    """C02: two ranks of 50,000: 60,000 never fits, and small requests use both."""
    talk = Conversation(context=131_072).up(
        replace(PAGE, capacity_tokens=50_000), replace(PAGE, rank="1", capacity_tokens=50_000)
    )
    assert talk.refuse(shape(59_000, 1000)).reason is RejectReason.CAPACITY
    assert talk.admitted_of(100, shape(990, 10)) == 94


def test_a_count_in_doubt_beyond_one_rank_is_no_400_and_goes_to_the_engine_when_alone() -> None:
    """Law 4: refused for ever would be a 400 in other words."""
    talk = Conversation(context=131_072).up(
        replace(PAGE, capacity_tokens=50_000), replace(PAGE, rank="1", capacity_tokens=50_000)
    )
    first = talk.ask(shape(97_000, 1000, exact=False))
    assert isinstance(first, Admit)
    assert first.alone
    assert talk.refuse(shape(97_000, 1000, exact=False)).decision is Decision.REJECT_LATER


def test_between_budget_and_capacity_it_runs_when_nothing_else_does() -> None:
    talk = Conversation(context=65_536).up()
    large = shape(46_000, 1_000)
    verdict = talk.ask(large)
    assert isinstance(verdict, Admit)
    assert verdict.alone
    talk.end(verdict.request_id)
    other = talk.admit()
    refused = talk.refuse(large)
    assert is_refused(refused, Decision.REJECT_LATER, RejectReason.TOO_LARGE_NOW)
    assert refused.retry_after_s
    talk.end(other)
    assert talk.admit(large)


def test_the_whole_of_an_idle_pool_is_open_to_one_request() -> None:
    talk = Conversation(STATIC, context=65_536).up()
    talk.admit(shape(47_000, 1_000))
    talk = Conversation(STATIC, context=65_536).up()
    assert talk.refuse(shape(47_000, 1_001)).decision is Decision.REJECT_NEVER


def test_a_residue_of_others_tokens_does_not_close_an_idle_engine() -> None:
    """Unattributed tokens fade slowly on purpose; a gauge at zero says that nobody is there now."""
    talk = Conversation(STATIC, context=65_536).up()
    for _ in range(30):
        talk.tick()
        talk.page(kv_usage_ratio=0.6)
    assert talk.status.unattributed_tokens > 20_000
    assert talk.refuse(shape(47_000, 1_000)).reason is RejectReason.TOO_LARGE_NOW
    talk.page(kv_usage_ratio=0.0)
    assert talk.admit(shape(47_000, 1_000))


def test_a_batch_larger_than_the_pool_runs_in_turn_when_it_is_alone() -> None:
    """A hundred prompts of 1,000 in one body: the engine queues its own sequences; no 400, no lock-out."""
    talk = Conversation(STATIC).up()
    batch = shape([1_000] * 100, 16)
    assert talk.admit(batch)
    assert talk.refuse(shape()).decision is Decision.REJECT_LATER
    assert talk.refuse(batch).decision is Decision.REJECT_LATER


def test_only_an_exact_count_against_an_exact_capacity_says_never() -> None:
    """Law 4."""
    uncertain = Conversation(context=262_144).up(replace(PAGE, capacity_exact=False))
    assert isinstance(uncertain.ask(shape(60_000, 100)), Admit), "alone: forwarded, the engine will say"
    assert uncertain.refuse(shape(60_000, 100)).decision is Decision.REJECT_LATER
    bounded = Conversation(context=262_144).up()
    bounded.admit()
    assert bounded.refuse(shape(60_000, 100, exact=False)).decision is Decision.REJECT_LATER


def test_capacity_unknown_then_known_without_a_restart() -> None:
    """C04: num_gpu_blocks is the string None at first, and 9,271 blocks later."""
    talk = Conversation(context=262_144).up(replace(PAGE, capacity_tokens=None, capacity_exact=False))
    assert talk.status.capacity_tokens == 16_384
    talk.admit()
    assert talk.refuse(shape(200_000, 10)).decision is Decision.REJECT_LATER
    talk.page(capacity_tokens=9_270 * 16, capacity_exact=True)
    assert talk.status.capacity_tokens == 148_320
    assert talk.changes()[-1].reason is BudgetReason.CAPACITY
    assert talk.refuse(shape(200_000, 10)).decision is Decision.REJECT_NEVER


def test_the_context_is_the_engines_and_is_read_again() -> None:
    """A03: max_tokens above the context is a 400; the same after a restart with a longer context is not."""
    talk = Conversation(context=8192).up()
    assert talk.refuse(shape(12, 9000)).reason is RejectReason.CONTEXT
    talk.say(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=16_384)))
    assert talk.admit(shape(12, 9000))


def test_a_planned_capacity_admits_more_than_the_fallback_and_never_proves_a_400() -> None:
    """Law 4: what is beyond a plan is 429, or runs alone, but never 400."""
    talk = Conversation(GateConfig(fallback_budget_tokens=16_384)).up(replace(PAGE, capacity_tokens=None))
    assert talk.status.capacity_source == "fallback"
    (noted,) = [each for each in talk.say(CapacityPlanned(40_000)) if isinstance(each, Noted)]
    assert "planner" in noted.sentence
    assert (talk.status.capacity_tokens, talk.budget) == (40_000, 38_000)
    assert (talk.status.capacity_known, talk.status.capacity_source) == (False, "plan")
    talk.admit(shape(20_000, 100))
    assert talk.refuse(shape(20_000, 100)).decision is Decision.REJECT_LATER
    large = Conversation(GateConfig(), context=200_000).up(replace(PAGE, capacity_tokens=None))
    large.say(CapacityPlanned(40_000))
    large.admit(shape(10, 10))
    assert large.refuse(shape(90_000, 100)).decision is Decision.REJECT_LATER
    large.page(capacity_tokens=48_000)
    assert large.status.capacity_source == "engine"
    large.page(capacity_tokens=None, started_at=2000.0)  # another process, which does not tell
    large.say(CapacityPlanned(None))
    assert large.status.capacity_source == "fallback"


def test_a_request_of_many_sequences_does_not_leave_the_gate_half_shut() -> None:
    """Eight at a time under a decode limit of 15: a refusal moves the limit, through the gate itself."""
    talk = Conversation().up()
    running = talk.admit(shape(100, 2000, n=8))
    talk.gate._demand.guards.decode.limit = 15.0
    for _ in range(60):
        talk.tick()
        talk.tokens(running, 8 * 8)
        talk.page(running=8)
        if isinstance(talk.ask(shape(100, 50, n=8)), Admit):
            return
    raise AssertionError("refused for twelve seconds at a fortieth of the target between tokens")
