import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.outcomes import Absence, SourceFault
from kvctl.core.telemetry import RankSample
from kvctl.engines.base import PageError
from kvctl.engines.vllm import VLLM
from tests.effort import examples

CAPTURE = Path(__file__).parent.parent / "conformance" / "pages" / "vllm-0.32-overloaded.prom"
PAGE = CAPTURE.read_text()
COPIES = "copies of one rank's series disagree (several processes or an aggregator behind one page)"


def parse(page: str) -> RankSample:
    (sample,) = VLLM().parse_metrics(page, 1.0)
    return sample


def gauge(name: str, value: str, labels: str = 'engine="0",model_name="m"') -> str:
    return f"{name}{{{labels}}} {value}\n"


def info(**labels: str) -> str:
    text = ",".join(f'{name}="{value}"' for name, value in ({"engine": "0"} | labels).items())
    return f"vllm:cache_config_info{{{text}}} 1.0\n"


RUNNING = gauge("vllm:num_requests_running", "1.0")


# --- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "usage"),
    [
        (gauge("vllm:kv_cache_usage_perc", "0.5"), 0.5),
        (gauge("vllm:gpu_cache_usage_perc", "0.25"), 0.25),
        (gauge("vllm:gpu_cache_usage_perc", "0.25") + gauge("vllm:kv_cache_usage_perc", "0.5"), 0.5),
        (gauge("vllm_kv_cache_usage_perc", "0.5"), 0.5),
        (gauge("vllm_gpu_cache_usage_perc", "0.25"), 0.25),
        (gauge("vllm_kv_cache_usage_perc", "0.4") + gauge("vllm:kv_cache_usage_perc", "0.5"), 0.5),
        (gauge("vllm:cpu_cache_usage_perc", "0.25") + RUNNING, None),
    ],
)
def test_usage_gauge_under_each_of_its_names(page: str, usage: float | None) -> None:
    """C01: old name, new name, both (the new one wins), neither (unknown, not 0)."""
    assert parse(page).kv_usage_ratio == usage


def test_preferred_name_speaks_alone_even_if_it_says_nothing_good() -> None:
    sample = parse(gauge("vllm:gpu_cache_usage_perc", "0.25") + gauge("vllm:kv_cache_usage_perc", "NaN"))
    assert sample.kv_usage_ratio is None
    assert sample.absent["kv_usage_ratio"] is Absence.NOT_FINITE


def test_re_exported_page_reads_as_the_original() -> None:
    """C23: colons turned into underscores and a worker_addr label change nothing."""
    copy = PAGE.replace("vllm:", "vllm_").replace('engine="0"', 'engine="0",worker_addr="10.0.0.1:8000"')
    assert parse(copy).usage_gauge == "vllm_kv_cache_usage_perc"
    assert replace(parse(copy), usage_gauge="vllm:kv_cache_usage_perc") == parse(PAGE)


def test_equal_copies_are_one_and_not_summed() -> None:
    """C23: the engine's page and an aggregator's copy of it are one engine."""
    copy = PAGE.replace('engine="0"', 'engine="0",worker_addr="10.0.0.1:8000"')
    assert parse(PAGE + copy) == parse(PAGE)


def test_created_series_are_no_readings() -> None:
    page = RUNNING + gauge("vllm:num_preemptions_created", "1.7e+09")
    assert parse(page).preemptions_total is None


def test_iteration_histogram_is_no_counter() -> None:
    page = RUNNING + gauge("vllm:iteration_tokens_total_bucket", "9", 'engine="0",le="1.0"')
    assert parse(page).generation_tokens_total is None


def test_adapter_series_are_no_counts() -> None:
    """C28: fifty adapter combinations are no requests."""
    combinations = "".join(
        gauge("vllm:lora_requests_info", "1.7e9", f'running_lora_adapters="a{i}",waiting_lora_adapters=""')
        for i in range(50)
    )
    assert parse(PAGE + combinations) == parse(PAGE)


# --- values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("-0.25", Absence.OUT_OF_RANGE),
        ("1.0000001", Absence.OUT_OF_RANGE),
        ("NaN", Absence.NOT_FINITE),
        ("+Inf", Absence.NOT_FINITE),
    ],
)
def test_usage_out_of_range_is_absent_and_not_clamped(value: str, word: Absence) -> None:
    sample = parse(gauge("vllm:kv_cache_usage_perc", value))
    assert sample.kv_usage_ratio is None
    assert sample.absent["kv_usage_ratio"] is word


@pytest.mark.parametrize("value", ["-1", "2.5", "1e300"])
def test_count_that_counts_nothing_is_absent(value: str) -> None:
    sample = parse(gauge("vllm:num_requests_running", value))
    assert sample.running is None
    assert sample.absent["running"] is Absence.OUT_OF_RANGE


def test_every_field_of_a_bare_page_is_absent_by_name() -> None:
    """C20: families that a release lacks are named one by one."""
    assert dict(parse(RUNNING).absent) == dict.fromkeys(
        (
            "kv_usage_ratio",
            "waiting",
            "waiting_for_capacity",
            "awake",
            "preemptions_total",
            "prompt_tokens_total",
            "generation_tokens_total",
            "prefix_queries_total",
            "prefix_hits_total",
            "block_size",
            "capacity_tokens",
            "prefix_caching",
            "output_lengths",
            "started_at",
        ),
        Absence.MISSING,
    )


@pytest.mark.parametrize(("value", "awake"), [("1.0", True), ("0.0", False), ("0.5", None)])
def test_sleep_state(value: str, awake: bool | None) -> None:
    """C19: the sleep-state series says asleep, awake, or nothing certain."""
    asleep = gauge("vllm:engine_sleep_state", "1.0", 'engine="0",sleep_state="weights_offloaded"')
    page = asleep + gauge("vllm:engine_sleep_state", value, 'engine="0",sleep_state="awake"')
    assert parse(page).awake is awake


# --- lengths ------------------------------------------------------------------------------------------


def buckets(*pairs: tuple[str, float]) -> str:
    name = "vllm:request_generation_tokens_bucket"
    return "".join(gauge(name, str(number), f'engine="0",le="{bound}"') for bound, number in pairs)


def test_output_lengths_of_the_capture() -> None:
    lengths = parse(PAGE).output_lengths
    assert lengths is not None
    assert lengths.bounds == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, math.inf)
    assert lengths.counts == (0, 0, 0, 0, 54, 416, 1278, 2806, 4571, 5136, 5229, 5229, 5229)
    assert lengths.total == 5229


def test_buckets_may_come_in_any_order() -> None:
    lengths = parse(buckets(("+Inf", 9), ("2.0", 1), ("10.0", 4))).output_lengths
    assert lengths is not None
    assert (lengths.bounds, lengths.counts) == ((2, 10, math.inf), (1, 4, 9))


@pytest.mark.parametrize(
    ("page", "word"),
    [
        (buckets(("1.0", 5), ("2.0", 3)), Absence.OUT_OF_RANGE),
        (buckets(("1.0", -1)), Absence.OUT_OF_RANGE),
        (buckets(("1", 1), ("1.0", 1)), Absence.OUT_OF_RANGE),
        (buckets(("1.0", math.nan)), Absence.NOT_FINITE),
        (buckets(("one", 1)), Absence.UNPARSABLE),
        (buckets(("1.0", 1), ("1.0", 2)), Absence.NOT_SUPPORTED),
    ],
)
def test_histogram_that_is_none_is_absent(page: str, word: Absence) -> None:
    assert parse(page).absent["output_lengths"] is word


# --- pool ---------------------------------------------------------------------------------------------

PLAIN = {"block_size": "16", "num_gpu_blocks": "1000", "kv_cache_size_tokens": "16000"}


@pytest.mark.parametrize(
    ("labels", "tokens", "exact"),
    [
        (PLAIN, 15_984, True),
        # a context of 1,000 tokens takes 63 blocks: 1000 / 63 contexts = 15,873 tokens, in a pool of 16,000
        (PLAIN | {"kv_cache_size_tokens": "15873", "kv_cache_max_concurrency": str(1000 / 63)}, 15_984, True),
        # a context of 1,008 is 63 blocks to the token, and the product was cut to a whole number below it
        (PLAIN | {"kv_cache_size_tokens": "15999", "kv_cache_max_concurrency": str(1000 / 63)}, 15_984, True),
        # the same figure with no way to confirm it
        (PLAIN | {"kv_cache_size_tokens": "15873"}, 15_857, False),
        # hybrid: fewer tokens than blocks would say
        (PLAIN | {"kv_cache_size_tokens": "6000", "kv_cache_max_concurrency": "1.5"}, 5_994, False),
        (PLAIN | {"sliding_window": "4096"}, 15_984, False),
        (PLAIN | {"mamba_block_size": "16"}, 15_984, False),
        # context parallel: a block of 16 on each of 4 holds 64
        (
            PLAIN | {"effective_attention_block_size": "64", "kv_cache_size_tokens": "64000"},
            63_936,
            True,
        ),
        # before there was a token label: derived
        ({"block_size": "16", "num_gpu_blocks": "1000"}, 15_984, False),
        # block count unknown
        ({"block_size": "16", "num_gpu_blocks": "None", "kv_cache_size_tokens": "16000"}, 15_984, False),
        ({"num_gpu_blocks": "1000", "kv_cache_size_tokens": "16000"}, 15_984, False),
    ],
)
def test_capacity(labels: dict[str, str], tokens: int, exact: bool) -> None:
    sample = parse(info(**labels))
    assert sample.capacity_tokens == tokens
    assert sample.capacity_exact is exact


@pytest.mark.parametrize(
    ("labels", "word"),
    [
        ({"block_size": "16", "num_gpu_blocks": "None"}, Absence.MISSING),
        ({"block_size": "None", "num_gpu_blocks": "1000"}, Absence.MISSING),
        ({"block_size": "16", "num_gpu_blocks": "0"}, Absence.OUT_OF_RANGE),
        ({"block_size": "16", "num_gpu_blocks": "1"}, Absence.OUT_OF_RANGE),
        ({"block_size": "16", "num_gpu_blocks": "-5"}, Absence.UNPARSABLE),
        ({"block_size": "16", "num_gpu_blocks": "many"}, Absence.UNPARSABLE),
        ({"block_size": "16", "num_gpu_blocks": "9" * 40}, Absence.OUT_OF_RANGE),
        ({"block_size": "16", "num_gpu_blocks": "\u0663"}, Absence.UNPARSABLE),
    ],
)
def test_capacity_unknown(labels: dict[str, str], word: Absence) -> None:
    """C04: the label None, 0 or nonsense is an unknown capacity with a word, never zero tokens."""
    sample = parse(info(**labels))
    assert sample.capacity_tokens is None
    assert sample.capacity_exact is False
    assert sample.absent["capacity_tokens"] is word


def test_capacity_appears_without_a_restart() -> None:
    """C04: None on the first page, 9,271 blocks on the next."""
    engine = VLLM()
    assert engine.parse_metrics(info(block_size="16", num_gpu_blocks="None"), 1)[0].capacity_tokens is None
    assert engine.parse_metrics(info(block_size="16", num_gpu_blocks="9271"), 2)[0].capacity_tokens == 148_320


def test_claims_round_by_the_effective_block() -> None:
    assert parse(info(block_size="16", effective_attention_block_size="64")).block_size == 64
    assert parse(info(block_size="16", effective_attention_block_size="None")).block_size == 16


def test_contradicting_pools_give_the_smallest_not_exact() -> None:
    sample = parse(info(**PLAIN) + info(**PLAIN | {"num_gpu_blocks": "500", "kv_cache_size_tokens": "8000"}))
    assert (sample.capacity_tokens, sample.capacity_exact) == (7_984, False)


def test_pool_without_a_rank_label_is_every_ranks() -> None:
    page = "".join(gauge("vllm:num_requests_running", "1", f'engine="{rank}"') for rank in (0, 1))
    page += 'vllm:cache_config_info{block_size="16",num_gpu_blocks="2000"} 1\n'
    assert [s.capacity_tokens for s in VLLM().parse_metrics(page, 1)] == [15_984, 15_984]


def test_unequal_ranks_are_not_exact() -> None:
    labels = {"block_size": "16", "num_gpu_blocks": "2001", "kv_cache_size_tokens": "16000"}
    page = info(**labels) + info(**labels | {"engine": "1"})
    assert [s.capacity_exact for s in VLLM().parse_metrics(page, 1)] == [False, False]


def test_ranks_are_in_the_order_of_their_numbers() -> None:
    page = "".join(gauge("vllm:num_requests_running", "1", f'engine="{rank}"') for rank in (10, 2, 0))
    assert [s.rank for s in VLLM().parse_metrics(page, 1)] == ["0", "2", "10"]


# --- set-ups in which the gauges mean something else ----------------------------------------------------


@pytest.mark.parametrize(
    ("page", "named"),
    [
        (info(**PLAIN), None),
        (info(**PLAIN, kv_offloading_size="None"), None),
        (info(**PLAIN, kv_offloading_size="8.0"), "KV offloading"),
        (info(**PLAIN, is_attention_free="True"), "attention-free model"),
        (RUNNING + gauge("vllm:nixl_num_descriptors_count", "3"), "KV connector (vllm:nixl)"),
        (RUNNING + gauge("lmcache:num_hit_tokens_total", "3"), "KV connector (lmcache)"),
        (RUNNING + gauge("vllm:external_prefix_cache_queries_total", "0"), None),
        (
            RUNNING + gauge("vllm:external_prefix_cache_queries_total", "7"),
            "KV connector (external_prefix_cache_queries_total)",
        ),
        (
            gauge("vllm:num_requests_running", "1", 'engine="0",pid="1"')
            + gauge("vllm:num_requests_running", "12", 'engine="0",pid="2"'),
            COPIES,
        ),
    ],
)
def test_unsupported_set_up_is_named(page: str, named: str | None) -> None:
    """C18: two processes (pid labels, one of them dead) that disagree are named and not believed."""
    assert parse(page).unsupported == named


# --- pages that cannot be used --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        "vllm:num_requests_running{engine=0} 1\n",
        'vllm:num_requests_running{engine="0" 1\n',
        'vllm:num_requests_running{engine="0"} one\n',
        "vllm:num_requests_running\n",
        f'vllm:num_requests_running{{engine="0"}} {"9" * 400}\n',
    ],
)
def test_broken_line_is_unparsable(page: str) -> None:
    with pytest.raises(PageError) as caught:
        VLLM().parse_metrics(page, 1.0)
    assert caught.value.fault is SourceFault.UNPARSABLE


def test_line_that_dumps_a_configuration_is_dropped_and_the_rest_read() -> None:
    """C09: a line with the whole configuration in its labels costs that line only."""
    sample = parse(RUNNING + info(**PLAIN, dump="x" * 100_000))
    assert sample.running == 1
    assert sample.absent["capacity_tokens"] is Absence.MISSING


def test_flood_of_known_series_is_too_large() -> None:
    """C09: more series than any engine has is a failed poll with a word of its own."""
    page = "".join(gauge("vllm:num_requests_running", "1", f'engine="{i}"') for i in range(20_001))
    with pytest.raises(PageError) as caught:
        VLLM().parse_metrics(page, 1.0)
    assert caught.value.fault is SourceFault.TOO_LARGE


def test_series_are_found_anywhere_on_a_page_of_many_slices() -> None:
    noise = 'other_bucket{le="1"} 1\n' * 20_000
    sample = parse(RUNNING + noise + gauge("vllm:num_requests_waiting", "2") + noise + info(**PLAIN))
    assert (sample.running, sample.waiting, sample.capacity_tokens) == (1, 2, 15_984)


def test_windows_line_ends_spaces_and_timestamps_are_read() -> None:
    page = ' vllm:num_requests_running{engine="0"}\t3\r\nvllm:num_requests_waiting 4 1700000000000\r\n'
    sample = parse(page)
    assert (sample.running, sample.waiting) == (3, 4)


lines = st.sampled_from([*PAGE.split("\n"), "vllm:num_requests_running", "#", "{", "}", "\x00", "vllm:"])
bits = st.one_of(
    lines, st.text(max_size=60), st.sampled_from(['"', "{", "}", " ", "\n", "\\", "=", ",", "#"])
)


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(bits, max_size=12), st.sampled_from(["", " ", "\n"]))
def test_arbitrary_text_gives_samples_or_a_page_error(parts: list[str], glue: str) -> None:
    try:
        samples = VLLM().parse_metrics(glue.join(parts), 1.0)
    except PageError:
        return
    assert samples
    assert all(sample.kv_usage_ratio is None or 0 <= sample.kv_usage_ratio <= 1 for sample in samples)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_broken_capture_gives_samples_or_a_page_error(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(PAGE)))
    length = data.draw(st.integers(0, 400))
    page = PAGE[:start] + data.draw(st.text(max_size=20)) + PAGE[start + length :]
    with contextlib.suppress(PageError):
        assert VLLM().parse_metrics(page, 1.0)


# --- /v1/models -----------------------------------------------------------------------------------------


def card(name: object, length: object) -> dict[str, Any]:
    return {"id": name, "object": "model", "owned_by": "vllm", "max_model_len": length}


@pytest.mark.parametrize(
    ("cards", "models", "context"),
    [
        ([card("tiny", 8192)], ("tiny",), 8192),
        ([card("tiny", 8192), card("adapter", None)], ("tiny", "adapter"), 8192),
        ([card("a", 8192), card("alias", 8192)], ("a", "alias"), 8192),
        ([card("a", 8192), card("b", 4096)], ("a", "b"), None),
        ([card("a", True)], ("a",), None),
        ([card("a", "8192")], ("a",), None),
        ([card("a", 0)], ("a",), None),
        ([card("a", [1])], ("a",), None),
        ([card(None, 8192), card("", 8192)], (), 8192),
    ],
)
def test_model_list(cards: list[dict[str, Any]], models: tuple[str, ...], context: int | None) -> None:
    described = VLLM().parse_info({"object": "list", "data": cards})
    assert (described.models, described.context_tokens) == (models, context)
