"""What engines say of themselves, and how it stands in where a metrics page tells no pool."""

import json

import pytest

from kvctl.core.telemetry import EngineInfo, RankSample, together, with_pool
from kvctl.engines.base import Engine
from kvctl.engines.detect import ENGINES
from tests.conformance.case import page


def told(engine: str, name: str) -> EngineInfo:
    return ENGINES[engine].parse_info(json.loads(page(name)))


def test_tgi_of_today() -> None:
    assert told("tgi", "tgi-3.3-info.json") == EngineInfo(
        engine="tgi",
        models=("meta-llama/Llama-3.1-8B-Instruct",),
        context_tokens=4096,
        version="3.3.4",
        max_num_seqs=128,
        clamps_output=False,
    )


def test_tgi_of_old_tells_its_capacity_here() -> None:
    info = told("tgi", "tgi-2.0-info.json")
    assert (info.rank_capacity_tokens, info.context_tokens, info.max_num_seqs) == (32_000, 2048, 64)


def test_sglang_tells_pool_and_context_on_two_pages() -> None:
    info = together([told("sglang", "sglang-0.5-server-info.json"), told("sglang", "sglang-0.5-models.json")])
    assert info == EngineInfo(
        engine="sglang",
        models=("llama",),
        context_tokens=8192,
        version="0.5.4",
        rank_capacity_tokens=49_380,
        block_size=1,
        ranks=1,
        max_num_seqs=2048,
        clamps_output=True,
    )


def test_sglang_with_ranks_counts_the_sequences_of_all() -> None:
    answer = {
        "model_path": "m",
        "dp_size": 4,
        "internal_states": [
            {"memory_usage": {"token_capacity": 20_000}, "effective_max_running_requests_per_dp": 64}
        ],
    }
    info = ENGINES["sglang"].parse_info(answer)
    assert (info.ranks, info.rank_capacity_tokens, info.max_num_seqs) == (4, 20_000, 256)


def test_sglang_that_cuts_long_prompts_has_no_context_that_proves_anything() -> None:
    answer = {"model_path": "m", "context_length": 4096, "allow_auto_truncate": True}
    assert ENGINES["sglang"].parse_info(answer).context_tokens is None


def test_llamacpp_of_four_slots_is_taken_for_one_shared_pool() -> None:
    info = told("llamacpp", "llamacpp-2026-props.json")
    assert info == EngineInfo(
        engine="llamacpp",
        models=("tiny",),
        context_tokens=512,
        version="b11549-2026",
        rank_capacity_tokens=512,
        block_size=1,
        max_num_seqs=4,
        clamps_output=True,
    )


@pytest.mark.parametrize(("slots", "tokens"), [(1, 512), (8, 4096), (None, 512)])
def test_llamacpp_of_another_number_of_slots_has_split_ones(slots: int | None, tokens: int) -> None:
    answer = {"default_generation_settings": {"n_ctx": 512}, "total_slots": slots}
    info = ENGINES["llamacpp"].parse_info(answer)
    assert (info.rank_capacity_tokens, info.capacity_exact) == (tokens, False)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize(
    "answer",
    [
        {"max_total_tokens": True, "max_total_num_tokens": -1, "total_slots": "4", "context_length": 0},
        {"model_id": 7, "served_model_name": [], "internal_states": [None], "max_total_num_tokens": 1e9},
        {"default_generation_settings": [], "internal_states": {}, "dp_size": 1 << 70},
    ],
)
def test_what_is_no_number_is_unknown(engine: Engine, answer: dict[str, object]) -> None:
    info = engine.parse_info(answer)
    assert (info.models, info.context_tokens, info.rank_capacity_tokens) == ((), None, None)


@pytest.mark.parametrize(
    ("engine", "route", "tokens"),
    [
        ("tgi", "generate", 100),
        ("tgi", "chat", None),
        ("sglang", "generate", 128),
        ("sglang", "completions", 16),
        ("sglang", "chat", None),
        ("llamacpp", "completion", None),
        ("sim", "generate", 512),
        ("sim", "completions", 16),
        ("sim", "chat", None),
    ],
)
def test_default_output(engine: str, route: str, tokens: int | None) -> None:
    adapter = ENGINES[engine]
    asked = next(each for each in adapter.routes if each.name == route)
    assert adapter.default_output(asked) == tokens


def test_a_page_without_pool_gets_the_described_one() -> None:
    info = EngineInfo(rank_capacity_tokens=2048, block_size=1, ranks=2)
    bare = RankSample(rank="0", at=1.0)
    own = RankSample(rank="1", at=1.0, capacity_tokens=999, block_size=16, capacity_exact=True)
    filled, kept = with_pool([bare, own], info)
    assert (filled.capacity_tokens, filled.block_size, filled.capacity_exact) == (2048, 1, False)
    assert kept == own


def test_without_a_page_there_are_as_many_ranks_as_described() -> None:
    ranks = with_pool([], EngineInfo(rank_capacity_tokens=2048, ranks=3))
    assert [(rank.rank, rank.capacity_tokens) for rank in ranks] == [("0", 2048), ("1", 2048), ("2", 2048)]
    assert with_pool([], EngineInfo(ranks=3)) == ()


def test_of_several_answers_the_first_that_says_something_counts() -> None:
    assert together(
        [EngineInfo(context_tokens=1), EngineInfo(context_tokens=2, models=("m",))]
    ) == EngineInfo(context_tokens=1, models=("m",))
