"""Prefix caching of the simulated engine, of replays, and what the gate makes of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.sim.beginnings import BORDER, block_hashes, prefix, with_system_prompt
from kvctl.sim.blocks import PoolError
from kvctl.sim.cache import CachingPool
from kvctl.sim.profiles import PROFILES
from kvctl.sim.replay_policies import Spec, run_policy
from kvctl.sim.replay_score import Target, figures
from kvctl.sim.replay_setup import engine_config, make_scene
from kvctl.sim.requests import Reader
from kvctl.sim.scheduler import EngineConfig, Scheduler, Sequence
from kvctl.sim.text import block_hashes as hashes_of_ids
from kvctl.sim.trace import Row, TraceError, read_trace
from tests.effort import examples

BLOCK = 16


def config(blocks: int = 100, *, caching: bool = True) -> EngineConfig:
    return EngineConfig(
        profile=PROFILES["tiny-cpu"],
        blocks=blocks,
        block_size=BLOCK,
        prefix_caching=caching,
        max_model_len=4096,
    )


def sequence(name: str, ids: list[int], output: int = 4) -> Sequence:
    return Sequence(
        id=name,
        prompt=len(ids),
        max_output=output,
        true_output=output + 1,
        hashes=hashes_of_ids(ids, BLOCK),
    )


def run(scheduler: Scheduler) -> None:
    for _ in range(10_000):
        plan = scheduler.plan()
        if plan is None:
            return
        scheduler.commit(plan)
    raise AssertionError("it never ends")


COMMON = list(range(160))


def test_hit_blocks_need_no_prefill_and_are_held_once() -> None:
    scheduler = Scheduler(config())
    one, two = sequence("a", [*COMMON, 1], 50), sequence("b", [*COMMON, 2], 50)
    scheduler.add(one)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan)
    scheduler.add(two)
    plan = scheduler.plan()
    assert plan is not None
    assert [(chunk.sequence.id, chunk.tokens) for chunk in plan.chunks] == [("a", 1), ("b", 1)]
    assert one.blocks[:10] == two.blocks[:10]
    assert scheduler.pool.usable - scheduler.pool.free == 12
    scheduler.commit(plan)
    assert (scheduler.counters.prefix_queries, scheduler.counters.prefix_hits) == (322, 160)
    run(scheduler)
    assert scheduler.pool.free == scheduler.pool.usable


def test_a_whole_prompt_in_the_cache_computes_its_last_block_anew() -> None:
    scheduler = Scheduler(config())
    scheduler.add(sequence("a", COMMON))
    run(scheduler)
    again = sequence("b", COMMON)
    scheduler.add(again)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.chunks[0].tokens == BLOCK
    assert scheduler.counters.prefix_hits == 144


def test_without_the_flag_nothing_is_shared() -> None:
    scheduler = Scheduler(config(caching=False))
    for name in "ab":
        scheduler.add(sequence(name, COMMON))
    run(scheduler)
    assert (scheduler.counters.prefix_queries, scheduler.counters.computed_prompt_tokens) == (0, 320)


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning() -> None:
    pool = CachingPool(11, BLOCK)
    old, new = pool.take(4), pool.take(4)
    assert old is not None
    assert new is not None
    for at, block in enumerate([*old, *new]):
        pool.keep(block, at)
    pool.give_back(list(old))
    pool.give_back(list(new))
    assert pool.free == 10
    assert pool.take(4) is not None  # two that never held anything, then the end of the older one
    assert (len(pool.find(range(4), 4)), len(pool.find(range(4, 8), 8))) == (2, 4)
    pool.read(pool.find(range(4), 4))
    assert pool.take(5) is None
    assert pool.take(4) is not None
    assert (len(pool.find(range(4), 4)), len(pool.find(range(4, 8), 8))) == (2, 0)


def test_a_block_freed_twice_is_told() -> None:
    pool = CachingPool(4, BLOCK)
    taken = pool.take(1)
    assert taken is not None
    pool.read(taken)
    pool.give_back(list(taken))
    pool.give_back(list(taken))
    with pytest.raises(PoolError):
        pool.give_back(list(taken))


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.integers(1, 30), st.integers(0, 3)),
        min_size=1,
        max_size=20,
    ),
    st.integers(14, 60),
)
@settings(max_examples=examples(60), deadline=None)
def test_blocks_are_exact_whatever_comes(arrivals: list[tuple[list[int], int, int]], blocks: int) -> None:
    """Readers of a block are those who list it, its contents are theirs, and at the end all are free."""
    scheduler = Scheduler(config(blocks))
    for name, (words, output, steps) in enumerate(arrivals):
        ids = [word for word in words for _ in range(12)]
        scheduler.add(sequence(str(name), ids, output))
        for _ in range(steps):
            plan = scheduler.plan()
            if plan is not None:
                scheduler.commit(plan)
            held = [block for one in scheduler.running for block in one.blocks]
            assert scheduler.pool.free == scheduler.pool.usable - len(set(held))
            contents: dict[int, int] = {}
            for one in scheduler.running:
                for block, known in zip(one.blocks, one.hashes, strict=False):
                    assert contents.setdefault(block, known) == known
    run(scheduler)
    assert scheduler.pool.free == scheduler.pool.usable
    assert scheduler.counters.prefix_hits <= scheduler.counters.prefix_queries


# --- traces -----------------------------------------------------------------------------------------


@pytest.fixture
def family(tmp_path: Path) -> list[Row]:
    """0 <- 1 (100 tokens) <- 2 (150, of which 100 are 0's) <- 3 (80); 4 stands alone."""
    path = tmp_path / "t.csv"
    path.write_text(
        "t_s,input_tokens,output_tokens,parent_row,shared_prefix_tokens\n"
        "0,200,5,-1,0\n1,300,5,0,100\n2,400,5,1,150\n3,300,5,2,80\n4,300,5,-1,0\n"
    )
    return read_trace(path)


def test_a_row_descends_from_the_first_that_brought_its_tokens(family: list[Row]) -> None:
    assert [row.lineage for row in family] == [(), ((100, 0),), ((100, 0), (150, 1)), ((80, 0),), ()]


def positions(row: Row) -> Iterator[tuple[int, int]]:
    """The tokens of a prompt, each by who brought it and its place."""
    for at in range(row.prompt_tokens):
        yield next((owner for end, owner in row.lineage if at < end), row.number), at


@pytest.mark.parametrize("system", [0, 40, 300])
def test_hashes_are_equal_where_the_tokens_are(family: list[Row], system: int) -> None:
    rows = with_system_prompt(family, system)
    assert [row.prompt_tokens for row in rows] == [row.prompt_tokens + system for row in family]
    for one in rows:
        for other in rows:
            mine, theirs = list(positions(one)), list(positions(other))
            pairs = zip(block_hashes(one, BLOCK), block_hashes(other, BLOCK), strict=False)
            for number, (known, seen) in enumerate(pairs, 1):
                assert (known == seen) == (mine[: number * BLOCK] == theirs[: number * BLOCK])
            for (tokens, known), (_, seen) in zip(prefix(one), prefix(other), strict=False):
                assert tokens % BORDER == 0
                assert (known == seen) == (mine[:tokens] == theirs[:tokens])


def test_a_parent_that_comes_later_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "t_s,input_tokens,output_tokens,parent_row,shared_prefix_tokens\n0,20,5,1,10\n1,20,5,-1,0\n"
    )
    with pytest.raises(TraceError, match="comes later"):
        read_trace(path)


# --- the gate ---------------------------------------------------------------------------------------


def chats(count: int, per_s: float) -> list[Row]:
    return [
        Row(number=n, at_s=n / per_s, prompt_tokens=60 + n * 37 % 200, output_tokens=40 + n * 53 % 240)
        for n in range(count)
    ]


def test_a_common_system_prompt_is_worth_a_multiple() -> None:
    engine = replace(engine_config(PROFILES["8b-24g"], 24_000, 8192, prefix_caching=True), max_num_seqs=256)
    scene = make_scene(chats(400, 9.0), engine, cap="1024", shared_prefix=3000)
    runs = {
        shares: figures(run_policy(Spec("forecast", prefix_sharing=shares), scene), Target())
        for shares in (True, False)
    }
    assert runs[True].goodput_rps >= 2.5 * runs[False].goodput_rps
    assert runs[True].preemptions == runs[False].preemptions == 0


def test_the_server_reads_beginnings_from_bodies() -> None:
    reader = Reader(config(), "sim", 1)
    system = {"role": "system", "content": "Be brief. " * 40}

    def known(**more: object) -> tuple[int, ...]:
        body = {"messages": [system, {"role": "user", "content": "a" * 40}], **more}
        return reader.read(body, chat=True).hashes[0]

    assert known() == known(max_tokens=7)
    assert not set(known()) & set(known(cache_salt="x"))
    (one, two) = reader.read({"prompt": [[7] * 40, [7] * 32 + [8] * 8]}, chat=False).hashes
    assert one == two == hashes_of_ids([7] * 32, BLOCK)
    assert Reader(config(caching=False), "sim", 1).read({"prompt": "a" * 400}, chat=False).hashes == ()
