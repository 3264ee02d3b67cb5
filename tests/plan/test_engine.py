from fractions import Fraction
from typing import Any

import pytest

from kvctl.plan import GIB, Flags, Given, Plan, PlanError, card_of, describe, make_plan
from kvctl.plan.accounting import VllmAccounting
from kvctl.plan.dtypes import kv_scheme, resolve_kv_dtype
from kvctl.plan.pages import Kind
from kvctl.plan.vllm import Layout, longest_fit
from tests.plan.configs import ALL, DEEPSEEK, GEMMA3, JAMBA, LLAMA3_8B, NEMOTRON_H, QWEN_NEXT, WHISPER


def planned(
    config: dict[str, Any], gib: float = 10.0, draft: dict[str, Any] | None = None, **flags: Any
) -> Plan:
    spec = None if draft is None else describe(draft, "draft")
    return make_plan(describe(config), Flags(**flags), Given(available_gib=gib), spec)


def layout(plan: Plan) -> Layout:
    assert isinstance(plan.accounting, VllmAccounting)
    return plan.accounting.layout


def test_the_published_example_to_the_digit() -> None:
    given = Given(card=card_of("24GiB"), weights_gib=16, overhead_gib=2)
    plan = make_plan(describe(LLAMA3_8B), Flags(), given)
    assert plan.accounting.bytes_per_token == 131072
    assert plan.pool.kv_tokens == plan.pool.kv_tokens_logged == 49152
    assert plan.memory.exact


def test_heads_are_divided_over_tp_and_replicated_beyond() -> None:
    assert [planned(LLAMA3_8B, tp=tp).accounting.bytes_per_token for tp in (1, 2, 8, 16)] == [
        131072,
        65536,
        16384,
        16384,
    ]
    assert any("replicated" in warning for warning in planned(LLAMA3_8B, tp=16).warnings)
    with pytest.raises(PlanError, match="--tp 3"):
        planned(LLAMA3_8B, tp=3)


def test_latent_kv_is_not_divided_by_tp_but_by_dcp() -> None:
    one, eight = planned(DEEPSEEK, tp=1), planned(DEEPSEEK, tp=8)
    assert one.accounting.bytes_per_token == eight.accounting.bytes_per_token == 61 * 1152
    assert planned(DEEPSEEK, tp=8, dcp=8).pool.kv_tokens == 8 * eight.pool.kv_tokens
    assert planned(DEEPSEEK, kv_dtype="fp8").accounting.bytes_per_token == 61 * 576
    assert planned(DEEPSEEK, kv_dtype="fp8_ds_mla").accounting.bytes_per_token == 61 * 656


def test_latent_rows_through_the_ages() -> None:
    sizes = [
        planned(DEEPSEEK, version=v).accounting.bytes_per_token // 61
        for v in ("0.6.6", "0.7.0", "0.7.2", "0.8.0")
    ]
    assert sizes == [128 * 512 * 2, 1152, 1280, 1152]


def test_an_indexer_adds_132_bytes() -> None:
    sparse = DEEPSEEK | {"index_topk": 2048, "index_head_dim": 128}
    assert planned(sparse).accounting.bytes_per_token == 61 * (1152 + 132)
    assert planned(sparse, kv_dtype="fp8").accounting.bytes_per_token == 61 * (656 + 132)
    assert layout(planned(sparse)).groups == 1


@pytest.mark.parametrize(
    ("name", "bytes_of_256"),
    [
        ("bfloat16", 512),
        ("fp8_e4m3", 256),
        ("nvfp4", 144),
        ("int8_per_token_head", 264),
        ("int4_per_token_head", 136),
    ],
)
def test_bytes_of_a_head_by_kv_dtype(name: str, bytes_of_256: int) -> None:
    assert resolve_kv_dtype(name, "bfloat16").head_bytes(256) == Fraction(bytes_of_256)


@pytest.mark.parametrize(
    ("quantization", "scheme"),
    [
        (None, ""),
        ({"quant_method": "fp8"}, ""),
        (
            {
                "quant_method": "modelopt",
                "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
            },
            "fp8",
        ),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, ""),
    ],
)
def test_the_checkpoints_kv_scheme(quantization: dict[str, Any] | None, scheme: str) -> None:
    assert kv_scheme(quantization) == scheme


def test_a_checkpoint_that_chooses_fp8_doubles_the_pool_and_is_named() -> None:
    scheme = {
        "quant_method": "modelopt",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    }
    plan = planned(LLAMA3_8B | {"quantization_config": scheme})
    assert plan.accounting.bytes_per_token == 65536
    assert any("checkpoint" in warning for warning in plan.warnings)


def test_sliding_groups_reserve_what_is_in_flight() -> None:
    old = planned(GEMMA3, version="0.19", max_model_len=32768, max_num_batched_tokens=2048)
    new = planned(GEMMA3, version="0.28", max_model_len=32768, max_num_batched_tokens=2048)
    assert layout(old).groups == 7
    assert layout(old).blocks_for(32768, old.setup) == 2048 + 6 * ((511 + 2048 + 15) // 16 + 1)
    assert layout(new).blocks_for(32768, new.setup) == 2048 + 6 * ((511 + 4096 + 15) // 16 + 1)
    single = planned(GEMMA3, version="0.28", async_scheduling=False, max_num_batched_tokens=2048)
    assert single.setup.in_flight == 2048


def test_without_the_hybrid_manager_a_window_saves_nothing() -> None:
    plan = planned(GEMMA3, hybrid_manager=False)
    assert layout(plan).groups == 1
    assert plan.accounting.bytes_per_token_beyond == plan.accounting.bytes_per_token
    assert (
        planned(GEMMA3, version="0.8.5").accounting.bytes_per_token_beyond == plan.accounting.bytes_per_token
    )


def test_the_token_line_changed_with_0_20_1() -> None:
    old, new = planned(GEMMA3, version="0.20.0"), planned(GEMMA3, version="0.20.1")
    assert old.pool.num_blocks == new.pool.num_blocks
    assert old.pool.kv_tokens_logged == old.pool.num_blocks // 7 * 16
    assert new.pool.kv_tokens_logged == int(new.pool.max_concurrency * 32768)
    assert planned(GEMMA3, version="0.20.1.dev0+g1").pool.kv_tokens_logged == old.pool.kv_tokens_logged


def test_blocks_are_inflated_until_a_page_holds_a_state() -> None:
    plan = planned(QWEN_NEXT, version="0.10.2", tp=2)
    assert layout(plan).attention_block == 544
    assert layout(plan).bytes_per_block == 12 * 544 * 1024
    assert planned(QWEN_NEXT, version="0.10.2", tp=2, block_size=1024).accounting.block == 1024


def test_states_per_request_by_cache_mode_and_speculation() -> None:
    plain = planned(QWEN_NEXT, version="0.19")
    aligned = planned(QWEN_NEXT, version="0.28")
    states = [group for group in layout(plain).grouping.groups if group.page.kind is Kind.STATE]
    assert len(states) == 3
    assert plain.accounting.shares(16384)["the recurrent states"] == 3
    assert aligned.accounting.shares(16384)["the recurrent states"] == 6
    drafted = planned(QWEN_NEXT | {"mtp_num_hidden_layers": 1}, version="0.28", num_spec=2, spec_method="mtp")
    assert drafted.accounting.shares(16384)["the recurrent states"] == 3 * 4
    assert layout(drafted).grouping.padding_layers == 3


def test_mamba1_states_do_not_grow_with_speculation_and_jamba_plans() -> None:
    assert layout(planned(JAMBA)).groups == 8
    assert planned(NEMOTRON_H).accounting.bytes_per_token == 2 * 128 * 2 * 2


def test_cross_attention_costs_the_encoder_budget_per_request() -> None:
    plan = planned(WHISPER, max_num_batched_tokens=2048)
    assert plan.accounting.blocks_for(448) == 28 + 128


def test_speculative_layers() -> None:
    eagle = planned(LLAMA3_8B, num_spec=3, spec_method="eagle3")
    assert eagle.accounting.bytes_per_token == 33 * 4096
    assert planned(LLAMA3_8B, num_spec=3, spec_method="ngram").accounting.bytes_per_token == 32 * 4096
    assert planned(DEEPSEEK, num_spec=1).accounting.bytes_per_token == 62 * 1152
    draft = LLAMA3_8B | {"num_hidden_layers": 4}
    assert (
        planned(LLAMA3_8B, draft=draft, num_spec=3, spec_method="draft_model").accounting.bytes_per_token
        == 36 * 4096
    )
    assert layout(planned(LLAMA3_8B, draft=draft, num_spec=3, spec_method="dflash")).groups == 1
    with pytest.raises(PlanError, match="--spec-config"):
        planned(LLAMA3_8B, num_spec=3, spec_method="draft_model")


def test_pipeline_stages_share_the_layers_and_the_largest_decides() -> None:
    config = LLAMA3_8B | {"num_hidden_layers": 61}
    assert planned(config, pp=4).accounting.bytes_per_block == 16 * 16 * 4096
    assert planned(LLAMA3_8B, pp=2).pool.num_blocks == 2 * planned(LLAMA3_8B).pool.num_blocks
    longer = LLAMA3_8B | {"max_position_embeddings": 1 << 20}
    old, new = (planned(longer, pp=2, version=version) for version in ("0.15", "0.16"))
    assert old.pool.num_blocks == new.pool.num_blocks
    assert new.max_model_len_fits == 2 * old.max_model_len_fits
    with pytest.raises(PlanError, match="--pp 64"):
        planned(LLAMA3_8B, pp=64)


@pytest.mark.parametrize("name", ALL)
def test_the_longest_context_that_fits_is_the_longest(name: str) -> None:
    plan = planned(ALL[name], gib=1.0)
    shape, setup = layout(plan), plan.setup
    longest = longest_fit(shape, setup, plan.pool.num_blocks)
    assert shape.blocks_for(longest, setup) <= plan.pool.num_blocks
    if longest < 1 << 27:
        assert shape.blocks_for(longest + 1, setup) > plan.pool.num_blocks
    whole = shape.blocks_for(setup.max_model_len, setup)
    assert plan.pool.num_blocks / max(1, whole) == plan.pool.max_concurrency


def test_a_context_beyond_the_models_own_is_warned_of() -> None:
    assert any(
        "above the model's own" in warning for warning in planned(LLAMA3_8B, max_model_len=9000).warnings
    )
    assert planned(LLAMA3_8B, gib=0.5).warnings


def test_the_null_block_is_taken_off_the_must_fit_check_since_0_32() -> None:
    config = LLAMA3_8B | {"max_position_embeddings": 131072}
    gib = 16 * 131072 * 10 / GIB
    assert [planned(config, gib, version=v).max_model_len_fits for v in ("0.31", "0.32")] == [160, 144]


def test_sglang_sizes_and_its_sliding_pool() -> None:
    plan = planned(LLAMA3_8B, engine="sglang", num_gpu_blocks=100_000)
    assert plan.details["k_gib"] == round(100_000 * 32 * 8 * 128 * 2 / GIB, 2)
    gemma = planned(GEMMA3, gib=4.0, engine="sglang", swa_full_tokens_ratio=0.1)
    assert gemma.details["swa_tokens"] == int(gemma.pool.kv_tokens * 0.1)
    assert gemma.pool.kv_tokens > planned(GEMMA3, gib=4.0, engine="sglang").pool.kv_tokens
    assert planned(QWEN_NEXT, gib=20.0, engine="sglang", mamba_slots=100).details["state_slots"] == 100


def test_tgi_keeps_every_position_of_every_layer() -> None:
    plan = planned(GEMMA3, gib=1.0, engine="tgi")
    assert plan.pool.kv_tokens == GIB // (26 * 1024)
    assert plan.details["inferred_max_batch_total_tokens"] == plan.pool.kv_tokens
    with pytest.raises(PlanError, match="tgi"):
        planned(QWEN_NEXT, engine="tgi")
