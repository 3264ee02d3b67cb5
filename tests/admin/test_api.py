import asyncio
import json
import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvctl.admin.client import AdminClient, RefusedError
from kvctl.admin.listeners import OwnedSocket
from kvctl.admin.pace import Pace
from kvctl.admin.server import AdminApi, AdminServer
from kvctl.control.journal import Journal
from kvctl.core.overrides import Knob
from kvctl.settings.model import SPECS
from tests.admin.conftest import DEFAULTS, ENGINE, PATIENCE_S, Applied, NewDesk, Office, Stand

JOURNAL = Journal(10, time.monotonic, time.time)
BODY = {"value": "12%", "ttl_s": 1800, "reason": "preemptions since 02:10"}


async def raw(office: Office, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of bytes sent as they are."""
    reader, writer = await asyncio.open_unix_connection(office.socket)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}, body


def request(method: str, route: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [
        f"{method} {route} HTTP/1.1",
        "Host: kvctl",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def audit(office: Office) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (office.state_dir / "audit.jsonl").read_text().splitlines()]


async def refused(office: Office, *arguments: Any, **named: Any) -> tuple[int, str]:
    before = office.desk.document(), len(office.applied)
    with pytest.raises(RefusedError) as caught:
        await office.call(*arguments, **named)
    assert (office.desk.document(), len(office.applied)) == before
    return caught.value.status, caught.value.code


async def test_status(office: Office) -> None:
    shown = await office.call("get", "/v1/status")
    assert set(shown) == {
        "version",
        "mode",
        "sentence",
        "uptime_s",
        "engines",
        "gpus",
        "gpu_fault",
        "counting",
        "overrides",
        "config",
    }
    assert (shown["mode"], shown["uptime_s"], shown["sentence"]) == (
        "active",
        60,
        "budget 45,600 of 48,000 KV tokens",
    )
    gate = shown["engines"][ENGINE]
    assert (gate["state"], gate["headroom_tokens"], gate["context_tokens"]) == ("up", 33_599, None)
    assert gate["pressure"] == {"preemption": 1.0, "gpu_memory": None}
    assert gate["ranks"][0]["absent"] == {"preemptions_total": "missing"}
    assert "at" not in gate
    assert shown["gpus"][0]["age_s"] == 0.5
    assert shown["gpus"][0]["free_bytes"] is None


async def test_budget_and_config(office: Office) -> None:
    budget = (await office.call("get", "/v1/budget"))["engines"][ENGINE]
    assert (budget["capacity_tokens"], budget["budget_reason"], budget["headroom_tokens"]) == (
        48_000,
        "steady",
        33_599,
    )
    config = (await office.call("get", "/v1/config"))["settings"]
    assert set(config) == set(SPECS)


async def test_set_and_unset(office: Office) -> None:
    change = await office.call("put", "/v1/overrides/margin", BODY)
    assert change == {
        "knob": "margin",
        "old": 0.05,
        "new": 0.12,
        "revision": 1,
        "kept": True,
        "left_s": 1800.0,
    }
    assert office.applied[-1] == DEFAULTS | {Knob.MARGIN: 0.12}
    shown = await office.call("get", "/v1/overrides")
    assert shown["revision"] == 1
    assert shown["active"]["margin"]["left_s"] == 1800
    assert shown["active"]["margin"]["reason"] == BODY["reason"]
    change = await office.call("delete", "/v1/overrides/margin")
    assert (change["old"], change["new"], change["left_s"]) == (0.12, 0.05, None)
    assert office.applied[-1][Knob.MARGIN] == 0.05


async def test_the_life_has_a_default(office: Office) -> None:
    change = await office.call("put", "/v1/overrides/policy", {"value": "static", "reason": "r"})
    assert (change["new"], change["left_s"]) == ("static", 1800)


async def test_the_audit_says_who_and_what(office: Office) -> None:
    await office.call("put", "/v1/overrides/margin", BODY)
    await refused(office, "put", "/v1/overrides/margin", BODY | {"value": 0.9})
    await office.call("delete", "/v1/overrides/margin")
    await office.call("post", "/v1/drain")
    lines = audit(office)
    for line in lines:
        assert line.pop("time").endswith("+00:00")
        assert [line.pop(key) for key in ("uid", "gid", "pid", "user")] == [
            os.getuid(),
            os.getgid(),
            os.getpid(),
            pwd.getpwuid(os.getuid()).pw_name,
        ]
    assert lines == [
        {
            "verb": "set",
            "knob": "margin",
            "old": 0.05,
            "new": 0.12,
            "ttl": 1800,
            "reason": BODY["reason"],
            "revision": 1,
            "result": "ok",
        },
        {
            "verb": "set",
            "knob": "margin",
            "old": 0.12,
            "new": 0.9,
            "ttl": 1800,
            "reason": BODY["reason"],
            "revision": 1,
            "result": "out_of_bounds",
        },
        {"verb": "unset", "knob": "margin", "old": 0.12, "new": 0.05, "revision": 2, "result": "ok"},
        {"verb": "drain", "revision": 2, "result": "ok"},
    ]


@pytest.mark.parametrize(
    ("route", "body", "answer"),
    [
        ("margin", BODY | {"value": 0.9}, (422, "out_of_bounds")),
        ("margin", BODY | {"value": "90%"}, (422, "out_of_bounds")),
        ("margin", BODY | {"value": "lots"}, (422, "bad_value")),
        ("margin", BODY | {"value": "0,12"}, (422, "bad_value")),
        ("margin", BODY | {"value": None}, (422, "bad_value")),
        ("margin", BODY | {"value": [[1]]}, (422, "bad_value")),
        ("margin", BODY | {"ttl_s": 90_000}, (422, "bad_ttl")),
        ("margin", BODY | {"ttl_s": "1h"}, (422, "bad_ttl")),
        ("margin", {"value": 0.1}, (422, "no_reason")),
        ("policy", BODY | {"value": "fast"}, (422, "bad_value")),
        ("bugdet", BODY, (404, "unknown_knob")),
        ("margin", BODY | {"tll": 5}, (422, "bad_request")),
        ("margin", {"reason": "r"}, (422, "bad_request")),
        ("margin", [], (422, "bad_request")),
    ],
)
async def test_refusals(office: Office, route: str, body: object, answer: tuple[int, str]) -> None:
    assert await refused(office, "put", f"/v1/overrides/{route}", body) == answer


async def test_what_is_not_set_cannot_be_unset(office: Office) -> None:
    assert await refused(office, "delete", "/v1/overrides/margin") == (404, "not_set")
    assert await refused(office, "delete", "/v1/overrides/x") == (404, "unknown_knob")


async def test_a_stale_revision(office: Office) -> None:
    await office.call("put", "/v1/overrides/margin", BODY, if_match=0)
    assert await refused(office, "put", "/v1/overrides/margin", BODY, if_match=0) == (412, "stale_revision")
    assert await refused(office, "delete", "/v1/overrides/margin", if_match=0) == (412, "stale_revision")
    await office.call("delete", "/v1/overrides/margin", if_match=1)


@pytest.mark.parametrize("tag", ['"0"', "0", "*"])
async def test_forms_of_if_match(office: Office, tag: str) -> None:
    answer = await raw(
        office, request("PUT", "/v1/overrides/margin", json.dumps(BODY).encode(), f"If-Match: {tag}")
    )
    assert answer[0] == 200
    assert answer[1]["etag"] == '"1"'


@pytest.mark.parametrize(
    ("method", "route", "body", "headers", "status"),
    [
        ("PUT", "/v1/overrides/margin", b"{", (), 400),
        ("PUT", "/v1/overrides/margin", b'{"value": NaN, "reason": "r"}', (), 400),
        ("PUT", "/v1/overrides/margin", b"\xff\xfe{}", (), 400),
        ("PUT", "/v1/overrides/margin", b"[" * 60_000, (), 400),
        ("PUT", "/v1/overrides/margin", b"", (), 400),
        ("PUT", "/v1/overrides/margin", b'"' + b"x" * 100_000 + b'"', (), 413),
        ("PUT", "/v1/overrides/margin", json.dumps(BODY).encode(), ("If-Match: W/x",), 400),
        ("PUT", "/v1/overrides/margin", b'{"value": 1e999, "reason": "r"}', (), 422),
        ("PUT", "/v1/overrides/margin", b'{"value": 1' + b"0" * 400 + b', "reason": "r"}', (), 422),
        ("PUT", "/v1/overrides/margin", b'{"value": 1' + b"0" * 9000 + b', "reason": "r"}', (), 400),
        ("PUT", "/v1/overrides/" + "x" * 3000, b'{"value": 1, "reason": "r"}', (), 404),
        ("POST", "/v1/overrides/margin", b"{}", (), 405),
        ("GET", "/v1/drain", b"", (), 405),
        ("PUT", "/v1/status", b"", (), 405),
        ("GET", "/v2/status", b"", (), 404),
    ],
)
async def test_bad_requests_change_nothing(
    office: Office, *, method: str, route: str, body: bytes, headers: tuple[str, ...], status: int
) -> None:
    answer = await raw(office, request(method, route, body, *headers))
    assert answer[0] == status
    assert set(json.loads(answer[2])["error"]) == {"code", "message"}
    assert office.desk.revision == 0
    assert not office.stand.draining


async def test_nothing_that_is_http(office: Office) -> None:
    assert (await raw(office, b"\x16\x03\x01\x00garbage\r\n\r\n"))[0] == 400
    assert (await office.call("get", "/v1/status"))["mode"] == "active"


async def test_drain_and_undrain(office: Office) -> None:
    assert await office.call("post", "/v1/drain") == {"mode": "draining", "kept": True}
    assert (await office.call("get", "/v1/status"))["mode"] == "draining"
    assert await office.call("post", "/v1/undrain") == {"mode": "active", "kept": True}


async def test_changes_at_once_are_one_after_the_other(office: Office) -> None:
    """Of twenty that name the same revision exactly one wins, and memory, disk and daemon agree."""
    bodies = [BODY | {"value": n / 100} for n in range(20)]
    calls = [office.call("put", "/v1/overrides/margin", body, if_match=0) for body in bodies]
    done = await asyncio.gather(*calls, return_exceptions=True)
    won = [each for each in done if isinstance(each, dict)]
    assert len(won) == 1
    assert office.applied[-1][Knob.MARGIN] == won[0]["new"]
    (kept,) = json.loads((office.state_dir / "overrides.json").read_text())["overrides"]
    assert kept["value"] == won[0]["new"]


def test_the_socket_lets_the_group_in_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with OwnedSocket(tmp_path / "s") as owned:
            assert stat.S_IMODE(owned.path.stat().st_mode) == 0o660
            probe = socket.socket(socket.AF_UNIX)
            probe.connect(str(owned.path))
            probe.close()
    finally:
        os.umask(before)
    assert not (tmp_path / "s").exists()


AS_NOBODY = """
import os, pathlib, sys
from kvctl.admin.client import AdminClient
os.setgroups([]); os.setgid(65534); os.setuid(65534)
AdminClient(pathlib.Path(sys.argv[1])).put("/v1/overrides/margin", {"value": 0.1, "reason": "mine"})
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
async def test_the_actor_is_whom_the_kernel_says(new_desk: NewDesk, tmp_path: Path) -> None:
    desk = new_desk([])
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.to_thread(Path(folder).chmod, 0o755)
        path = Path(folder) / "kvctl.sock"
        server = AdminServer(AdminApi(Stand(), desk, JOURNAL, Pace()), OwnedSocket(path))
        await server.start()

        def as_nobody() -> "subprocess.CompletedProcess[str]":
            arguments = [sys.executable, "-c", AS_NOBODY, str(path)]
            return subprocess.run(arguments, capture_output=True, text=True, check=False)

        denied = await asyncio.to_thread(as_nobody)
        assert "DeniedError" in denied.stderr
        assert "its group may use it" in denied.stderr
        await asyncio.to_thread(path.chmod, 0o666)
        done = await asyncio.to_thread(as_nobody)
        assert (done.returncode, done.stderr) == (0, "")
        await server.close()
        await desk.close()
    (line,) = [json.loads(each) for each in (tmp_path / "state" / "audit.jsonl").read_text().splitlines()]
    assert (line["uid"], line["gid"]) == (65534, 65534)
    assert line["user"] in ("nobody", "65534")


def test_on_the_loop_that_the_daemon_uses(new_desk: NewDesk, tmp_path: Path) -> None:
    applied: Applied = []

    async def serve() -> None:
        desk = new_desk(applied)
        desk.open()
        server = AdminServer(AdminApi(Stand(), desk, JOURNAL, Pace()), OwnedSocket(tmp_path / "s"))
        await server.start()
        await asyncio.to_thread(AdminClient(tmp_path / "s", PATIENCE_S).put, "/v1/overrides/margin", BODY)
        await server.close()
        await desk.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    assert applied[-1][Knob.MARGIN] == 0.12
    assert json.loads((tmp_path / "state" / "audit.jsonl").read_text())["pid"] == os.getpid()


async def test_a_caller_who_breaks_off_is_no_defect(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    """A killed ``kvctl set`` leaves no traceback and changes nothing."""
    for _ in range(3):
        _, writer = await asyncio.open_unix_connection(office.socket)
        whole = request("PUT", "/v1/overrides/margin", json.dumps(BODY).encode())
        writer.write(whole[:-5])
        await asyncio.sleep(0.05)
        writer.close()
    await asyncio.sleep(0.05)
    assert (await office.call("get", "/v1/overrides"))["revision"] == 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
