"""No engine, a killed engine, and the engine that comes back with another pool."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.conftest import StartDaemon
from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine, forced_length
from tests.live.model import NAME
from tests.live.wire import Answer, open_request, post
from tests.ports import free_port

BLOCK = 32


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine of this module's own, smaller than the shared one."""
    with Engine(num_gpu_blocks=600, log=tmp_path_factory.mktemp("engine") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def guarding(mortal: Engine, start_daemon: StartDaemon) -> Daemon:
    daemon = start_daemon(mortal)
    daemon.wait_ready()
    return daemon


def ask(daemon: Daemon) -> Answer:
    body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    return post(daemon.base_url + "/v1/chat/completions", body | forced_length(2))


def assert_unavailable(answer: Answer) -> None:
    assert answer.status == 503, answer.body
    assert int(answer.headers["retry-after"]) >= 1
    assert float(answer.headers["retry-after-ms"]) > 0
    assert answer.error["message"]


def test_no_engine_at_all(start_daemon: StartDaemon, tmp_path: Path) -> None:
    nobody = Engine(port=free_port(), log=tmp_path / "never")
    daemon = start_daemon(nobody)
    assert daemon.get("/healthz")[0] == 200
    status, text = daemon.get("/readyz")
    assert status == 503
    assert "engine" in text
    assert_unavailable(ask(daemon))
    assert daemon.metric("telemetry_up", source="engine_metrics") == 0


def test_no_gpu_is_a_state(guarding: Daemon) -> None:
    assert guarding.metric("telemetry_up", source="nvml") == 0
    assert ask(guarding).status == 200

    def lines() -> int:
        return sum("nvml" in line.lower() for line in guarding.log_tail(1_000_000).splitlines())

    eventually(lambda: lines() > 0, 10, "the log tells that there are no readings")
    assert lines() == 1


def test_killed_engine(mortal: Engine, guarding: Daemon) -> None:
    assert guarding.metric("capacity_tokens") == (600 - 1) * BLOCK
    body = {"model": NAME, "prompt": "hi", "max_tokens": 4000, "stream": True} | forced_length(4000)
    with open_request(guarding.base_url, "/v1/completions", body) as stream:
        assert b"data: " in stream.recv(65536) + stream.recv(65536)
        mortal.kill()
        assert b"[DONE]" not in drained(stream)
    guarding.wait_empty()
    eventually(lambda: guarding.get("/readyz")[0] == 503, 3, "not ready")
    assert_unavailable(ask(guarding))
    assert guarding.get("/healthz")[0] == 200


def drained(stream: socket.socket) -> bytes:
    """What is left of a stream that is reset."""
    parts = []
    try:
        while part := stream.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        return b"".join(parts)
    raise AssertionError("a broken stream ended as a whole one would")


def test_engine_back_with_another_pool(mortal: Engine, guarding: Daemon) -> None:
    mortal.restart(num_gpu_blocks=400)
    mortal.wait_ready()
    eventually(lambda: ask(guarding).status == 200, 5, "serving again")
    eventually(lambda: guarding.metric("capacity_tokens") == (400 - 1) * BLOCK, 2, "the new capacity")
    eventually(lambda: guarding.get("/readyz")[0] == 200, 2, "ready again")
