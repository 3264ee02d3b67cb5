"""A client that goes away frees its lease, and the engine's KV with it."""

import socket
import struct

import pytest

from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine, forced_length
from tests.live.model import NAME
from tests.live.wire import open_request

LONG = 8000
WITHIN = 3.0


def running(engine: Engine) -> float:
    return engine.metrics()["vllm:num_requests_running"]


def kill(connection: socket.socket, *, reset: bool) -> None:
    """As the kernel does for a process that dies: FIN, or RST when bytes lay unread."""
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_client_frees_everything(engine: Engine, daemon: Daemon, stream: bool, reset: bool) -> None:
    eventually(lambda: running(engine) == 0, 10, "the engine is idle")
    body = {"model": NAME, "prompt": "hi", "max_tokens": LONG, "stream": stream} | forced_length(LONG)
    with open_request(daemon.base_url, "/v1/completions", body) as connection:
        eventually(lambda: running(engine) == 1 and daemon.metric("leases") == 1, 10, "the request runs")
        before = engine.metrics()["vllm:generation_tokens_total"]
        kill(connection, reset=reset)
    daemon.wait_empty(WITHIN)
    eventually(lambda: running(engine) == 0, WITHIN, "the engine stopped generating")
    assert engine.metrics()["vllm:generation_tokens_total"] - before < LONG * 0.9, "cut, not run to its end"


def test_many_clients_killed_at_once(engine: Engine, daemon: Daemon) -> None:
    body = {"model": NAME, "prompt": "hi", "max_tokens": 600, "stream": True} | forced_length(600)
    engine.pause()  # none is over before the last has come
    try:
        connections = [open_request(daemon.base_url, "/v1/completions", body) for _ in range(12)]
        eventually(lambda: daemon.metric("leases") == 12, 10, "all hold leases")
    finally:
        engine.resume()
    eventually(lambda: running(engine) > 0, WITHIN, "they run")
    for connection in connections:
        connection.close()
    daemon.wait_empty(WITHIN)
    eventually(lambda: running(engine) == 0, WITHIN, "the engine stopped generating")
