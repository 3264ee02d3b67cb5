import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.plan import Flags, Given, PlanError, describe, make_plan, parse_config, read_config
from tests.effort import examples
from tests.plan.configs import ALL

SOME = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
MORE_KEYS = (
    "layer_types", "layer_types_counts", "text_config", "rope_scaling", "quantization_config",
    "block_configs", "hybrid_layer_pattern", "no_rope_layers", "attn_config", "attention_other_setting",
    "indexer_types", "index_topk", "index_head_dim", "full_attn_idxs", "attn_layer_indices", "mamba_d_head",
    "sliding_window",
)  # fmt: skip
KEYS = sorted({key for config in ALL.values() for key in config} | set(MORE_KEYS))
NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1 << 40, 1 << 62, 1e300, float("inf")]),
)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["8", "fp8", "M*", "mamba"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=6,
)


def outcome(config: Any) -> None:
    """A plan or one line that says why not; nothing else."""
    try:
        plan = make_plan(describe(config), Flags(max_model_len=1000), Given(available_gib=1.0))
    except PlanError as error:
        text = str(error)
    else:
        text = ""
        assert plan.pool.num_blocks >= 0
        assert plan.accounting.bytes_per_block > 0
    assert "\n" not in text
    assert len(text) < 400


@SOME
@given(base=st.sampled_from(sorted(ALL)), changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_change_of_a_config_gives_a_plan_or_one_line(base: str, changes: dict[str, Any]) -> None:
    outcome(ALL[base] | changes)


@SOME
@given(config=st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=5)), VALUES, max_size=12))
def test_any_object_gives_a_plan_or_one_line(config: dict[str, Any]) -> None:
    outcome(config)


@SOME
@given(base=st.sampled_from(sorted(ALL)), missing=st.sets(st.sampled_from(KEYS), max_size=3))
def test_missing_fields_give_a_plan_or_one_line(base: str, missing: set[str]) -> None:
    outcome({key: value for key, value in ALL[base].items() if key not in missing})


@SOME
@given(raw=st.binary(max_size=60))
def test_any_bytes_are_no_config(raw: bytes) -> None:
    with pytest.raises(PlanError):
        describe(parse_config(raw))


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"3", b"{", b"[" * 100_000, b'{"a": NaN}', b"\xff\xfe"])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(PlanError):
        describe(parse_config(raw))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    huge = tmp_path / "config.json"
    huge.write_bytes(json.dumps({"pad": "x" * 10_000_000}).encode())
    with pytest.raises(PlanError, match="bytes"):
        read_config(huge)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PlanError, match="cannot be read"):
            read_config(path)
