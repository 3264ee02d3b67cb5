"""The demo: its figures on a made-up play, and the whole of it for a few seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from kvctl.cli.demo_picture import write_picture
from kvctl.cli.demo_run import EngineReading, LaneRun, Play, note_budget, read_page
from kvctl.cli.demo_stage import Lane
from kvctl.cli.demo_summary import sentences, summary, summary_table
from kvctl.cli.demo_view import LineView, live_table, phase_words
from kvctl.core.outcomes import Policy
from kvctl.sim.client import Outcome
from kvctl.sim.load import Call
from kvctl.sim.score import score

FIGURES = {"goodput_rps", "completed", "refused", "preemptions", "ttft_p50_s", "ttft_p99_s", "kv_usage_mean"}
NEIGHBOUR = ("arrives", "gpu_memory")
MOST_PLAYS, SPOILED_S = 5, 0.3


def gate(budget: int, reason: str = "steady") -> dict[str, Any]:
    return {"budget_tokens": budget, "budget_reason": reason, "forecast_peak_tokens": 1000.5, "state": "up"}


@pytest.fixture
def a_play(tmp_path: Path) -> Play:
    """Two calls, one served in time and one refused, and a budget that fell and came back."""
    calls = [Call(at_s=float(at), prompt_tokens=10, output_tokens=5, cap_tokens=2048) for at in range(2)]
    runs = []
    for policy in (Policy.NONE, Policy.STATIC, Policy.FORECAST):
        run = LaneRun(
            Lane(policy, tmp_path), engine=EngineReading(preemptions=7), usage_trace=[(0.0, 0.2), (0.25, 0.4)]
        )
        run.outcomes = [
            Outcome(call=calls[0], tries=1, status=200, first_at=0.5, last_at=0.9, tokens=5, complete=True),
            Outcome(call=calls[1], tries=3, status=429, refusals=3, given_up=True),
        ]
        moves = ((0.0, 30000, "steady"), (4.5, 18000, "gpu_memory"), (7.0, 30000, "recovery"))
        for at, budget, reason in moves:
            run.gate = gate(budget, reason)
            note_budget(run, at)
        runs.append(run)
    return Play(10.0, calls, runs, now_s=5.0, neighbour_came_s=4.0, neighbour_left_s=6.0)


def test_summary_has_the_promised_keys(a_play: Play) -> None:
    result = json.loads(json.dumps(summary(a_play, 1.0)))
    assert set(result["policies"]) == {"none", "static", "forecast"}
    for figures in result["policies"].values():
        assert set(figures) >= FIGURES
        assert (figures["completed"], figures["refused"], figures["preemptions"]) == (1, 1, 7)
        assert figures["goodput_rps"] == 0.1
        assert figures["kv_usage_mean"] == 0.3


def test_summary_tells_when_the_budget_moved_and_why(a_play: Play) -> None:
    budget = summary(a_play, 1.0)["budget"]
    assert (budget["min_tokens"], budget["max_tokens"], budget["changes"]) == (18000, 30000, 2)
    assert budget["neighbour"] == {"arrived_s": 4.0, "left_s": 6.0}
    assert [(one["t_s"], one["kind"], one["reason"]) for one in budget["events"]] == [
        (4.0, "neighbour", "arrives"),
        (4.5, "budget", "gpu_memory"),
        (6.0, "neighbour", "leaves"),
        (7.0, "budget", "recovery"),
    ]
    assert (budget["events"][1]["from"], budget["events"][1]["to"]) == (30000, 18000)


def test_budget_that_hardly_moved_is_no_event(a_play: Play) -> None:
    run = a_play.lanes[0]
    before = list(run.events)
    run.gate = gate(30100)
    note_budget(run, 8.0)
    assert run.events == before


def test_sentences_say_what_happened(a_play: Play) -> None:
    told = "\n".join(sentences(a_play, {run.policy: score(run.outcomes, 10.0) for run in a_play.lanes}))
    assert "the neighbour took memory at 4.0 s, the budget fell to 18,000 tokens after 0.5 s" in told
    assert "too busy" not in told


def test_a_machine_that_was_too_slow_is_named(a_play: Play) -> None:
    a_play.lanes[1].engine = EngineReading(slipped_s=3.0)
    told = sentences(a_play, {run.policy: score(run.outcomes, 10.0) for run in a_play.lanes})
    assert told[-1].startswith("This machine was too busy: the engine of static lost 3.0 s")


def test_run_that_ended_before_anything_came_can_be_told(tmp_path: Path) -> None:
    play = Play(10.0, [], [LaneRun(Lane(policy, tmp_path)) for policy in Policy])
    result = summary(play, 1.0)
    assert result["policies"]["none"]["ttft_p50_s"] is None
    assert result["budget"]["min_tokens"] is None
    Console(file=StringIO()).print(summary_table(play))


@pytest.mark.parametrize(
    ("came", "left", "there"), [(None, None, False), (4.0, None, True), (4.0, 6.0, False)]
)
def test_the_neighbour_is_in_the_words_while_it_is_there(
    a_play: Play, came: float | None, left: float | None, there: bool
) -> None:
    a_play.neighbour_came_s, a_play.neighbour_left_s = came, left
    assert ("Somebody else" in phase_words(a_play)) is there


def test_lines_and_table_show_the_play(a_play: Play) -> None:
    console = Console(width=300, record=True, file=StringIO())
    with LineView(console) as view:
        view.show(a_play)
    console.print(live_table(a_play))
    console.print(summary_table(a_play))
    shown = console.export_text()
    for words in ("budget 30,000 recovery", "none:", "18,000 (gpu_memory)", "served in time"):
        assert words in shown


def test_the_live_table_fits_a_small_terminal(a_play: Play) -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(live_table(a_play))
    shown = console.export_text()
    assert all(word in shown for word in ("forecast", "waiting", "preempted"))
    assert "\u2026" not in shown


def test_page_of_another_engine_reads_as_zeros() -> None:
    assert read_page("# TYPE x gauge\nx 1\n") == EngineReading()
    page = 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\nsim:slipped_seconds_total 0.25\n'
    assert read_page(page) == EngineReading(kv_usage=0.5, slipped_s=0.25)


def demo(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from kvctl.cli.main import main; main()", "demo", *arguments]


def play() -> tuple[dict[str, Any], str]:
    """What the command says of six seconds, as JSON, and what it told meanwhile."""
    done = subprocess.run(
        demo("--seconds", "6", "-o", "json"), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def wrongs(result: dict[str, Any]) -> list[str]:
    none, static, forecast = (result["policies"][name] for name in ("none", "static", "forecast"))
    reasons = dict.fromkeys(one["reason"] for one in result["budget"]["events"])
    told = {
        "somebody is served": all(each["completed"] for each in (none, static, forecast)),
        "nobody fails": not any(each["failed"] for each in (none, static, forecast)),
        "without a gate all are let in": none["refusals"] == 0,
        "worst cases refuse": static["refusals"] > 0,
        "the forecast fills more of the pool": forecast["kv_usage_mean"] > static["kv_usage_mean"],
        "a neighbour takes memory": [each for each in reasons if each in NEIGHBOUR] == list(NEIGHBOUR),
    }
    return [words for words, true in told.items() if not true]


def test_the_whole_demo_for_a_few_seconds() -> None:
    """Over real time: what the machine spoiled by standing still is played again."""
    for _ in range(MOST_PLAYS):
        result, told = play()
        policies = result["policies"]
        assert set(policies) == {"none", "static", "forecast"}
        assert all(set(figures) >= FIGURES for figures in policies.values())
        assert "burst" in told
        if not wrongs(result) or max(each["engine_slipped_s"] for each in policies.values()) < SPOILED_S:
            break
    assert not wrongs(result), result


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_demo_that_is_stopped_takes_everything_down(tmp_path: Path, signum: signal.Signals) -> None:
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        demo("--seconds", "60"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "calm" in line:
                break
        process.send_signal(signum)
        process.wait(timeout=120)
    if signum is signal.SIGTERM:
        assert process.returncode == 1
        assert list(tmp_path.iterdir()) == []
    for _ in range(100):
        if not running_in(tmp_path):
            return
        time.sleep(0.1)
    raise AssertionError(f"still running: {running_in(tmp_path)}")


def running_in(folder: Path) -> list[str]:
    """Command lines of processes that use a file of ``folder``."""
    lines = [read(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [line.replace("\0", " ") for line in lines if str(folder) in line]


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_the_picture_is_drawn_of_what_was_seen(a_play: Play, tmp_path: Path) -> None:
    for run in a_play.lanes:
        run.budget_trace = [(0.0, 30000.0), (5.0, 18000.0)]
        run.peaks = [(0.0, 100.0), (5.0, 17000.0)]
    path = tmp_path / "demo.svg"
    write_picture(a_play, path)
    tree = ET.fromstring(path.read_text(encoding="utf-8"))  # noqa: S314 - written a line above
    lines = tree.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == len(a_play.lanes) + 2
    assert all(len(line.attrib["points"].split()) == 2 for line in lines)
