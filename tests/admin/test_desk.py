import asyncio
import json
import logging
import os
from pathlib import Path

import pytest

from kvctl.admin.audit import AUDIT_KEPT, Audit
from kvctl.admin.desk import Desk
from kvctl.admin.peers import Actor, user_name
from kvctl.admin.state import StateFile
from kvctl.core.overrides import Knob
from tests.admin.conftest import DEFAULTS, Applied, Clocks, NewDesk

ANA = Actor(uid=1000, gid=1000, pid=7, user="ana")


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvctl")


async def set_margin(desk: Desk, value: object = "12%", ttl_s: float = 1800) -> bool:
    change = await desk.set(ANA, "margin", value, ttl_s=ttl_s, reason="night", if_match=None)
    return change.kept


async def test_running_out_tells_everyone_once(
    new_desk: NewDesk, clocks: Clocks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    applied: Applied = []
    desk = new_desk(applied)
    desk.open()
    await set_margin(desk, ttl_s=60)
    clocks.advance(59)
    assert desk.expire() == []
    clocks.advance(1)
    assert desk.values()[Knob.MARGIN] == 0.05
    assert [each.knob for each in desk.expire()] == [Knob.MARGIN]
    assert desk.expire() == []
    await desk.close()
    assert [each[Knob.MARGIN] for each in applied] == [0.05, 0.12, 0.05]
    assert "The override of margin ran out: 12% to 5%" in caplog.text
    *_, last = (tmp_path / "state" / "audit.jsonl").read_text().splitlines()
    assert json.loads(last) | {
        "verb": "expire",
        "user": "kvctl",
        "old": 0.12,
        "new": 0.05,
        "revision": 2,
    } == json.loads(last)
    assert json.loads((tmp_path / "state" / "overrides.json").read_text())["overrides"] == []


async def test_a_crash_loses_nothing(
    new_desk: NewDesk, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    desk = new_desk([])
    desk.open()
    assert await set_margin(desk, ttl_s=100)
    clocks.mono, clocks.wall = 3.0, clocks.wall + 40  # no close: killed; another boot's clock
    applied: Applied = []
    after = new_desk(applied)
    after.open()
    assert applied == [DEFAULTS | {Knob.MARGIN: 0.12}]
    assert after.active()[Knob.MARGIN].left_s(3.0) == 60
    assert after.revision == desk.revision
    assert "margin stays at 12% for 60 s more, as ana set it: night" in caplog.text
    await desk.close()
    await after.close()


async def test_what_ran_out_while_down(new_desk: NewDesk, clocks: Clocks, tmp_path: Path) -> None:
    desk = new_desk([])
    desk.open()
    await set_margin(desk, ttl_s=100)
    await desk.close()
    clocks.advance(101)
    after = new_desk([])
    after.open()
    assert after.active() == {}
    await after.close()
    assert json.loads((tmp_path / "state" / "overrides.json").read_text())["overrides"] == []


@pytest.mark.parametrize(
    "content", ["", "{", '{"version": 99}', "[]", '{"version": 1, "revision": 1, "overrides": [1]}', "\0"]
)
async def test_a_state_that_nobody_can_read(
    new_desk: NewDesk, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "overrides.json").write_text(content)
    desk = new_desk([])
    desk.open()
    assert desk.values() == DEFAULTS
    assert "kept as" in caplog.text
    (aside,) = state.glob("overrides.json.refused-*")
    assert aside.read_text() == content
    assert await set_margin(desk)
    await desk.close()


async def test_a_disk_that_takes_nothing(
    new_desk: NewDesk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").touch()  # a file where the folder should be: fails for root too
    applied: Applied = []
    desk = new_desk(applied)
    desk.open()
    assert not await set_margin(desk, "10%")
    assert not await set_margin(desk, "11%")
    assert applied[-1][Knob.MARGIN] == 0.11
    assert desk.document()["kept"] is False
    (tmp_path / "state").unlink()
    assert await set_margin(desk, "12%")
    assert desk.document()["kept"] is True
    await desk.close()
    assert caplog.text.count("would not outlive a restart") == 1
    assert caplog.text.count("are written again") == 1


async def test_a_slow_disk_does_not_hold_the_loop(new_desk: NewDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = new_desk([])
    desk.open()
    held = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = os.fsync

    def slow(handle: int) -> None:
        asyncio.run_coroutine_threadsafe(held.wait(), loop).result(
            20
        )  # only a loop that runs lets this go on
        real(handle)

    monkeypatch.setattr(os, "fsync", slow)
    change = asyncio.ensure_future(set_margin(desk))
    await asyncio.sleep(0.05)
    assert desk.values()[Knob.MARGIN] == 0.12
    assert not change.done()
    held.set()
    assert await change
    await desk.close()


def test_a_state_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path / "deep" / "s.json")
    assert file.read() is None
    file.write({"n": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        file.write({"n": 2})
    assert file.read() == {"n": 1}


def test_the_audit_is_rotated_by_size(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl", max_bytes=500)
    for number in range(100):
        audit.append({"number": number})
    files = sorted(tmp_path.iterdir())
    assert len(files) == AUDIT_KEPT + 1
    assert all(path.stat().st_size < 600 for path in files)
    newest = [json.loads(line)["number"] for line in audit.path.read_text().splitlines()]
    assert newest[-1] == 99
    before = [json.loads(line)["number"] for line in (tmp_path / "audit.jsonl.1").read_text().splitlines()]
    assert before[-1] == newest[0] - 1


def test_users_without_a_name() -> None:
    assert user_name(4_000_000) == "4000000"
