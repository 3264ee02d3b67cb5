"""A kvctl that was forked off is one that was executed, but for the time that it takes."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

KVCTL = [sys.executable, "-c", warm.MAIN]
ENGINE = [sys.executable, "-m", "kvctl.sim", "--port", "0"]


def executable(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def outcome(arguments: list[str], **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*KVCTL, *arguments], env=os.environ | env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments", [["version"], ["statsu"], ["check-config"], ["status", "--socket", "/nowhere"], ["--help"]]
)
def test_it_says_and_returns_the_same(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    setting = {"KVCTL_LISTEN": "nowhere at all"}
    forked = outcome(arguments, **setting)
    assert outcome(arguments, PYTHONUTF8="1", **setting) == forked  # executed


async def test_it_is_a_child_with_the_streams_and_folder_it_was_given(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(*ENGINE, stdout=subprocess.PIPE, cwd=tmp_path)
    assert process.stdout is not None
    assert b"http://" in await process.stdout.readline()
    assert b"tests.warm" in executable(process.pid)
    assert Path(f"/proc/{process.pid}/cwd").resolve() == tmp_path  # noqa: ASYNC240 - of the kernel
    assert Path(f"/proc/{process.pid}/stat").read_text().split()[3] == str(os.getpid())  # noqa: ASYNC240
    process.send_signal(signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL


def test_it_holds_no_descriptor_of_another() -> None:
    counts = []
    for env in ({}, {"LD_LIBRARY_PATH": "/nowhere"}):
        with subprocess.Popen(ENGINE, stdout=subprocess.PIPE, env=os.environ | env) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            counts.append(len(os.listdir(f"/proc/{process.pid}/fd")))  # noqa: PTH208 - a count of names
            process.terminate()
            assert process.wait() == 0
    assert counts[0] == counts[1]


@pytest.mark.parametrize("odd", [{"start_new_session": True}, {"preexec_fn": os.getpid}, {"pass_fds": (2,)}])
def test_what_it_cannot_do_is_executed(odd: dict[str, object]) -> None:
    with subprocess.Popen(ENGINE, stdout=subprocess.PIPE, **odd) as process:  # type: ignore[call-overload]
        assert process.stdout.readline()
        assert b"kvctl.sim" in executable(process.pid)
        process.kill()
