from collections import Counter
from typing import Any

import pytest

from kvctl.plan import PlanError, UnknownArchitectureError, describe
from kvctl.plan.shapes import Attention, Indexer, Latent, Model, Reach, State
from tests.plan.configs import DEEPSEEK, FALCON, GEMMA3, JAMBA, LLAMA3_8B, NEMOTRON_H, QWEN_NEXT, WHISPER


def reaches(model: Model) -> Counter[Reach]:
    return Counter(part.reach for layer in model.layers for part in layer if isinstance(part, Attention))


def states(model: Model) -> list[State]:
    return [part for layer in model.layers for part in layer if isinstance(part, State)]


def first(model: Model) -> Attention:
    found = model.layers[0][0]
    assert isinstance(found, Attention)
    return found


def test_a_plain_model_is_full_attention_with_grouped_heads() -> None:
    model = describe(LLAMA3_8B)
    assert reaches(model) == {Reach.FULL: 32}
    assert first(model) == Attention(kv_heads=8, key_dim=128, value_dim=128)


def test_explicit_head_dim_wins_over_the_quotient() -> None:
    assert first(describe(LLAMA3_8B | {"head_dim": 64})).key_dim == 64


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"num_key_value_heads": None}, 32),
        ({"num_key_value_heads": None, "multi_query": True}, 1),
        ({"num_key_value_heads": None, "multi_query_group_num": 2, "model_type": "chatglm"}, 2),
        ({"num_key_value_heads": None, "attn_config": {"kv_n_heads": 4}, "model_type": "dbrx"}, 4),
        ({"n_head_kv": 16}, 16),
    ],
)
def test_kv_heads_by_every_name(changes: dict[str, Any], heads: int) -> None:
    assert first(describe(LLAMA3_8B | changes)).kv_heads == heads


def test_falcon_of_the_old_kind_has_one_kv_head() -> None:
    assert first(describe(FALCON)).kv_heads == 1
    assert first(describe(FALCON | {"new_decoder_architecture": True, "num_kv_heads": 71})).kv_heads == 71


def test_windows_by_pattern_by_list_and_by_counts_are_the_same() -> None:
    wanted = {Reach.SLIDING: 22, Reach.FULL: 4}
    names = ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(26)]
    counts = {"full_attention": 4, "sliding_attention": 22}
    bare = {key: value for key, value in GEMMA3.items() if key != "sliding_window_pattern"}
    for config in (GEMMA3, bare, bare | {"layer_types": names}, bare | {"layer_types_counts": counts}):
        assert reaches(describe(config)) == wanted


def test_a_window_that_is_switched_off_is_none() -> None:
    qwen = LLAMA3_8B | {"model_type": "qwen2", "sliding_window": 4096}
    assert reaches(describe(qwen)) == {Reach.FULL: 32}
    assert reaches(describe(qwen | {"use_sliding_window": True, "max_window_layers": 28})) == {
        Reach.FULL: 28,
        Reach.SLIDING: 4,
    }
    assert reaches(describe(LLAMA3_8B | {"model_type": "mistral", "sliding_window": 4096})) == {
        Reach.SLIDING: 32
    }


def test_llama4_chunks_all_but_every_fourth() -> None:
    config = LLAMA3_8B | {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
    }
    assert reaches(describe(config)) == {Reach.CHUNKED: 24, Reach.FULL: 8}


def test_layers_that_share_kv_cost_nothing() -> None:
    config = GEMMA3 | {"model_type": "gemma3n_text", "num_kv_shared_layers": 10, "sliding_window_pattern": 5}
    model = describe(config)
    assert sum(not layer for layer in model.layers) == 10
    assert len(model.layers) == 26


def test_gemma4_has_other_heads_in_full_layers() -> None:
    config = GEMMA3 | {"model_type": "gemma4_text", "num_key_value_heads": 4, "num_global_key_value_heads": 1}
    parts = {part for layer in describe(config).layers for part in layer if isinstance(part, Attention)}
    assert {(part.reach, part.kv_heads, part.key_dim) for part in parts} == {
        (Reach.SLIDING, 4, 256),
        (Reach.FULL, 1, 512),
    }


def test_latent_attention_and_its_own_mtp_layer() -> None:
    model = describe(DEEPSEEK)
    assert model.layers[0] == (Latent(512, 64, 128, 192),)
    assert len(model.drafts) == 1


def test_an_indexer_only_where_a_layer_owns_one() -> None:
    sparse = DEEPSEEK | {"index_topk": 2048, "index_head_dim": 128}
    assert all(Indexer(128) in layer for layer in describe(sparse).layers)
    types = ["full" if index % 4 == 0 else "shared" for index in range(61)]
    assert sum(Indexer(128) in layer for layer in describe(sparse | {"indexer_types": types}).layers) == 16
    assert (
        sum(Indexer(128) in layer for layer in describe(sparse | {"index_topk_pattern": "FSSS"}).layers) == 58
    )


def test_gated_delta_nets_between_attention() -> None:
    model = describe(QWEN_NEXT)
    assert len(states(model)) == 36
    assert states(model)[0].channels == 2 * 16 * 128 + 32 * 128
    assert reaches(model) == {Reach.FULL: 12}
    assert states(describe(QWEN_NEXT | {"model_type": "qwen3_5_text"}))[0].cell_bytes == 4


def test_mamba1_and_mamba2() -> None:
    assert states(describe(JAMBA))[0] == State(
        channels=8192, kernel=4, heads=8192, cells=16, speculates=False, family="mamba1"
    )
    assert len(states(describe(JAMBA))) == 28
    hybrid = describe(NEMOTRON_H)
    assert [len(layer) for layer in hybrid.layers] == [1, 0, 1, 1, 0, 1]
    assert states(hybrid)[0].cells == 64 * 128


def test_a_decoder_keeps_its_own_and_the_encoders_kv() -> None:
    assert reaches(describe(WHISPER)) == {Reach.FULL: 4, Reach.CROSS: 4}


def test_per_layer_head_counts_and_layers_without_attention() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 8}},
        {"attention": {"no_op": True}},
        {"attention": {"n_heads_in_group": 4}},
    ]
    config = {key: value for key, value in LLAMA3_8B.items() if key != "num_key_value_heads"}
    model = describe(config | {"model_type": "nemotron-nas", "num_hidden_layers": 3, "block_configs": blocks})
    assert [
        layer[0].kv_heads if layer and isinstance(layer[0], Attention) else 0 for layer in model.layers
    ] == [4, 0, 8]


def test_the_language_model_of_a_wrapper_counts() -> None:
    wrapped = {"model_type": "llava", "vision_config": {"hidden_size": 1}, "text_config": LLAMA3_8B}
    assert describe(wrapped).layers == describe(LLAMA3_8B).layers
    assert any("vision" in note for note in describe(wrapped).notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"compress_ratios": [0, 4]},
        {"model_type": "deepseek_v4"},
        {"model_type": "kimi_linear"},
        {"model_type": "brand_new", "ssm_state_size": 128},
        {"layer_types": ["wavelet_attention"] * 32},
        {"sliding_window": [128, 256]},
    ],
)
def test_unknown_caches_are_refused_not_guessed(changes: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitectureError):
        describe(LLAMA3_8B | changes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "divide"),
        ({"hidden_size": 4097}, "hidden_size"),
        ({"num_hidden_layers": 1e9}, "num_hidden_layers"),
        ({"num_hidden_layers": float("nan")}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"text_config": LLAMA3_8B | {"num_attention_heads": -1}}, "num_attention_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"torch_dtype": "int3"}, "int3"),
    ],
)
def test_a_broken_field_is_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(PlanError, match=word):
        describe(LLAMA3_8B | changes)


def test_stretched_rope_lengthens_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert (
        describe(LLAMA3_8B | {"max_position_embeddings": 32768, "rope_scaling": yarn}).max_context == 131072
    )
    assert describe(LLAMA3_8B | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}).max_context == 8192
