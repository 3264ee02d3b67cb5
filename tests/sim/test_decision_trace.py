"""A decision log read as traffic, and replayed."""

import gzip
import json
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvctl.control import decision_documents
from kvctl.control.decision_file import DecisionFile
from kvctl.control.decision_log import DecisionRecorder, record_of
from kvctl.core.budget import budget_of
from kvctl.core.claim import Limits, Shape, claim
from kvctl.core.decisions import DecisionRecord, Kept, made
from kvctl.core.events import Admit, Arrived, Command, Event
from kvctl.core.gate import Gate
from kvctl.core.outcomes import EngineState, Policy
from kvctl.core.supply import GateConfig
from kvctl.sim import decision_trace
from kvctl.sim.decision_trace import read_log, rows_of
from kvctl.sim.log_scene import log_scene, measured_profile
from kvctl.sim.policies_core import CoreGate
from kvctl.sim.profiles import PROFILES
from kvctl.sim.replay import Scene, replay
from kvctl.sim.replay_score import Target, figures
from kvctl.sim.replay_setup import SetupError, caps, engine_config
from kvctl.sim.trace import Row, TraceError

WALL = 1_800_000_000.0


class Recording(Gate):
    """The gate with its decision log."""

    def __init__(self, config: GateConfig) -> None:
        super().__init__(config)
        self.lines: list[dict[str, Any]] = []
        self._recorder = DecisionRecorder("one", self.moment, [self._keep])

    def _keep(self, kept: Kept) -> None:
        entry = made(kept)
        self.lines.append(decision_documents.line(entry, WALL + entry.at))

    def handle(self, event: Event, now: float) -> list[Command]:
        commands = super().handle(event, now)
        self._recorder(event, commands, now)
        return commands


def scene(rate: float = 8.0) -> Scene:
    """Far more than the engine can serve."""
    rows = [
        Row(
            number=n,
            at_s=n / rate,
            prompt_tokens=200 + n * 37 % 500,
            output_tokens=60 + n * 53 % 300,
            tenant=f"t{n % 3}",
        )
        for n in range(400)
    ]
    return Scene(rows=rows, engine=engine_config(PROFILES["8b-24g"], 12_000, 4096), cap=caps("1024"))


def written(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "decisions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A log of an overload, and the figures of the run that made it."""
    config = GateConfig(margin_ratio=0.08)
    gate = Recording(config)
    run = replay(scene(), CoreGate(config, gate))
    return written(tmp_path_factory.mktemp("log"), gate.lines), figures(run, Target())


def test_the_format_is_the_daemons() -> None:
    assert decision_trace.VERSION == decision_documents.VERSION


def test_a_caller_is_one_however_often_it_tried(logged: tuple[Path, Any]) -> None:
    path, made = logged
    trace = read_log([path])
    assert made.refused > 50
    assert (
        abs(len(trace.callers) - 400) <= 4
    )  # callers that ask for the very same are told apart by time alone
    assert max(told.tries for told in trace.callers) == 3
    assert trace.capacity_tokens == 12_000
    assert trace.margin_ratio == 0.08


def test_what_really_happened_is_in_the_log(logged: tuple[Path, Any]) -> None:
    path, made = logged
    trace = read_log([path])
    recorded = figures(log_scene(trace, scene().engine).recorded, Target())
    assert recorded.completed == made.completed
    assert recorded.goodput_rps == pytest.approx(made.goodput_rps, rel=0.03)
    assert recorded.ttft_p50_s == pytest.approx(made.ttft_p50_s, rel=0.1)


def test_the_replay_of_a_log_comes_near_to_what_happened(logged: tuple[Path, Any]) -> None:
    path, made = logged
    trace = read_log([path])
    profile = measured_profile(trace)
    again = log_scene(trace, engine_config(profile, trace.capacity_tokens, 4096))
    found = figures(replay(again.scene, CoreGate(GateConfig(margin_ratio=0.08))), Target())
    assert found.goodput_rps == pytest.approx(made.goodput_rps, rel=0.15)
    assert found.kv_usage_mean == pytest.approx(made.kv_usage_mean, rel=0.15)
    assert again.drawn == made.refused


def decided(at: float, word: str = "admit", **more: Any) -> dict[str, Any]:
    """A line with what a replay reads."""
    line = {
        "v": 1,
        "type": "decision",
        "time": datetime.fromtimestamp(WALL + at, UTC).isoformat(timespec="milliseconds"),
        "engine": "one",
        "lease": f"L{at}",
        "id": f"L{at}",
        "route": "chat",
        "model": "m",
        "tenant": "a",
        "prompts": [100],
        "n": 1,
        "asked_output": 50,
        "stream": True,
        "capacity_tokens": 8000,
        "margin_ratio": 0.05,
        "leases": 1,
        "decision": word,
        "retry_after_s": None,
        "waited_s": 0.0,
    }
    return line | more


def ended(at: float, lease: str, output: int, word: str = "finished") -> dict[str, Any]:
    stamp = datetime.fromtimestamp(WALL + at, UTC).isoformat(timespec="milliseconds")
    line = {"v": 1, "type": "end", "time": stamp, "engine": "one", "lease": lease, "end": word}
    return line | {"seconds": 1.0, "first_token_s": 0.2, "output_tokens": output}


def test_a_retry_is_known_by_what_it_asks(tmp_path: Path) -> None:
    lines = [
        decided(0.0, "reject_later", retry_after_s=2.0),
        decided(2.1),
        decided(2.2, "reject_later", prompts=[101]),
        decided(99.0, prompts=[101]),
    ]
    callers = read_log([written(tmp_path, lines)]).callers
    assert [(round(told.at_s, 3), told.tries) for told in callers] == [(0.0, 2), (2.2, 1), (99.0, 1)]


def test_a_retry_is_known_by_its_id(tmp_path: Path) -> None:
    lines = [
        decided(0.0, "reject_later", id="one", retry_after_s=2.0),
        decided(2.8, id="two"),
        decided(4.5, id="three"),
        decided(8.0, id="one"),
    ]
    assert [told.tries for told in read_log([written(tmp_path, lines)]).callers] == [2, 1, 1]


def test_one_that_waited_came_before(tmp_path: Path) -> None:
    lines = [decided(5.0), decided(5.5, "queue", lease="w"), decided(7.0, lease="w", waited_s=1.5)]
    assert [told.at_s for told in read_log([written(tmp_path, lines)]).callers] == pytest.approx([0.0, 0.5])


def test_every_sequence_is_a_row_and_unknown_lengths_are_drawn(tmp_path: Path) -> None:
    lines = [
        decided(0.0, prompts=[10, 20], n=2, lease="x"),
        decided(1.0, "reject_later", prompts=[30], asked_output=7),
        ended(2.0, "x", 80),
    ]
    rows, caps, drawn = rows_of(read_log([written(tmp_path, lines)]).callers, seed=1)
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [
        (10, 20),
        (10, 20),
        (20, 20),
        (20, 20),
        (30, 7),
    ]
    assert list(caps.values()) == [50, 50, 50, 50, 7]
    assert drawn == 1


def test_what_can_never_fit_and_what_was_lost_is_counted(tmp_path: Path) -> None:
    lost = {"v": 1, "type": "dropped", "records": 3}
    trace = read_log([written(tmp_path, [lost, decided(0.0), decided(0.5, "reject_never"), lost])])
    assert (len(trace.callers), trace.never, trace.dropped) == (1, 1, 6)


async def test_what_the_daemon_writes_of_its_losses_is_read(tmp_path: Path) -> None:
    """A file with room for no record at a time, and records that came while it was full."""
    file = DecisionFile(tmp_path / "log", max_bytes=1 << 20, wall_offset=lambda: WALL, buffered=1)
    shape = Shape(route="chat", model="m", prompts=(100,))
    moment = (budget_of(8000, 0.05, {}), EngineState.UP, Policy.FORECAST, False, 0)
    for n in range(3):
        file.put(
            record_of("one", Arrived(f"L{n}", shape), moment, Admit(f"L{n}", claim(shape, Limits()), 1.0), n)
        )
    await file.close()
    trace = read_log([tmp_path / "log"])
    assert (len(trace.callers), trace.dropped) == (1, 2)


def test_lines_that_a_crash_tore_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path, [decided(0.0)])
    rest = json.dumps(decided(1.0)) + "\n"
    path.write_bytes(b'{"v": 1, "model": "\xc3\n' + path.read_bytes() + b'{"v": 1, "ti\n' + rest.encode())
    trace = read_log([path])
    assert (len(trace.callers), trace.torn) == (2, 2)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_clock_that_is_set_moves_nobody(tmp_path: Path, step: float) -> None:
    lines = [decided(float(n)) | {"at": n + 7.0} for n in range(4)]
    lines += [decided(n + step, lease=f"L{n}") | {"at": n + 7.0} for n in range(4, 8)]
    callers = read_log([written(tmp_path, lines)]).callers
    assert [told.at_s for told in callers] == pytest.approx([float(n) for n in range(8)])


def test_a_machine_that_starts_anew_keeps_its_gap(tmp_path: Path) -> None:
    stamps = [(0.0, 5000.0), (1.0, 5001.0), (91.0, 30.0), (92.0, 31.0)]
    lines = [decided(wall) | {"at": at} for wall, at in stamps]
    callers = read_log([written(tmp_path, lines)]).callers
    assert [told.at_s for told in callers] == pytest.approx([0.0, 1.0, 91.0, 92.0])


def test_one_that_left_the_queue_asked_all_the_same(tmp_path: Path) -> None:
    gone = ended(2.0, "w", 0, "client_gone") | {"seconds": 1.0, "first_token_s": None}
    lines = [decided(0.0), decided(1.0, "queue", lease="w", prompts=[70]), gone]
    callers = read_log([written(tmp_path, lines)]).callers
    assert [(told.at_s, told.prompts, told.output) for told in callers] == [
        (0.0, (100,), None),
        (1.0, (70,), None),
    ]


def test_a_cut_archive_of_a_log_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(json.dumps(decided(0.0)).encode() * 50)[:-12])
    with pytest.raises(TraceError, match=r"log\.gz"):
        read_log([path])


def test_a_line_still_being_written_is_no_fault(tmp_path: Path) -> None:
    path = written(tmp_path, [decided(0.0)])
    with path.open("a") as file:
        file.write('{"v": 1, "ti')
    assert len(read_log([path]).callers) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}\n", "line 1: not a line of a decision log"),
        (json.dumps(decided(0.0, v=2)) + "\n", "line 1: not a line"),
        ("x\n{}\n", "line 1:"),
        ("", "no requests"),
        (json.dumps(decided(0.0, prompts=None)) + "\n", "no record"),
        (json.dumps(decided(0.0)) + "\n" + json.dumps(decided(0.0, engine="two")) + "\n", "one, two"),
    ],
)
def test_what_is_no_log_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        read_log([path])


def test_one_engine_of_several(tmp_path: Path) -> None:
    path = written(tmp_path, [decided(0.0), decided(1.0, engine="two"), decided(2.0, engine="two")])
    assert len(read_log([path], "two").callers) == 2
    with pytest.raises(TraceError, match="no engine 'three'"):
        read_log([path], "three")


def test_too_few_answers_measure_nothing(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"too few .*: 20 are needed in the log; .*--engine-profile"):
        measured_profile(read_log([written(tmp_path, [decided(0.0)])]))


def test_records_are_the_daemons_own(logged: tuple[Path, Any]) -> None:
    kinds = {json.loads(line)["type"] for line in logged[0].read_text().splitlines()}
    assert kinds == {"decision", "end"}
    assert fields(DecisionRecord)
