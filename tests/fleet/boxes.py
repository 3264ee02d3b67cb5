"""Boxes: each a real kvctl in front of a simulated engine, with as much of its budget taken as is asked."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from tests.ports import free_port

T = TypeVar("T")

BLOCKS, BLOCK = 2001, 16  # 32,000 KV tokens beside the null block
MODEL = "sim"


def eventually(probe: Callable[[], T], what: str, timeout: float = 180) -> T:
    """The first truthy answer of ``probe``; raises AssertionError with the last one when time runs out."""
    deadline = time.monotonic() + timeout
    while not (answer := _tried(probe)):
        assert time.monotonic() < deadline, f"never: {what} (last: {answer!r})"
        time.sleep(0.05)
    return answer


def _tried(probe: Callable[[], T]) -> T | None:
    try:
        return probe()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


def ask(url: str, body: object = None, timeout: float = 60) -> Answer:
    """GET, or POST where there is a body; error statuses are answers too."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - loopback
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())


@contextlib.contextmanager
def running(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(slots=True)
class Box:
    """``taken``: KV tokens that a long answer claims for as long as the box lives (policy static)."""

    folder: Path
    taken: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    profile: str = "8b-h200"
    port: int = field(default_factory=free_port)
    agent_port: int = field(default_factory=free_port)
    admin_port: int = field(default_factory=free_port)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.folder.mkdir()
        engine = free_port()
        words = f"--port {engine} --blocks {BLOCKS} --block-size {BLOCK} --max-model-len 30000".split()
        sim = [sys.executable, "-m", "kvctl.sim", *words, "--model", MODEL, "--profile", self.profile]
        self._stack.enter_context(running(sim, os.environ, self.folder / "engine.log"))
        eventually(lambda: ask(f"http://127.0.0.1:{engine}/health").status == 200, "the engine is up")
        given = {
            "ENGINE_URL": f"http://127.0.0.1:{engine}",
            "LISTEN": f"127.0.0.1:{self.port}",
            "AGENT_LISTEN": f"127.0.0.1:{self.agent_port}",
            "ADMIN_LISTEN": f"127.0.0.1:{self.admin_port}",
            "ADMIN_SOCKET": str(self.folder / "admin.sock"),
            "STATE_DIR": str(self.folder / "state"),
            "POLICY": "static",
            "MARGIN": "0",
            "GPUS": "none",
            "TTFT_TARGET": "none",
            "ITL_TARGET": "none",
            "TOKENIZER": "bound",
        }
        named = {f"KVCTL_{key}": text for key, text in (given | dict(self.settings)).items()}
        command = [str(Path(sys.executable).with_name("kvctl")), "serve"]
        self._stack.enter_context(running(command, os.environ | named, self.folder / "kvctl.log"))
        eventually(lambda: ask(self.url + "/readyz").status == 200, "kvctl is ready")
        eventually(lambda: self.metric("capacity_known") == 1, "the capacity is known")
        if self.taken:
            self._take(self.taken)

    def _take(self, tokens: int) -> None:
        """A client that reads one long answer: minutes of it, so the lease lasts."""
        body = {
            "model": MODEL,
            "prompt": [7] * 8,
            "max_tokens": tokens - 8,
            "stream": True,
            "ignore_eos": True,
        }
        holder = [sys.executable, "-m", "tests.fleet.holder", self.url, json.dumps(body)]
        self._stack.enter_context(running(holder, os.environ, self.folder / "holder.log"))
        eventually(lambda: self.metric("claimed_tokens") >= tokens, "the long answer is admitted")
        full = f"{self.url}/readyz?headroom=0.999"
        eventually(lambda: ask(full).status == 503, "the next tick has told load balancers")

    def metric(self, name: str) -> float:
        """The sum of the series of ``kvctl_<name>``."""
        page = ask(f"http://127.0.0.1:{self.admin_port}/metrics").body.decode()
        samples = (each for family in text_string_to_metric_families(page) for each in family.samples)
        return sum(each.value for each in samples if each.name == f"kvctl_{name}")

    def command(self, *words: str) -> str:
        """A kvctl command at this box's admin socket."""
        binary = str(Path(sys.executable).with_name("kvctl"))
        where = ["--socket", str(self.folder / "admin.sock")]
        done = subprocess.run(
            [binary, *words, *where], capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout


def binary(name: str) -> str | None:
    """Where a program is; None: not on this machine."""
    return shutil.which(name)


def small(**changed: Any) -> dict[str, Any]:
    """A request of one block."""
    return {"model": MODEL, "prompt": [5] * 8, "max_tokens": 4} | changed
