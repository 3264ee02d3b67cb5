from pathlib import Path

import pytest

from kvctl.plan import (
    Flags,
    Given,
    Plan,
    Verdict,
    as_document,
    as_toml,
    card_of,
    crosscheck,
    describe,
    make_plan,
    planned_capacity,
    recommend,
)
from kvctl.settings.loading import load
from tests.plan.configs import GEMMA3, LLAMA3_8B

STABLE = (
    "bytes_per_token", "bytes_per_block", "num_blocks", "kv_tokens", "kv_tokens_logged", "max_concurrency",
    "max_model_len_fits", "assumptions", "warnings",
)  # fmt: skip


@pytest.fixture
def exact() -> Plan:
    return make_plan(describe(LLAMA3_8B, "llama"), Flags(), Given(available_gib=6.0))


@pytest.fixture
def open_interval() -> Plan:
    return make_plan(describe(LLAMA3_8B), Flags(), Given(card=card_of("24GiB"), weights_gib=15.0))


def test_the_engines_report_against_the_plan(exact: Plan) -> None:
    assert crosscheck(exact, 49152).verdict is Verdict.AGREES
    assert crosscheck(exact, 30000).verdict is Verdict.SMALLER
    assert crosscheck(exact, 98304).verdict is Verdict.LARGER
    assert crosscheck(exact, None).verdict is Verdict.UNKNOWN
    assert "39%" in crosscheck(exact, 30000).sentence


def test_reported_blocks_take_the_memory_out_of_the_question(open_interval: Plan) -> None:
    assert crosscheck(open_interval, 16 * 100, reported_blocks=100).verdict is Verdict.AGREES
    assert crosscheck(open_interval, 32 * 100, reported_blocks=100).verdict is Verdict.LARGER
    inside = (open_interval.low.kv_tokens + open_interval.high.kv_tokens) // 2
    assert crosscheck(open_interval, inside).verdict is Verdict.AGREES


def test_the_capacity_to_count_on_is_the_low_end_less_the_null_block(
    open_interval: Plan, exact: Plan
) -> None:
    assert planned_capacity(exact) == 49152 - 16
    assert planned_capacity(open_interval) == open_interval.low.kv_tokens - 16


def test_recommended_settings_are_accepted(exact: Plan, tmp_path: Path) -> None:
    file = tmp_path / "kvctl.toml"
    file.write_text(as_toml(exact, "http://127.0.0.1:8000"), encoding="utf-8")
    settings = load(file, {})
    assert settings.margin == recommend(exact).margin
    assert settings.max_context == recommend(exact).max_context


def test_a_models_name_cannot_write_settings(tmp_path: Path) -> None:
    plan = make_plan(describe(LLAMA3_8B, 'x"\nlisten = "0.0.0.0:1'), Flags(), Given(available_gib=6.0))
    file = tmp_path / "kvctl.toml"
    file.write_text(as_toml(plan, "http://127.0.0.1:8000"), encoding="utf-8")
    assert "0.0.0.0" not in str(load(file, {}).listen)


def test_advice_is_within_bounds_and_wider_for_hybrids(exact: Plan) -> None:
    hybrid = make_plan(describe(GEMMA3), Flags(), Given(available_gib=6.0))
    assert 0.05 <= recommend(exact).margin < recommend(hybrid).margin <= 0.3
    assert recommend(exact).max_context <= exact.max_model_len_fits
    assert recommend(exact).queued >= 1
    tiny = make_plan(describe(LLAMA3_8B), Flags(), Given(available_gib=0.001))
    assert recommend(tiny).max_context >= 1


def test_the_document_has_the_stable_keys_and_formulas_on_request(exact: Plan) -> None:
    document = as_document(exact)
    assert set(STABLE) <= set(document)
    assert "formulas" not in document
    values = {each["name"]: each["value"] for each in as_document(exact, explain=True)["formulas"]}
    assert values["bytes per block"] == "2,097,152"
    assert values["blocks"] == "3,072"
