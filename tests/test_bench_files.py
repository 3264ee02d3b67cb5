"""What the benches say where a file that they are to read is not there."""

import importlib
import sys
from pathlib import Path

import pytest

from kvctl.sim.trace import read_trace
from tests.bench import replay
from tests.bench.workloads import WORKLOADS, by_name

ABSENT = "/nowhere/runs"


def test_a_workload_without_its_trace_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Each in one sentence: which file, and where it is to be had. The others are replayed."""
    known = ["azure", "bimodal", "mooncake", "weka"]
    assert replay.there(known, replay.TRACES) == ["azure", "bimodal"]
    mooncake, weka = capsys.readouterr().err.splitlines()
    assert f"mooncake is left out: there is no {replay.TRACES}/mooncake_conversation.csv.gz" in mooncake
    assert "kvcache-ai/Mooncake on GitHub" in mooncake
    assert "callanjfox/kv-cache-tester on GitHub" in weka


def test_the_traces_of_the_repository_are_found() -> None:
    there = [one for one in WORKLOADS if one.file and one.missing(replay.TRACES) is None]
    assert [one.name for one in there] == ["azure", "servegen", "arxiv"]
    assert all(read_trace(replay.TRACES / str(one.file)) for one in there)


def test_with_nothing_left_it_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="nothing is left to replay"):
        replay.main(["--traces", str(tmp_path), "--workload", "azure"])
    assert f"{tmp_path}/{by_name('azure').file}; it is of tests/bench/traces" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bench", "option", "said"),
    [
        ("calibration", "--of", f"there is no file {ABSENT}"),
        ("goodput.__main__", "--of", f"there is no file {ABSENT}"),
        ("goodput.__main__", "--workload", f"there is no file {ABSENT}"),
        ("counting", "--tokenizer", f"there is no tokenizer.json in {ABSENT}"),
    ],
)
def test_a_file_that_is_not_there(
    bench: str, option: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [bench, option, ABSENT])
    with pytest.raises(SystemExit):
        importlib.import_module(f"tests.bench.{bench}").main()
    assert said in capsys.readouterr().err
