from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.sim.blocks import NULL_BLOCK, BlockPool, PoolError
from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig, Finish, Plan, Sampled, Scheduler, Sequence
from tests.effort import examples

PROFILE = PROFILES["tiny-cpu"]


def engine(
    *,
    blocks: int = 100,
    block_size: int = 16,
    context: int = 8192,
    seqs: int = 256,
    batched: int = 2048,
    chunk: int = 0,
) -> Scheduler:
    config = EngineConfig(
        profile=PROFILE,
        blocks=blocks,
        block_size=block_size,
        max_model_len=context,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        long_prefill_tokens=chunk,
    )
    return Scheduler(config)


def sequence(name: str, prompt: int, output: int, cap: int = 100_000) -> Sequence:
    return Sequence(id=name, prompt=prompt, max_output=cap, true_output=output)


def step(scheduler: Scheduler) -> tuple[Plan, list[Sampled]]:
    plan = scheduler.plan()
    assert plan is not None
    return plan, scheduler.commit(plan)


def run_out(scheduler: Scheduler, most: int = 100_000) -> list[Sampled]:
    """Step until nothing can run; all tokens in order."""
    tokens: list[Sampled] = []
    for _ in range(most):
        plan = scheduler.plan()
        if plan is None:
            return tokens
        tokens += scheduler.commit(plan)
    raise AssertionError("never came to rest")


def names(sequences: object) -> list[str]:
    assert isinstance(sequences, list | tuple) or hasattr(sequences, "__iter__")
    return [one.id for one in sequences]


def test_pool_keeps_the_null_block_for_itself() -> None:
    pool = BlockPool(10, 16)
    taken = pool.take(9)
    assert taken is not None
    assert NULL_BLOCK not in taken
    assert sorted(taken) == list(range(1, 10))
    assert pool.take(1) is None
    assert pool.usage_ratio == 1.0


def test_block_freed_twice_is_a_defect_that_shows() -> None:
    pool = BlockPool(4, 16)
    taken = pool.take(1)
    assert taken is not None
    again = list(taken)
    pool.give_back(taken)
    with pytest.raises(PoolError):
        pool.give_back(again)


def test_pool_of_one_block_is_no_pool() -> None:
    with pytest.raises(ValueError, match="no pool"):
        BlockPool(1, 16)


def test_answer_that_reaches_its_true_length_ends_with_stop() -> None:
    scheduler = engine()
    scheduler.add(sequence("a", 20, 5))
    tokens = run_out(scheduler)
    assert [one.finish for one in tokens] == [None] * 4 + [Finish.STOP]
    assert scheduler.pool.free == scheduler.pool.usable


def test_answer_that_reaches_its_cap_ends_with_length() -> None:
    scheduler = engine()
    scheduler.add(sequence("a", 20, 50, cap=3))
    assert [one.finish for one in run_out(scheduler)] == [None, None, Finish.LENGTH]


def test_context_ends_an_answer() -> None:
    scheduler = engine(context=30)
    scheduler.add(sequence("a", 20, 1000))
    tokens = run_out(scheduler)
    assert len(tokens) == 10
    assert tokens[-1].finish is Finish.LENGTH


def test_prompt_that_fills_the_context_is_not_taken() -> None:
    with pytest.raises(ValueError, match="context"):
        engine(context=30).add(sequence("a", 30, 1))


def test_prompt_is_computed_in_chunks_and_its_blocks_come_with_them() -> None:
    scheduler = engine(block_size=16, batched=32)
    one = sequence("a", 100, 2)
    scheduler.add(one)
    held = []
    for _ in range(4):
        _, sampled = step(scheduler)
        held.append(len(one.blocks))
    assert held == [2, 4, 6, 7]
    assert [s.sequence.id for s in sampled] == ["a"]


def test_decode_takes_a_block_when_the_last_one_is_full() -> None:
    scheduler = engine(block_size=16)
    one = sequence("a", 16, 10)
    scheduler.add(one)
    step(scheduler)
    assert len(one.blocks) == 1
    step(scheduler)
    assert (one.computed, len(one.blocks)) == (17, 2)


def test_head_of_waiting_blocks_those_behind_it() -> None:
    scheduler = engine(blocks=11, block_size=16)
    for name, prompt in (("big", 100), ("huge", 100), ("small", 10)):
        scheduler.add(sequence(name, prompt, 20))
    step(scheduler)
    assert names(scheduler.running) == ["big"]
    assert names(scheduler.waiting) == ["huge", "small"]


def test_two_prompts_pass_on_the_same_free_blocks() -> None:
    """What is checked whole is taken chunk by chunk: the second finds its blocks eaten, and yields."""
    scheduler = engine(blocks=11, block_size=16, chunk=32)
    scheduler.add(sequence("a", 96, 5))
    scheduler.add(sequence("b", 96, 5))
    step(scheduler)
    assert names(scheduler.running) == ["a", "b"]
    assert names(step(scheduler)[0].preempted) == []
    assert names(step(scheduler)[0].preempted) == ["b"]


def test_growing_answers_eat_the_blocks_that_a_prompt_was_checked_against() -> None:
    scheduler = engine(blocks=7, block_size=16, batched=34)
    scheduler.add(sequence("a", 15, 9))
    scheduler.add(sequence("b", 16, 60))
    step(scheduler)
    scheduler.add(sequence("c", 48, 1))
    step(scheduler)
    assert names(scheduler.running) == ["a", "b", "c"]
    assert names(step(scheduler)[0].preempted) == ["c"]


def test_last_of_the_running_is_preempted_and_goes_to_the_front() -> None:
    scheduler = engine(blocks=5, block_size=16)
    for name in ("a", "b", "c"):
        scheduler.add(sequence(name, 15, 40))
    scheduler.add(sequence("late", 60, 1))
    step(scheduler)
    preempted: list[str] = []
    while not preempted:
        plan, _ = step(scheduler)
        preempted = names(plan.preempted)
    assert preempted == ["c"]
    assert names(scheduler.running) == ["a", "b"]
    assert names(scheduler.waiting) == ["c", "late"]
    victim = scheduler.waiting[0]
    assert (victim.blocks, victim.computed, victim.preemptions) == ([], 0, 1)
    assert victim.output > 0


def test_nothing_starts_in_a_step_that_preempted() -> None:
    scheduler = engine(blocks=5, block_size=16)
    for name in ("a", "b", "c"):
        scheduler.add(sequence(name, 15, 40))
    step(scheduler)
    scheduler.add(sequence("tiny", 1, 1))
    running = set(names(scheduler.running))
    plan, _ = step(scheduler)
    while not plan.preempted:
        running = set(names(scheduler.running))
        plan, _ = step(scheduler)
    assert {chunk.sequence.id for chunk in plan.chunks} <= running


def test_preempted_sequence_computes_prompt_and_output_again() -> None:
    scheduler = engine(blocks=5, block_size=16)
    for name in ("a", "b", "c"):
        scheduler.add(sequence(name, 15, 20))
    tokens = run_out(scheduler)
    counters = scheduler.counters
    assert counters.preemptions > 0
    assert len(tokens) == counters.generation_tokens == 60
    assert counters.prompt_tokens == 45
    assert counters.computed_prompt_tokens > 45
    assert counters.finished[Finish.STOP] == 3


def test_max_num_seqs_holds() -> None:
    scheduler = engine(seqs=2)
    for name in ("a", "b", "c"):
        scheduler.add(sequence(name, 4, 3))
    step(scheduler)
    assert names(scheduler.running) == ["a", "b"]


def test_sequence_larger_than_the_pool_waits_for_ever_and_all_behind_it() -> None:
    scheduler = engine(blocks=5, block_size=16)
    scheduler.add(sequence("giant", 200, 1))
    scheduler.add(sequence("small", 4, 1))
    assert scheduler.plan() is None
    assert scheduler.abort(scheduler.waiting[0])
    assert [one.finish for one in run_out(scheduler)] == [Finish.STOP]


def test_sequence_that_outgrows_the_pool_ends_up_waiting_for_ever() -> None:
    scheduler = engine(blocks=3, block_size=16)
    scheduler.add(sequence("a", 10, 100))
    run_out(scheduler)
    assert names(scheduler.waiting) == ["a"]
    assert scheduler.pool.free == scheduler.pool.usable


@pytest.mark.parametrize("when", ["waiting", "between plan and commit", "running"])
def test_abort_frees_what_was_held(when: str) -> None:
    scheduler = engine()
    one, other = sequence("a", 40, 50), sequence("b", 40, 3)
    scheduler.add(one)
    scheduler.add(other)
    plan = scheduler.plan() if when != "waiting" else None
    if when == "running":
        assert plan is not None
        scheduler.commit(plan)
    assert scheduler.abort(one)
    if when == "between plan and commit":
        assert plan is not None
        assert names([s.sequence for s in scheduler.commit(plan)]) == ["b"]
    assert not scheduler.abort(one)
    run_out(scheduler)
    assert scheduler.pool.free == scheduler.pool.usable
    assert scheduler.counters.finished == {Finish.STOP: 1, Finish.LENGTH: 0, Finish.ABORT: 1}


def test_step_time_follows_the_profile() -> None:
    scheduler = engine()
    scheduler.add(sequence("a", 100, 5))
    prefill, _ = step(scheduler)
    decode, _ = step(scheduler)
    assert prefill.seconds == pytest.approx(PROFILE.base_s + 100 * PROFILE.prefill_token_s)
    assert decode.seconds == pytest.approx(
        PROFILE.base_s + PROFILE.decode_sequence_s + 100 * PROFILE.kv_token_s
    )


def check(scheduler: Scheduler) -> None:
    """Every block is free or held by exactly one sequence, and nobody holds more than it needs."""
    pool, sequences = scheduler.pool, [*scheduler.running, *scheduler.waiting]
    held = [block for one in sequences for block in one.blocks]
    assert len(held) == len(set(held))
    assert NULL_BLOCK not in held
    assert len(held) + pool.free == pool.usable
    assert all(not one.blocks for one in scheduler.waiting)
    for one in scheduler.running:
        assert pool.blocks_for(one.computed) <= len(one.blocks) <= pool.blocks_for(one.tokens)
    assert len(scheduler.running) <= scheduler.config.max_num_seqs


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 180), st.integers(1, 60), st.integers(1, 60)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.booleans(), st.none()),
        st.tuples(st.just("step"), st.integers(1, 12), st.none(), st.none()),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    actions=actions,
    blocks=st.integers(2, 20),
    batched=st.integers(8, 64),
    seqs=st.integers(1, 6),
    chunk=st.integers(0, 40),
)
def test_blocks_are_conserved_whatever_comes(
    actions: list[tuple[str, int, int, int]], blocks: int, batched: int, seqs: int, chunk: int
) -> None:
    scheduler = engine(blocks=blocks, block_size=16, context=256, seqs=seqs, batched=batched, chunk=chunk)
    added: list[Sequence] = []
    plan: Plan | None = None

    def commit() -> None:
        nonlocal plan
        if plan is not None:
            before = scheduler.counters.generation_tokens
            sampled = scheduler.commit(plan)
            assert scheduler.counters.generation_tokens - before == len(sampled)
            assert sum(chunk.tokens for chunk in plan.chunks) <= batched
        plan = None

    def add(prompt: int, output: int, cap: int) -> None:
        added.append(sequence(str(len(added)), prompt, output, cap))
        scheduler.add(added[-1])

    def abort(which: int, _mid_step: int, _nothing: int) -> None:
        if added:
            scheduler.abort(added[which % len(added)])

    def steps(count: int, _nothing: int, _neither: int) -> None:
        nonlocal plan
        for _ in range(count):
            commit()
            plan = scheduler.plan()

    does: dict[str, Callable[[int, int, int], None]] = {"add": add, "abort": abort, "step": steps}
    for action, first, second, third in actions:
        does[action](first, second, third)
        check(scheduler)
    commit()
    for one in added:
        scheduler.abort(one)
    check(scheduler)
    assert scheduler.pool.free == scheduler.pool.usable
    assert scheduler.pool.usage_ratio == 0.0
    assert sum(scheduler.counters.finished.values()) == len(added)


@given(prompts=st.lists(st.integers(1, 100), min_size=1, max_size=8), outputs=st.integers(1, 40))
@settings(max_examples=examples(50), deadline=None)
def test_everybody_who_fits_is_served_in_full_and_in_order(prompts: list[int], outputs: int) -> None:
    scheduler = engine(blocks=12, block_size=16, context=1000)
    for index, prompt in enumerate(prompts):
        scheduler.add(sequence(str(index), prompt, outputs))
    tokens = run_out(scheduler)
    assert scheduler.idle
    assert scheduler.counters.finished[Finish.STOP] == len(prompts)
    assert len(tokens) == outputs * len(prompts)
    firsts = list(dict.fromkeys(one.sequence.id for one in tokens))
    assert all(int(a) < int(b) for a, b in pairwise(firsts))
