"""``kvctl doctor`` in front of engines other than vLLM: in their names, with the pool that they tell."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvctl.cli.doctor_findings import Finding
from kvctl.cli.doctor_run import examine
from tests.engines.standins.core import Standin
from tests.engines.standins.llamacpp import LlamaCppStandin
from tests.engines.standins.sglang import SglangStandin
from tests.engines.standins.tgi import TgiStandin


async def findings(engine: Standin, folder: Path) -> Mapping[str, Finding]:
    async with engine.serving() as url:
        env = {"ENGINE_URL": url, "STATE_DIR": str(folder), "GPUS": "none", "TOKENIZER": "bound"}
        given = {f"KVCTL_{key}": value for key, value in env.items()}
        found = await asyncio.to_thread(examine, None, None, given, timeout=20.0)
    return {finding.check: finding for finding in found}


@pytest.mark.parametrize(
    ("engine", "gauge"),
    [
        (TgiStandin(), "none"),  # before the first request
        (SglangStandin(), "sglang:token_usage"),
        (LlamaCppStandin(slots=8, context=2000), "none"),
    ],
)
async def test_page_and_pool_are_read_in_the_engines_names(
    engine: Standin, gauge: str, tmp_path: Path
) -> None:
    found = await findings(engine, tmp_path)
    assert found["engine"].mark == "pass"
    assert (found["metrics"].mark, found["metrics"].text) == ("pass", f"1 rank, usage gauge {gauge}")
    assert "16,000" in found["capacity"].text


async def test_sglang_without_metrics_is_told_the_flag(tmp_path: Path) -> None:
    found = await findings(SglangStandin(metrics=False), tmp_path)
    assert found["metrics"].mark == "fail"
    assert "--enable-metrics" in found["metrics"].remedy
    assert "16,000" in found["capacity"].text
