"""What strangers and broken disks hand to the admin side: words, numbers, files; and the pace of answers."""

import asyncio
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvctl.admin.answers import SharedPage
from kvctl.admin.audit import Audit
from kvctl.admin.client import RefusedError
from kvctl.control.appending import append
from tests.admin.conftest import DEFAULTS, NewDesk, Office
from tests.core.test_decisions import REFUSED, record

HALF_PAIR = "a\ud800b"


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file grows beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- words and numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (HALF_PAIR, "a b"),
        ("\x1b[2Jgone", "[2Jgone"),
        ("two\nlines\tand\u2028more", "two lines and more"),
        ("\u202eright to left", "right to left"),
        ("größer 日本 🙂", "größer 日本 🙂"),
    ],
)
async def test_a_reason_is_one_line_that_prints(office: Office, given: str, kept: str) -> None:
    body = {"value": "7%", "ttl_s": 600, "reason": given}
    await office.call("put", "/v1/overrides/margin", body)
    for route in ("overrides", "status"):
        document = await office.call("get", f"/v1/{route}")
        held = document.get("overrides", document)
        assert held["active"]["margin"]["reason"] == kept
    assert "\x1b" not in (office.state_dir / "audit.jsonl").read_text()


@pytest.mark.parametrize("reason", ["\x1b\n\u202e", "x" * 501, 7, None, ["a"]])
async def test_a_reason_that_is_none(office: Office, reason: object) -> None:
    with pytest.raises(RefusedError) as caught:
        await office.call("put", "/v1/overrides/margin", {"value": "7%", "reason": reason})
    assert caught.value.code == "no_reason"


@pytest.mark.parametrize("knob", ["margin", "capacity_tokens", "max_context", "queue_max_wait", "enforce"])
@pytest.mark.parametrize("value", [10**400, -(10**4000), 1e308, "9" * 4000, HALF_PAIR, {}, [[]], True, None])
async def test_values_that_are_no_values(office: Office, knob: str, value: object) -> None:
    """Refused with a short word; the audit log has a short line of it."""
    with pytest.raises(RefusedError) as caught:
        await office.call("put", f"/v1/overrides/{knob}", {"value": value, "reason": "r"})
    assert caught.value.status == 422
    assert len(str(caught.value)) < 5000
    assert (await office.call("get", "/v1/overrides"))["revision"] == 0


@pytest.mark.parametrize("name", [HALF_PAIR, "\x1b[2J", '"}\n{"', "日本"])
async def test_a_name_that_utf_8_has_no_form_for(office: Office, name: str) -> None:
    """One request with such a name must not take the list of decisions away from everybody."""
    office.journal.ring.add(record(1, REFUSED, name))
    (shown,) = (await office.call("get", "/v1/decisions"))["decisions"]
    assert shown["id"] == name


# --- files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["[" * 100_000, " " * (2**20 + 1), '{"version": ' + "9" * 5000 + "}", "\ud800"]
)
async def test_a_state_that_is_too_much(
    new_desk: NewDesk, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Too deep, too large, too long a number, no UTF-8: set aside with a word, and the start goes on."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "overrides.json").write_bytes(content.encode(errors="surrogatepass"))
    desk = new_desk([])
    desk.open()
    assert desk.values() == DEFAULTS
    assert "kept as" in caplog.text
    await desk.close()


async def test_a_state_that_is_a_pipe(new_desk: NewDesk, tmp_path: Path) -> None:
    """The start does not wait for somebody to write into it."""
    state = tmp_path / "state"
    state.mkdir()
    os.mkfifo(state / "overrides.json")
    desk = new_desk([])
    async with asyncio.timeout(60):
        await asyncio.to_thread(desk.open)
    assert desk.values() == DEFAULTS
    await desk.close()


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    with disk_of(250):
        audit.append({"verb": "one", "reason": "x" * 100})
        with pytest.raises(OSError, match="large"):
            audit.append({"verb": "two", "reason": "x" * 100})
    audit.append({"verb": "three"})
    verbs = [json.loads(line)["verb"] for line in audit.path.read_text().splitlines()]
    assert verbs == ["one", "three"]


def test_what_a_crash_tore_stays_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\n{"b": ')
    append(path, b'{"c": 3}\n', max_bytes=1000, kept=1)
    append(path, b'{"d": 4}\n', max_bytes=1000, kept=1)
    assert path.read_bytes() == b'{"a": 1}\n{"b": \n{"c": 3}\n{"d": 4}\n'


def test_a_device_is_a_file_too() -> None:
    append(Path("/dev/null"), b"line\n", max_bytes=10, kept=1)
    with pytest.raises(OSError, match="No space left"):
        append(Path("/dev/full"), b"line\n", max_bytes=10, kept=1)


async def test_a_change_is_in_the_audit_even_where_it_cannot_be_kept(office: Office) -> None:
    (office.state_dir / "overrides.json.new").mkdir(parents=True)  # the draft cannot be written
    made = await office.call("put", "/v1/overrides/margin", {"value": "7%", "reason": "night"})
    assert (made["new"], made["kept"]) == (0.07, False)
    (line,) = (office.state_dir / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["new"] == 0.07


# --- the pace -------------------------------------------------------------------------------------------


async def test_what_is_dear_is_made_once_for_all_who_wait() -> None:
    made: list[int] = []

    def make() -> tuple[list[bytes], str]:
        made.append(len(made))
        return [b"page ", b"%d" % made[-1]], "text/plain"

    shared = SharedPage(make)
    asked = time.perf_counter()
    assert await shared.get(asked) == (b"page 0", "text/plain")
    asked = time.perf_counter()
    assert set(await asyncio.gather(*(shared.get(asked) for _ in range(100)))) == {(b"page 1", "text/plain")}
    asked = time.perf_counter()
    leaving: list[asyncio.Task[Any]] = [asyncio.create_task(shared.get(asked)) for _ in range(3)]
    await asyncio.sleep(0)
    leaving[0].cancel()  # whoever leaves takes nothing from the others
    assert await leaving[1] == await leaving[2] == (b"page 2", "text/plain")
    assert len(made) == 3


async def test_the_loop_has_its_turns_while_a_page_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the whole takes, others wait for a part of it; who leaves in its middle harms nobody."""
    turns: list[int] = []
    parts = 0

    def make() -> tuple[Iterator[bytes], str]:
        def each() -> Iterator[bytes]:
            nonlocal parts
            for _ in range(50):
                parts += 1
                yield b"x"

        return each(), "text/plain"

    async def other() -> None:
        while True:
            turns.append(parts)
            await asyncio.sleep(0)

    monkeypatch.setattr(SharedPage, "SLICE_S", -1.0)  # a pause after every part
    shared, beside = SharedPage(make), asyncio.create_task(other())
    leaving = asyncio.create_task(shared.get(time.perf_counter()))
    while parts < 10:  # noqa: ASYNC110 - the parts are counted by a generator
        await asyncio.sleep(0)
    leaving.cancel()
    assert await shared.get(time.perf_counter()) == (b"x" * 50, "text/plain")
    beside.cancel()
    assert len(set(turns)) > 50
