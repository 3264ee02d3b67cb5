"""A loaded kvctl in processes of its own: simulated engine, simulated card, callers past capacity."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from kvctl.admin.client import AdminClient
from kvctl.gpu.simulated import SimulatedCard
from tests.ports import free_port

CALLERS = 12
GIB = 1 << 30
_ENGINE = "-m kvctl.sim --port {engine_port} --with-stdin --blocks 300 --max-model-len 4000"
_SETTINGS = """
engine_url = "http://127.0.0.1:{engine_port}"
listen = "127.0.0.1:{port}"
admin_listen = "127.0.0.1:{admin_port}"
admin_socket = "{folder}/admin.sock"
state_dir = "{folder}"
tokenizer = "bound"
gpu_interval = "200ms"
drain_timeout = "0s"
"""


class Stage:
    """Engine, daemon, card and callers, each of which can be taken away and given back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.card = SimulatedCard(24 * GIB, 20 * GIB, path=folder / "card.json")
        self.admin = AdminClient(folder / "admin.sock", 60.0)
        self.config = folder / "kvctl.toml"
        self._ports = {"port": free_port(), "admin_port": free_port(), "engine_port": free_port()}
        self._open: dict[str, contextlib.ExitStack] = {}
        self.config.write_text(_SETTINGS.format(folder=folder, **self._ports))

    @property
    def metrics_url(self) -> str:
        """The daemon's own page."""
        return f"http://127.0.0.1:{self._ports['admin_port']}/metrics"

    def start(self, name: str) -> None:
        """``engine``, ``kvctl`` or ``callers`` begins; the first two are ready when this returns."""
        made = {"engine": self._engine, "kvctl": self._kvctl, "callers": self._callers}[name]
        stack = contextlib.ExitStack()
        stack.enter_context(made())
        self._open[name] = stack

    def stop(self, name: str) -> None:
        """It ends."""
        self._open.pop(name).close()

    def close(self) -> None:
        """Everything ends, the last first."""
        for name in reversed(list(self._open)):
            self.stop(name)

    def _engine(self) -> contextlib.AbstractContextManager[str]:
        arguments = _ENGINE.format(**self._ports).split()
        return child(self.folder, "engine", arguments, r"(http://\S+)")

    def _kvctl(self) -> contextlib.AbstractContextManager[str]:
        options = [f"--config={self.config}", f"--card={self.folder / 'card.json'}"]
        return child(self.folder, "kvctl", ["-m", "kvctl.cli.demo_daemon", *options], r"listens on")

    def _callers(self) -> contextlib.AbstractContextManager[None]:
        return callers(f"http://127.0.0.1:{self._ports['port']}/v1/completions")


@contextlib.contextmanager
def open_stage(folder: Path) -> Iterator[Stage]:
    """All of it, running."""
    stage = Stage(folder)
    try:
        for name in ("engine", "kvctl", "callers"):
            stage.start(name)
        yield stage
    finally:
        stage.close()


@contextlib.contextmanager
def loaded_kvctl(folder: Path) -> Iterator[str]:
    """The URL of the metrics page of a kvctl that refuses some of what it is asked."""
    with open_stage(folder) as stage:
        yield stage.metrics_url


@contextlib.contextmanager
def child(folder: Path, name: str, arguments: list[str], told: str) -> Iterator[str]:
    """A Python program that runs until its standard input ends; what it says when it is ready."""
    with (folder / f"{name}.log").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    found = next((match for line in process.stdout if (match := re.search(told, line))), None)
    drain = threading.Thread(target=process.stdout.read, daemon=True)
    drain.start()
    try:
        assert found, (folder / f"{name}.log").read_text()
        yield found[found.lastindex or 0]
    finally:
        process.terminate()
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        drain.join()
        process.stdout.close()


@contextlib.contextmanager
def callers(url: str) -> Iterator[None]:
    """Callers that ask at once again, whatever they are answered."""
    stop = threading.Event()
    threads = [threading.Thread(target=_call, args=(url, stop), daemon=True) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _call(url: str, stop: threading.Event) -> None:
    body = json.dumps({"model": "sim", "prompt": "word " * 150, "max_tokens": 400, "stream": True}).encode()
    while not stop.wait(0.05):
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - loopback
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
            while answer.readline() and not stop.is_set():
                pass
