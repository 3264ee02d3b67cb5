"""The commands where what is around them is not as usual: files, addresses, outputs, screens, modes."""

import asyncio
import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console, Group

from kvctl.admin.client import AdminClient
from kvctl.cli.top import History, _screen, frame
from tests.cli.conftest import MAIN, Daemon, Kvctl
from tests.core.test_decisions import REFUSED, record


@pytest.mark.parametrize("text", ["admin_socket = /run/x\n", None])
async def test_nobody_answers_where_the_settings_file_is_of_no_use(
    kvctl: Kvctl, tmp_path: Path, text: str | None
) -> None:
    """It may name another socket than the one that was tried."""
    config = tmp_path / "kvctl.toml"
    if text is not None:
        config.write_text(text)
    done = await kvctl(
        "status", KVCTL_CONFIG=str(config), KVCTL_ADMIN_SOCKET="", XDG_RUNTIME_DIR=str(tmp_path)
    )
    assert done.status == 3
    assert f"kvctl: {config}" in done.err
    assert "so an admin_socket that it may set is not known here; name it with --socket" in done.err
    done = await kvctl("status", KVCTL_CONFIG=str(config))  # which names the socket by itself
    assert (done.status, str(config) in done.err) == (3, False)


async def test_an_address_that_cannot_be_had_is_told_with_what_to_do(kvctl: Kvctl, tmp_path: Path) -> None:
    settings = {
        "KVCTL_ENGINE_URL": "http://127.0.0.1:1",
        "KVCTL_STATE_DIR": str(tmp_path),
        "KVCTL_GPUS": "none",
        "KVCTL_ADMIN_LISTEN": "127.0.0.1:0",
    }
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = await kvctl("serve", "--listen", address, **settings)
    said = f"kvctl: listen {address}: Address already in use; stop what listens there (ss -ltnp names it)"
    assert (done.status, said in done.err) == (1, True)
    done = await kvctl("serve", "--listen", "203.0.113.1:8080", **settings)
    assert (done.status, "; this machine has no such address" in done.err) == (1, True)


@pytest.mark.parametrize("verb", ["version", "check-config", "completion bash"])
def test_an_output_that_takes_nothing_is_one_sentence(verb: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *verb.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "KVCTL_ENGINE_URL": "http://127.0.0.1:1", "KVCTL_TOKENIZER": "bound"},
        )
    written = "kvctl: the answer could not be written to where it was sent: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, written)


async def test_what_a_terminals_letters_cannot_show_is_spelt_out(daemon: Daemon, kvctl: Kvctl) -> None:
    await kvctl("set", "margin", "12%", "--reason", "\u65e5\u672c")
    for verb, letters in (("status", "latin-1"), ("overrides", "latin-1"), ("top --frames 1", "ascii")):
        done = await kvctl(*verb.split(), PYTHONIOENCODING=letters, PYTHONUTF8="0")
        assert (done.status, done.err, r"\u65e5\u672c" in done.out) == (0, "", True)
    assert daemon.desk.active()


@pytest.mark.parametrize(
    ("mode", "bypassed", "resumed"),
    [
        (
            "bypass",
            "everything is let in, and counted; kvctl resume ends it",
            "the bypass is over, and nothing is enforced all the same: the settings say enforce = 0",
        ),
        (
            "draining",
            "the bypass holds, and so does the drain: nothing is let in until kvctl undrain",
            "the bypass is over; nothing is let in until kvctl undrain",
        ),
    ],
)
async def test_what_follows_a_bypass_and_its_end(
    daemon: Daemon, kvctl: Kvctl, mode: str, bypassed: str, resumed: str
) -> None:
    """By the mode that the daemon is in then, whatever was asked for."""
    daemon.stand.bypass, daemon.stand.draining = mode == "bypass", mode == "draining"
    done = await kvctl("bypass", "--for", "15m", "--reason", "r")
    assert (done.status, done.out, done.err) == (0, f"{mode} for 15 min: {bypassed}\n", "")
    done = await kvctl("resume")
    assert (done.status, done.out, done.err) == (0, f"{mode}: {resumed}\n", "")


@pytest.mark.parametrize("width", [40, 50, 60, 80])
async def test_top_on_a_narrow_screen(daemon: Daemon, width: int) -> None:
    """Fewer columns, and those that are shown can be read."""
    daemon.journal.ring.add(record(1, REFUSED, "a-caller-with-a-long-id"))
    client, past = AdminClient(daemon.socket), History()
    document = await asyncio.to_thread(client.get, "/v1/status")
    refused = (await asyncio.to_thread(client.get, "/v1/decisions?refused=1"))["decisions"]
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as shown:
        console.print(frame(document, refused, past, (width, 10)))
    lines = shown.get().splitlines()
    assert lines[1].split()[:4] == ["engine", "state", "budget", "forecast"]
    assert lines[2].split()[1:4] == ["up", "45,600", "12,001"]
    assert "kv_budget" in lines[-1]
    assert max(map(len, lines)) <= width


def test_top_on_a_terminal_that_cannot_be_drawn_over() -> None:
    told = io.StringIO()
    with _screen(Console(file=told, force_terminal=True, _environ={"TERM": "dumb"})) as draw:
        draw(Group("one"))
        draw(Group("two"))
    assert told.getvalue() == "one\ntwo\n"
