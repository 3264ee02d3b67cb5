"""Every engine module over captured and hand-made pages; expected values are literals."""

from typing import Any

import pytest

from kvctl.core.outcomes import Absence, SourceFault
from kvctl.engines.base import Engine, PageError, Treatment
from kvctl.engines.detect import ENGINES, engine_of_page
from tests.conformance.case import Case, page
from tests.conformance.cases_others import OTHER_CASES

MISSING = Absence.MISSING
NEWER_THAN_0_12: dict[str, Absence] = {"waiting_for_capacity": MISSING, "awake": MISSING}
NO_LENGTHS: dict[str, Absence] = {"output_lengths": MISSING}

CASES = [
    Case(
        engine="vllm",
        page="vllm-0.32-idle.prom",
        ranks={
            "0": {
                "model": "tiny",
                "kv_usage_ratio": 0.0,
                "running": 0,
                "waiting": 0,
                "waiting_for_capacity": 0,
                "preemptions_total": 0.0,
                "awake": True,
                "block_size": 128,
                "capacity_tokens": 127_872,
                "capacity_exact": True,
                "prefix_caching": True,
                "started_at": 1795981087.02,
                "unsupported": None,
            }
        },
    ),
    Case(
        engine="vllm",
        page="vllm-0.32-overloaded.prom",
        ranks={
            "0": {
                "model": "tiny",
                "kv_usage_ratio": 0.967967967967968,
                "running": 27,
                "waiting": 77,
                "waiting_for_capacity": 77,
                "preemptions_total": 404.0,
                "prompt_tokens_total": 3424531.0,
                "generation_tokens_total": 1400168.0,
                "prefix_queries_total": 3424531.0,
                "prefix_hits_total": 0.0,
                "block_size": 32,
                "capacity_tokens": 31_968,
                "capacity_exact": True,
                "started_at": 1795982009.09,
            }
        },
    ),
    Case(
        engine="vllm",
        page="vllm-0.6-v0.prom",
        ranks={
            "0": {
                "model": "mistral",
                "kv_usage_ratio": 0.4375,
                "running": 11,
                "waiting": 2,
                "preemptions_total": 3.0,
                "block_size": 16,
                "capacity_tokens": 9270 * 16,
                "capacity_exact": False,
                "prefix_caching": False,
                "started_at": 1.73e9,
            }
        },
        absent=NEWER_THAN_0_12 | {"prefix_queries_total": MISSING, "prefix_hits_total": MISSING},
    ),
    Case(
        engine="vllm",
        page="vllm-0.9.2.prom",
        ranks={
            "0": {
                "model": "qwen",
                "kv_usage_ratio": 0.75,  # the new name, and neither the old one nor their sum
                "prefix_queries_total": 7100.0,
                "prefix_hits_total": 1600.0,
                "capacity_tokens": 48_000,
                "capacity_exact": False,
            }
        },
        absent=NEWER_THAN_0_12 | NO_LENGTHS,
    ),
    Case(
        engine="vllm",
        page="vllm-0.12-dp2.prom",
        ranks={
            "0": {
                "kv_usage_ratio": 0.95,
                "running": 12,
                "waiting": 4,
                "preemptions_total": 7.0,
                "capacity_tokens": 49_984,
                "capacity_exact": True,
            },
            "1": {
                "kv_usage_ratio": 0.05,
                "running": 0,
                "waiting": 0,
                "preemptions_total": 0.0,
                "capacity_tokens": 49_984,
                "capacity_exact": True,
            },
        },
        absent=NEWER_THAN_0_12 | NO_LENGTHS | {"started_at": MISSING},
    ),
    Case(
        engine="vllm",
        page="vllm-0.32-dp2.prom",
        ranks={
            rank: {
                "model": "tiny",
                "kv_usage_ratio": 0.0,
                "prompt_tokens_total": 324.0,
                "generation_tokens_total": 40.0,
                "capacity_tokens": 31_968,  # the page says 2,000 blocks for each: both together
                "capacity_exact": True,
                "awake": True,
            }
            for rank in ("0", "1")
        },
        absent={"started_at": MISSING},
    ),
    Case(
        engine="vllm",
        page="vllm-0.32-two-servers.prom",
        ranks={
            "0": {
                "prompt_tokens_total": 648.0,
                "generation_tokens_total": 80.0,
                "capacity_tokens": 31_968,
                "capacity_exact": True,
                "unsupported": None,
            }
        },
        absent={"started_at": MISSING},
    ),
    Case(
        engine="vllm",
        page="vllm-none-labels.prom",
        ranks={"0": {"capacity_tokens": None, "capacity_exact": False, "block_size": 16, "running": 5}},
        absent=NEWER_THAN_0_12 | NO_LENGTHS | {"capacity_tokens": MISSING, "prefix_caching": MISSING},
    ),
    Case(
        engine="vllm",
        page="vllm-multiprocess.prom",
        ranks={
            "0": {
                "running": None,
                "waiting": 0,
                "preemptions_total": 2.0,
                "capacity_tokens": 32_000,
                "capacity_exact": False,
                "unsupported": "copies of one rank's series disagree "
                "(several processes or an aggregator behind one page)",
            }
        },
        absent=NEWER_THAN_0_12
        | NO_LENGTHS
        | {
            "running": Absence.NOT_SUPPORTED,
            "kv_usage_ratio": Absence.NOT_SUPPORTED,
            "started_at": MISSING,
            "prompt_tokens_total": MISSING,
            "generation_tokens_total": MISSING,
            "prefix_queries_total": MISSING,
            "prefix_hits_total": MISSING,
        },
    ),
    *OTHER_CASES,
]

STRANGERS = [
    ("vllm-log-stats-off.prom", None),
    ("vllm-0.32-idle.prom", "vllm"),
    ("sglang-0.5.prom", "sglang"),
    ("tgi-3.3-busy.prom", "tgi"),
    ("llamacpp-2026-busy.prom", "llamacpp"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.engine}-{case.page}")
def test_page_reads_as_expected(case: Case) -> None:
    """C01, C02, C04, C18, C20: six vLLM generations, two ranks, None labels, ghosts: each a value or word."""
    samples = ENGINES[case.engine].parse_metrics(page(case.page), 12.5)
    assert [sample.rank for sample in samples] == list(case.ranks)
    for sample in samples:
        expected = case.ranks[sample.rank]
        assert {name: getattr(sample, name) for name in expected} == expected
        assert dict(sample.absent) == case.absent | case.absent_of.get(sample.rank, {})
        assert sample.at == 12.5


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.engine}-{case.page}")
def test_what_has_no_value_has_a_word(case: Case) -> None:
    for sample in ENGINES[case.engine].parse_metrics(page(case.page), 0.0):
        for name in sample.absent:
            assert getattr(sample, name) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.engine}-{case.page}")
def test_page_names_its_engine(case: Case) -> None:
    assert engine_of_page(page(case.page)) == case.engine


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize(("name", "stranger"), STRANGERS, ids=str)
def test_page_of_another_engine_is_a_named_state(engine: Engine, name: str, stranger: str | None) -> None:
    """C22: another engine's page is no telemetry with a name, never silent zeros."""
    if stranger == engine.name or (stranger, engine.name) == ("vllm", "sim"):
        pytest.skip("its own page")
    assert engine_of_page(page(name)) == stranger
    with pytest.raises(PageError) as caught:
        engine.parse_metrics(page(name), 0.0)
    assert caught.value.fault is SourceFault.NO_SERIES


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", SourceFault.NO_SERIES),
        ("\n\n", SourceFault.NO_SERIES),
        ("# HELP python_info x\npython_info 1.0\n", SourceFault.NO_SERIES),
        ("<!doctype html><html><body>hello</body></html>", SourceFault.UNPARSABLE),
        ('{"detail":"Not Found"}', SourceFault.UNPARSABLE),
        ("\x1f\x8b\x08\x00garbage", SourceFault.UNPARSABLE),
    ],
)
def test_page_without_telemetry(engine: Engine, text: str, fault: SourceFault) -> None:
    """C07: empty, python families only, HTML, JSON, gzip bytes: no telemetry, each with its word."""
    with pytest.raises(PageError) as caught:
        engine.parse_metrics(text, 0.0)
    assert caught.value.fault is fault


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("answer", [{}, {"data": None}, {"data": {}}, {"data": [None, 1, "x", {}]}, {"x": 1}])
def test_odd_model_list_gives_empty_fields(engine: Engine, answer: dict[str, Any]) -> None:
    info = engine.parse_info(answer)
    assert info.models == ()
    assert info.context_tokens is None


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_paths_and_routes_are_well_formed(engine: Engine) -> None:
    assert engine.metrics_path.startswith("/")
    assert engine.info_path.startswith("/")
    for route in engine.routes:
        assert route.path.startswith("/")
        assert "*" not in route.path.removesuffix("/*")
        assert route.path == "/" or not route.path.endswith("/")
        assert route.method == route.method.upper()
    keys = [(route.method, route.path) for route in engine.routes]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_what_generates_is_posted_and_what_is_refused_has_a_hint(engine: Engine) -> None:
    generating = [route for route in engine.routes if route.treatment is Treatment.GENERATE]
    assert generating
    for route in generating:
        assert route.method == "POST"
        default = engine.default_output(route)
        assert default is None or default > 0
    for route in engine.routes:
        assert (route.treatment is Treatment.REFUSE) == bool(route.hint)
        assert not route.admin or route.treatment is Treatment.REFUSE
