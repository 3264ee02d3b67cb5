"""Pages and answers that no engine gives: refused with a word before they cost anything."""

from collections.abc import Callable

import pytest

from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import MAX_RANKS, EngineInfo, RankSample, with_pool
from kvctl.engines.base import Engine, PageError
from kvctl.engines.page import MAX_PAGE_LINES, MAX_WANTED_CHARS
from kvctl.engines.sglang import SGLang
from kvctl.engines.vllm import VLLM


def _vllm(ranks: int, label: str = "") -> str:
    return "".join(
        f'vllm:{name}{{engine="{rank}",model_name="m{label}"}} 0.0\n'
        for rank in range(ranks)
        for name in ("num_requests_running", "kv_cache_usage_perc")
    )


def _sglang(ranks: int) -> str:
    return "".join(f'sglang:num_running_reqs{{dp_rank="{rank}"}} 0.0\n' for rank in range(ranks))


@pytest.mark.parametrize(("engine", "page"), [(VLLM(), _vllm), (SGLang(), _sglang)], ids=["vllm", "sglang"])
def test_more_ranks_than_an_engine_has_are_no_ranks(engine: Engine, page: Callable[[int], str]) -> None:
    """Each would get a gate of its own, and each is looked for in all lines."""
    assert len(engine.parse_metrics(page(MAX_RANKS), 0.0)) == MAX_RANKS
    with pytest.raises(PageError) as refused:
        engine.parse_metrics(page(8000), 0.0)
    assert refused.value.fault is SourceFault.TOO_LARGE


@pytest.mark.parametrize(
    "page",
    [
        "\n" * (MAX_PAGE_LINES + 1),
        "# HELP x\n" * (MAX_PAGE_LINES + 1),
        _vllm(1, "x" * 16_000) * (MAX_WANTED_CHARS // 16_000),
        _vllm(1, r"\"" * 8_000) * 16,
    ],
    ids=["empty lines", "comments", "long labels", "escapes"],
)
def test_what_takes_long_to_read_is_too_large(page: str) -> None:
    with pytest.raises(PageError) as refused:
        VLLM().parse_metrics(page, 0.0)
    assert refused.value.fault is SourceFault.TOO_LARGE


def test_a_description_invents_no_more_ranks_than_an_engine_has() -> None:
    """A list of as many as it says would take all memory, and nothing is invented beside a page."""
    info = SGLang().parse_info({"dp_size": 1 << 50, "max_total_num_tokens": 1000})
    assert info.ranks == 1
    absurd = EngineInfo(engine="sglang", rank_capacity_tokens=1000, ranks=1 << 50)
    assert len(with_pool((), absurd)) == MAX_RANKS
    assert len(with_pool((RankSample(rank="0", at=0.0),), absurd)) == 1
