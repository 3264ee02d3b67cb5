"""A restart loses no connection attempt: systemd's end of the descriptor store is played by the test."""

import array
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from kvctl.proxy.listening import Listeners
from kvctl.systemd_notify import Notifier
from tests.ports import free_port

MAIN = "from kvctl.cli.main import main; main()"
PATIENCE_S = 180.0
CALLERS = 8
ASK = b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
# the kept descriptor is passed on as systemd does it: as number 3, meant for this process
PASS_ON = """
import os, sys
if sys.argv[1] not in ("", "3"):
    os.dup2(int(sys.argv[1]), 3)
    os.close(int(sys.argv[1]))
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], "serve"])
"""


class Manager:
    """The service manager: hears the notifications, keeps the descriptors, starts the process again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.fields: list[str] = []
        self.kept: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self._socket.settimeout(0.1)

    def start(self, listen: str = "") -> "subprocess.Popen[bytes]":
        """A daemon that takes what is kept; ready when this returns."""
        number = str(self.kept[0]) if self.kept else ""
        env = {key: text for key, text in os.environ.items() if not key.startswith("KVCTL_")} | {
            "NOTIFY_SOCKET": str(self.folder / "notify"),
            "LISTEN_FDS": str(len(self.kept)),
            "LISTEN_FDNAMES": "listen",
            "KVCTL_ENGINE_URL": "http://127.0.0.1:1",
            "KVCTL_LISTEN": listen or f"127.0.0.1:{self.port}",
            "KVCTL_ADMIN_LISTEN": f"127.0.0.1:{free_port()}",
            "KVCTL_ADMIN_SOCKET": str(self.folder / "admin.sock"),
            "KVCTL_STATE_DIR": str(self.folder),
            "KVCTL_TOKENIZER": "bound",
            "KVCTL_GPU_INTERVAL": "60s",
        }
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", PASS_ON, number, MAIN],
                env=env,
                stdout=log,
                stderr=log,
                pass_fds=tuple(self.kept),
            )
        try:
            self._hear_until_ready(process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def _hear_until_ready(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                fields = self._hear()
                self.fields += fields
                if "READY=1" in fields:
                    return
        raise AssertionError((self.folder / "log").read_text())

    def _hear(self) -> list[str]:
        data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(4 * array.array("i").itemsize))
        fields = data.decode().split("\n")
        if "FDSTOREREMOVE=1" in fields:
            self.forget()
        for level, kind, content in ancillary:
            assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            assert "FDNAME=listen" in fields
            self.kept += array.array("i", content).tolist()
        return fields

    def forget(self) -> None:
        for descriptor in self.kept:
            os.close(descriptor)
        self.kept = []

    def close(self) -> None:
        self.forget()
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path)
    yield made
    made.close()


@contextlib.contextmanager
def stopped_at_the_end(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Callers:
    """Callers that connect, ask, read to the end, and again; how each attempt went."""

    def __init__(self, port: int) -> None:
        self.went: Counter[str] = Counter()
        self._port = port
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        while not self._stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_S) as wire:
                    if wire.getsockname() == wire.getpeername():
                        raise ConnectionRefusedError  # the kernel joined it with itself: nobody listens
                    wire.sendall(ASK)
                    answer = b"".join(iter(lambda: wire.recv(4096), b""))
                self.went["answered" if answer.startswith(b"HTTP/1.1 ") else "closed without a word"] += 1
            except OSError as error:
                self.went[type(error).__name__] += 1
                time.sleep(0.01)

    def wait_for_more(self, answers: int) -> None:
        enough, deadline = self.went["answered"] + answers, time.monotonic() + PATIENCE_S
        while self.went["answered"] < enough and time.monotonic() < deadline:
            time.sleep(0.01)


def test_a_restart_loses_no_connection_attempt(manager: Manager) -> None:
    first = manager.start()
    with stopped_at_the_end(first), Callers(manager.port) as callers:
        callers.wait_for_more(50)
        assert len(manager.kept) == 1
        first.terminate()
        assert first.wait(PATIENCE_S) == 0
        time.sleep(0.3)  # nobody serves: who connects now waits
        second = manager.start()
        with stopped_at_the_end(second):
            callers.wait_for_more(50)
            assert "STOPPING=1" in manager.fields
            callers.__exit__()
            assert set(callers.went) == {"answered"}, callers.went


def test_without_the_store_attempts_are_lost(manager: Manager) -> None:
    """The test above would notice."""
    first = manager.start()
    with stopped_at_the_end(first), Callers(manager.port) as callers:
        callers.wait_for_more(50)
        manager.forget()
        first.terminate()
        assert first.wait(PATIENCE_S) == 0
        time.sleep(0.3)
        second = manager.start()
        with stopped_at_the_end(second):
            callers.wait_for_more(10)
            callers.__exit__()  # the manager keeps the second's socket beyond its end
            assert callers.went["ConnectionRefusedError"] > 0


def test_a_socket_of_another_address_is_given_up(manager: Manager) -> None:
    first = manager.start()
    with stopped_at_the_end(first):
        first.terminate()
        first.wait(PATIENCE_S)
    other = free_port()
    second = manager.start(f"127.0.0.1:{other}")
    with stopped_at_the_end(second):
        socket.create_connection(("127.0.0.1", other), timeout=PATIENCE_S).close()
        assert len(manager.kept) == 1
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", manager.port), timeout=PATIENCE_S)


def listening_at(address: tuple[str, int]) -> socket.socket:
    made = socket.socket()
    made.bind(address)
    made.listen()
    return made


async def test_every_address_is_taken_over_or_opened() -> None:
    kept, stranger = listening_at(("127.0.0.1", 0)), listening_at(("127.0.0.2", 0))
    port = kept.getsockname()[1]
    listeners = Listeners()
    await listeners.open(f"127.0.0.1:{port}", _never, inherited=(kept, stranger))
    assert listeners.sockets == (kept,)
    assert stranger.fileno() == -1
    listeners.close()
    await listeners.wait_closed()


async def test_what_was_taken_over_is_closed_when_the_rest_cannot_be_had(tmp_path: Path) -> None:
    kept = listening_at(("127.0.0.1", 0))
    with pytest.raises(OSError, match="No such file"):
        await Listeners().open(f"unix:{tmp_path}/none/sock", _never, inherited=(kept,))
    assert kept.fileno() == -1


async def test_a_unix_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listeners = Listeners()
    await listeners.open(f"unix:{path}", _never)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listeners.close()
    await listeners.wait_closed()


def _never() -> asyncio.Protocol:
    return asyncio.Protocol()


@pytest.mark.parametrize(
    "env", [{"LISTEN_PID": "1", "LISTEN_FDS": "1"}, {"LISTEN_FDS": "1"}, {"LISTEN_PID": str(os.getpid())}]
)
def test_nothing_is_taken_that_was_passed_to_another(env: dict[str, str]) -> None:
    assert Notifier(env).inherited == ()
    assert env == {}
