"""Decisions looked up in the decision log's files, as a daemon before this one left them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvctl.control.decision_file import KEPT, DecisionFile
from kvctl.control.decision_search import search
from kvctl.control.journal import Journal
from kvctl.core.decisions import DecisionRecord, EndRecord
from kvctl.core.outcomes import Decision, EngineState, Pressure, RejectReason
from tests.core.test_decisions import ADMITTED, REFUSED, SCALES, ended, record


async def written(path: Path, *entries: DecisionRecord | EndRecord, max_bytes: int = 1 << 20) -> DecisionFile:
    file = DecisionFile(path, max_bytes=max_bytes, wall_offset=lambda: 1e6)
    for entry in entries:
        file.put(entry)
        await file.close()
    return file


@pytest.mark.parametrize(
    "like",
    [
        ADMITTED,
        replace(ADMITTED, shadow=True, reason=RejectReason.KV_BUDGET),
        REFUSED,
        replace(REFUSED, reason=RejectReason.DRAINING, scales=replace(SCALES, draining=True)),
        replace(REFUSED, reason=RejectReason.ENGINE_WEDGED, scales=replace(SCALES, state=EngineState.WEDGED)),
        replace(
            REFUSED,
            scales=replace(SCALES, pressure_ratio=0.8, pressure_term=Pressure.PREEMPTION),
            claim_tokens=None,
        ),
        replace(REFUSED, reason=RejectReason.MAX_CONTEXT, limit_tokens=90, largest_output=7),
    ],
)
async def test_it_is_told_as_it_was_from_memory(tmp_path: Path, like: DecisionRecord) -> None:
    file = await written(
        tmp_path / "d.jsonl", record(1, like, "caller-1"), replace(ended(1), request_id="caller-1")
    )
    journal = Journal(10, lambda: 0.0, lambda: 1e6)
    journal.ring.add(record(1, like, "caller-1"))
    journal.ring.add(ended(1))
    for some_id in ("caller-1", "l-1"):
        assert search(file.path, KEPT, some_id) == journal.find(some_id)


async def test_the_last_of_retries_under_one_id(tmp_path: Path) -> None:
    tries = record(1, ADMITTED, "same"), replace(ended(1), request_id="same"), record(2, REFUSED, "same")
    file = await written(tmp_path / "d.jsonl", *tries)
    told = found(file.path, "same")
    assert (told["lease"], told["decision"], told["ended"]) == ("l-2", "reject_later", None)
    assert found(file.path, "l-1")["ended"]["end"] == "finished"


async def test_one_that_waited_is_told_as_it_was_decided(tmp_path: Path) -> None:
    waits = replace(record(1, REFUSED), decision=Decision.QUEUE)
    file = await written(tmp_path / "d.jsonl", waits)
    assert found(file.path, "l-1")["decision"] == "queue"
    await written(file.path, replace(record(1), waited_s=3.0))
    assert found(file.path, "l-1")["decision"] == "admit"


async def test_rotated_files_are_searched_too_and_none_beyond_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    await written(path, *(record(number) for number in range(12)), max_bytes=2048)
    names = ["d.jsonl", *(f"d.jsonl.{n}" for n in range(1, KEPT + 1))]
    kept = [line for name in names for line in reversed((tmp_path / name).read_text().splitlines())]
    assert len(kept) > len((path).read_text().splitlines())
    for line in kept:
        assert found(path, json.loads(line)["id"])["id"] == json.loads(line)["id"]
    oldest, newest = json.loads(kept[-1])["id"], json.loads(kept[0])["id"]
    assert search(path, KEPT, oldest, farthest=2048) is None
    assert search(path, KEPT, newest, farthest=2048) is not None
    assert search(path, KEPT, "r-0") is None  # rotated away


async def test_lines_on_the_border_of_what_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await written(tmp_path / "d.jsonl", *(record(number) for number in range(6)))
    for block in (7, 64, 501, 1 << 16):
        monkeypatch.setattr("kvctl.control.decision_search._BLOCK", block)
        assert [found(file.path, f"r-{number}")["lease"] for number in range(6)] == [
            f"l-{n}" for n in range(6)
        ]
        assert search(file.path, KEPT, "r-6") is None


async def test_lines_that_are_none_of_ours_are_passed_over(tmp_path: Path) -> None:
    file = await written(tmp_path / "d.jsonl", record(1, ADMITTED, "odd"))
    good = json.loads(file.path.read_text())
    odd = [
        '{"v":1,"type":"decision","id":"odd"',  # torn
        '["odd"]',
        json.dumps(good | {"v": 2}),
        json.dumps(good | {"state": "a state of tomorrow"}),
        json.dumps({key: value for key, value in good.items() if key != "prompts"}),
        json.dumps(good | {"id": "other", "model": "odd"}),
        json.dumps({"v": 1, "type": "dropped", "id": "odd"}),
    ]
    file.path.write_bytes(file.path.read_bytes() + "\n".join(odd).encode() + b'\n\xff"odd"\n')
    assert found(file.path, "odd")["lease"] == "l-1"
    older = {key: value for key, value in good.items() if key not in ("free_tokens", "forecast_bounded")}
    file.path.write_text(json.dumps(older | {"id": "older"}) + "\n")
    assert found(file.path, "older")["free_tokens"] is None


def test_where_there_is_nothing(tmp_path: Path) -> None:
    assert search(tmp_path / "none.jsonl", KEPT, "x") is None
    (tmp_path / "d").mkdir()
    assert search(tmp_path / "d", KEPT, "x") is None
    for strange in ("", "\n", "ü", "\ud800", '"'):
        (tmp_path / "f").write_text("{}\n\n")
        assert search(tmp_path / "f", KEPT, strange) is None


def found(path: Path, some_id: str) -> dict[str, Any]:
    told = search(path, KEPT, some_id)
    assert told is not None, some_id
    return told
