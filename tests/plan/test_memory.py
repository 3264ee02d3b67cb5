import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.plan import Flags, Given, Model, PlanError, card_of, describe, index_bytes, make_plan
from kvctl.plan.shapes import Kept
from kvctl.plan.versions import parse_version
from kvctl.plan.weighing import Ranks, kept_of, weight_bytes
from tests.plan.cases import load
from tests.plan.configs import LLAMA3_8B


@pytest.mark.parametrize(
    ("text", "gib", "seen"),
    [
        ("24GiB", 24.0, True), ("24", 24.0, True), ("24GB", 23.55, True), ("80 GB", 79.15, True),
        ("64GB", 62.72, False), ("H100", 79.18, True), ("NVIDIA H100 80GB HBM3", 79.18, True),
        ("h200", 139.81, True), ("L40S", 44.42, True), ("RTX PRO 6000-class (94.97 GiB)", 94.97, True),
        ("A100-80GB", 79.15, True), ("A100-40GB", 39.39, False),
        ("RTX 4090", 23.55, True), ("GB10 (DGX Spark)", 119.7, False), ("24 GB-class dev GPU", 23.55, True),
        ("RTX 5090", 31.36, False),
    ],
)  # fmt: skip
def test_cards_by_name_label_and_size(text: str, gib: float, seen: bool) -> None:
    card = card_of(text)
    assert (round(card.total_gib, 2), card.seen) == (gib, seen)


@pytest.mark.parametrize("text", ["", "abacus", "0GiB", "-3", "99999GiB", "nan"])
def test_what_is_no_card_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        card_of(text)


def test_terms_add_up_and_bound_each_other() -> None:
    plan = make_plan(
        describe(LLAMA3_8B), Flags(version="0.11"), Given(card=card_of("H100"), weights_gib=14.96)
    )
    available = plan.memory.available
    assert available.low < available.likely < available.high
    first, *rest = plan.memory.terms
    assert available.likely == pytest.approx(first.gib.likely - sum(term.gib.likely for term in rest))
    assert plan.low.num_blocks < plan.pool.num_blocks < plan.high.num_blocks
    names = [term.name for term in plan.memory.terms]
    assert "CUDA graphs" not in names
    newer = make_plan(
        describe(LLAMA3_8B), Flags(version="0.28"), Given(card=card_of("H100"), weights_gib=14.96)
    )
    assert "CUDA graphs" in [term.name for term in newer.memory.terms]


def test_given_memory_collapses_the_interval() -> None:
    for given in (Given(available_gib=5.5), Given(kv_cache_memory_bytes=5905580032)):
        plan = make_plan(describe(LLAMA3_8B), Flags(), given)
        assert plan.memory.exact
        assert plan.low == plan.pool == plan.high
        assert plan.pool.num_blocks == 5905580032 // 2097152


def test_no_memory_at_all_is_said() -> None:
    with pytest.raises(PlanError, match="--gpu"):
        make_plan(describe(LLAMA3_8B), Flags(), Given())
    bare = {key: value for key, value in LLAMA3_8B.items() if key != "intermediate_size"}
    with pytest.raises(PlanError, match="--weights-gib"):
        make_plan(describe(bare), Flags(), Given(card=card_of("H100")))


def test_weights_that_do_not_fit_leave_an_empty_pool_and_the_term_that_decides() -> None:
    plan = make_plan(describe(LLAMA3_8B), Flags(), Given(card=card_of("24GiB"), weights_gib=60))
    assert plan.pool.num_blocks == 0
    assert plan.max_model_len_fits == 0
    assert plan.binding.startswith("weights")


@pytest.mark.parametrize(
    ("dtype", "gib"), [("auto", 14.96), ("bfloat16", 14.96), ("fp8", 8.5), ("awq", 5.4), ("nvfp4", 5.5)]
)
def test_weights_by_arithmetic(dtype: str, gib: float) -> None:
    found = weight_bytes(describe(LLAMA3_8B), dtype, 2)
    assert found is not None
    low, likely, high = (size / 2**30 for size in found)
    assert low <= likely <= high
    assert likely == pytest.approx(gib, rel=0.03)


def test_an_unknown_weight_dtype_is_refused() -> None:
    with pytest.raises(PlanError, match="wibble"):
        weight_bytes(describe(LLAMA3_8B), "wibble", 2)


def test_weights_from_the_index_beside_the_config(tmp_path: Path) -> None:
    assert index_bytes(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    assert index_bytes(tmp_path) == 1000
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 16060522496}}), encoding="utf-8")
    assert index_bytes(tmp_path) == 16060522496
    for broken in ("{", "[]", '{"metadata": {}}', '{"metadata": {"total_size": "many"}}'):
        index.write_text(broken, encoding="utf-8")
        assert index_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "release", "known"),
    [
        ("0.11.2", (0, 11, 2), True), ("v0.28", (0, 28, 0), True), (">=0.20.1", (0, 20, 1), True),
        ("0.6.x (V0)", (0, 6, 0), True), ("V0", (0, 6, 0), True), ("2025-10", (0, 11, 0), True),
        ("2025-2026", (0, 32, 0), False), (None, (0, 32, 0), False), ("0.1.dev15917", (0, 32, 0), False),
        ("0.19.2rc1.dev134", (0, 19, 2), True), ("1.0", (1, 0, 0), True),
    ],
)  # fmt: skip
def test_versions_as_people_write_them(text: str | None, release: tuple[int, int, int], known: bool) -> None:
    version = parse_version(text)
    assert (version.release, version.known) == (release, known)


def test_a_build_before_a_release_comes_before_it() -> None:
    assert not parse_version("0.20.1.dev0+g101584af0").since(0, 20, 1)
    assert parse_version("0.20.1").since(0, 20, 1)
    assert parse_version("0.20.1rc2") < parse_version("0.20.1") < parse_version("0.20.2.dev1")


def weighed(model: Model, dtype: str = "auto", **ranks: int) -> tuple[float, float, float]:
    found = weight_bytes(model, dtype, 2, Ranks(**ranks))
    assert found is not None
    low, likely, high = (size / 2**30 for size in found)
    return low, likely, high


def quantised(**scheme: object) -> Model:
    return describe({**LLAMA3_8B, "quantization_config": scheme})


def test_what_a_checkpoint_leaves_unquantised_is_counted_in_full() -> None:
    """Attention in bf16 beside an NVFP4 feed-forward; a list by layers counts by layers."""
    whole = weighed(quantised(quant_algo="NVFP4", ignore=["lm_head"]))
    attention = weighed(quantised(quant_algo="NVFP4", ignore=["lm_head", "model.layers.*.self_attn*"]))
    first = weighed(
        quantised(quant_algo="NVFP4", ignore=[f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)])
    )
    parameters = 32 * 4096 * 128 * 2 * (32 + 8)
    assert attention[1] - whole[1] == pytest.approx(parameters * (2 - 0.5625) / 2**30, rel=1e-6)
    assert first[1] - whole[1] == pytest.approx((attention[1] - whole[1]) / 16, rel=1e-6)
    silent = weighed(quantised(quant_algo="NVFP4"))
    assert silent[0] == pytest.approx(whole[0])
    assert silent[2] == pytest.approx(attention[2])


@pytest.mark.parametrize("name", ["model.layers.0.mlp.gate", "model.layers.*.mlp.router", "lm_head", 7])
def test_routers_and_heads_in_the_list_change_nothing(name: object) -> None:
    assert kept_of({"ignore": [name]}, 32) == Kept()


def test_only_the_experts_of_mxfp4_are_quantised_and_their_kernels_pad() -> None:
    """Logged: 13.72 GiB of gpt-oss-20b with Marlin on A100."""
    (case,) = (each for each in load() if each.id == "gptoss20b-a100")
    low, likely, high = weighed(case.model)
    assert low < likely < high
    assert low <= 13.72 <= high
    assert likely == pytest.approx(13.72, rel=0.03)


def test_experts_are_spread_over_data_parallel_ranks_and_nothing_else_is() -> None:
    moe = {**LLAMA3_8B, "num_local_experts": 8, "num_experts_per_tok": 2, "model_type": "mixtral"}
    one, two = weighed(describe(moe)), weighed(describe(moe), dp=2)
    experts = 32 * 8 * 3 * 4096 * 14336 * 2 / 2**30
    assert one[1] - two[1] == pytest.approx(experts / 2, rel=1e-6)
    assert weighed(describe(LLAMA3_8B), dp=2) == weighed(describe(LLAMA3_8B))


def test_shared_experts_that_the_config_does_not_name() -> None:
    """Llama-4 has one beside the routed ones, Gemma-4 a plain feed-forward."""
    base = {**LLAMA3_8B, "num_local_experts": 16, "model_type": "mixtral"}
    more = weighed(describe({**base, "model_type": "llama4", "attention_chunk_size": 8192}))[1]
    assert more - weighed(describe(base))[1] == pytest.approx(32 * 3 * 4096 * 14336 * 2 / 2**30, rel=1e-6)


def test_a_tower_of_known_size_narrows_the_interval() -> None:
    tower = {"hidden_size": 1152, "num_hidden_layers": 27, "intermediate_size": 4304}
    known = weighed(describe({**LLAMA3_8B, "vision_config": tower}))
    unknown = weighed(describe({**LLAMA3_8B, "vision_config": {}}))
    assert unknown[2] - unknown[0] > known[2] - known[0]
    assert known[1] > weighed(describe(LLAMA3_8B))[1]


def test_weights_kept_by_the_host_leave_room() -> None:
    given = Given(card=card_of("24GiB"), overhead_gib=2)
    plain = make_plan(describe(LLAMA3_8B), Flags(), given).memory.available
    away = make_plan(describe(LLAMA3_8B), Flags(), replace(given, cpu_offload_gib=8)).memory.available
    assert away.likely - plain.likely == pytest.approx(8)


def test_a_draft_model_takes_room_too() -> None:
    given = Given(card=card_of("80GB"))
    flags = Flags(num_spec=3, spec_method="draft_model", version="0.28")
    alone = make_plan(describe(LLAMA3_8B), Flags(version="0.28"), given).memory.available
    both = make_plan(describe(LLAMA3_8B), flags, given, describe(LLAMA3_8B)).memory.available
    assert alone.likely - both.likely == pytest.approx(14.96, rel=0.01)
