"""On-call's drains outlive the process, with whoever ordered them and why."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvctl.admin.client import RefusedError
from kvctl.admin.drains import ALL, Drains, sentence_of
from tests.admin.conftest import ENGINE, Clocks, NewDesk, Office

ENGINES = ("a", "b", "c")


def drains() -> Drains:
    return Drains(lambda: 1000.0)


def test_one_engine_taken_back_leaves_the_others_drained() -> None:
    held = drains()
    held.order(None, "ana", "new driver")
    held.lift("b", ENGINES)
    assert held.standing(ENGINES) == ["a", "c"]
    assert held.document()["a"] == {"actor": "ana", "since": 1000.0, "reason": "new driver", "for_s": 0.0}
    held.lift(None, ENGINES)
    assert held.standing(ENGINES) == []


def test_all_covers_an_engine_of_another_name() -> None:
    held = drains()
    held.order("a", "ana")
    held.order(None, "bo", "both")
    assert held.standing(("new",)) == ["new"]
    assert [*held.document()] == [ALL]


def test_a_second_order_keeps_the_beginning() -> None:
    now = [1000.0]
    held = Drains(lambda: now[0])
    held.order(None, "ana")
    now[0] = 1060.0
    held.order("a", "bo", "still")
    assert held.document()["a"] == {"actor": "bo", "since": 1000.0, "reason": "still", "for_s": 60.0}


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (ALL, "all engines are drained by ana, over restarts, until kvctl undrain: disk"),
        ("a", "a is drained by ana, over restarts, until kvctl undrain --engine a: disk"),
    ],
)
def test_an_order_in_words(engine: str, sentence: str) -> None:
    assert sentence_of(engine, {"actor": "ana", "reason": "disk"}) == sentence


@pytest.mark.parametrize("reason", ["new driver", ""])
async def test_a_drain_outlives_a_crash(
    office: Office, new_desk: NewDesk, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"reason": reason} if reason else None
    assert await office.call("post", "/v1/drain", body) == {"mode": "draining", "kept": True}
    after = new_desk([])  # the first was not closed: killed
    after.open()
    assert after.drains.standing([ENGINE]) == [ENGINE]
    assert after.document()["drains"][ALL]["reason"] == reason
    assert "over restarts, until kvctl undrain" in caplog.text
    await after.close()
    await office.call("post", "/v1/undrain")
    again = new_desk([])
    again.open()
    assert again.drains.standing([ENGINE]) == []
    await again.close()


async def test_a_reason_is_one_line(office: Office) -> None:
    await office.call("post", "/v1/drain", {"reason": " new\x1b[2J\n driver "})
    (held,) = (await office.call("get", "/v1/status"))["overrides"]["drains"].values()
    assert held["reason"] == "new [2J driver"
    line = json.loads((office.state_dir / "audit.jsonl").read_text().splitlines()[-1])
    assert (line["verb"], line["reason"], line["user"]) == ("drain", "new [2J driver", held["actor"])


@pytest.mark.parametrize("body", [{"reason": 5}, {"reason": "x" * 501}, {"why": "x"}, []])
async def test_a_drain_of_no_good_form_drains_nothing(office: Office, body: object) -> None:
    with pytest.raises(RefusedError):
        await office.call("post", "/v1/drain", body)
    assert not office.stand.draining
    assert office.desk.drains.document() == {}


_ORDER: dict[str, Any] = {"actor": "ana", "since": 1.0, "reason": ""}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        json.dumps({"version": 2, "drains": {}}),
        json.dumps({"version": 1, "drains": [_ORDER]}),
        json.dumps({"version": 1, "drains": {"a": {**_ORDER, "since": True}}}),
        json.dumps({"version": 1, "drains": {"a": {**_ORDER, "more": 1}}}),
        json.dumps({"version": 1, "drains": {"a": {**_ORDER, "since": float("nan")}}}),
        json.dumps({"version": 1, "drains": {"a": {**_ORDER, "actor": None}}}),
    ],
)
def test_a_state_that_nobody_can_read(
    new_desk: NewDesk, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "drains.json").write_text(content)
    desk = new_desk([])
    desk.open()
    assert desk.drains.document() == {}
    assert "no drain is in force; kept as" in caplog.text
    (aside,) = folder.glob("drains.json.refused-*")
    assert aside.read_text() == content


async def test_a_drain_that_cannot_be_kept_is_told(
    office: Office, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvctl")
    office.state_dir.rmdir() if office.state_dir.is_dir() else None
    office.state_dir.touch()  # a file where the folder should be
    assert await office.call("post", "/v1/drain") == {"mode": "draining", "kept": False}
    assert "drains and audit cannot be written, and would not outlive a restart" in caplog.text
    clocks.advance(60)
    assert (await office.call("get", "/v1/overrides"))["drains"][ALL]["for_s"] == 60
