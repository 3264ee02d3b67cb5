"""Whose process listens on a port: on this machine, with real sockets and real children."""

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.gpu.owners import owners_of


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_who_listens(listening: int) -> None:
    for host in ("127.0.0.1", "localhost"):
        found = owners_of(f"http://{host}:{listening}/v1")
        assert os.getpid() in found.pids
        assert found.why == ""


def children(port: int, pid: int) -> frozenset[int]:
    """Of those found: the child and, once it is there, the grandchild."""
    pids = owners_of(f"http://127.0.0.1:{port}").pids
    return pids - {os.getpid()} if pid in pids else frozenset()


async def test_descendants_count(listening: int) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            while len(children(listening, process.pid)) < 2:  # noqa: ASYNC110 - processes have no event
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        process._transport.close()  # type: ignore[attr-defined]
        await process.wait()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = owners_of(f"http://127.0.0.1:{port}")
    assert not found.pids
    assert found.why == f"no process that kvctl may see listens on port {port}"


@pytest.mark.parametrize(
    "url", ["http://192.0.2.7:8000", "http://engine.example:8000", "http://[2001:db8::1]"]
)
def test_an_engine_elsewhere(url: str) -> None:
    assert "not known to be this machine's" in owners_of(url).why


def proc(folder: Path) -> Path:
    """A launcher (2) with the server (3) and a worker (4) side by side in one group; 9 is kvctl."""
    (folder / "net").mkdir()
    head = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    )
    row = "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 555 1\n"
    (folder / "net" / "tcp").write_text(head + row)
    for pid, parent, group in ((1, 0, "/"), (2, 1, "/tgi"), (3, 2, "/tgi"), (4, 2, "/tgi"), (9, 1, "/kvctl")):
        process = folder / str(pid)
        (process / "fd").mkdir(parents=True)
        (process / "stat").write_text(f"{pid} (a) b) S {parent} 1 1")
        (process / "cgroup").write_text(f"0::{group}\n")
    (folder / "3" / "fd" / "5").symlink_to("socket:[555]")
    (folder / "self").symlink_to("9")
    return folder


def test_a_launchers_workers_are_found_by_their_group(tmp_path: Path) -> None:
    found = owners_of("http://127.0.0.1:8000", proc(tmp_path))
    assert found.pids == {3}
    assert found.group == {2, 3, 4}


@pytest.mark.parametrize("group", ["/", "/kvctl", ""])
def test_a_group_that_says_nothing(tmp_path: Path, group: str) -> None:
    folder = proc(tmp_path)
    (folder / "3" / "cgroup").write_text(f"0::{group}\n")
    assert owners_of("http://127.0.0.1:8000", folder).group == frozenset()
