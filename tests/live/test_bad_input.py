"""Bad input has a clear answer and leaves no trace in the ledger."""

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.live.daemon import Daemon
from tests.live.engine import Engine
from tests.live.model import NAME
from tests.live.wire import Answer, post

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def ledger_stays_empty(daemon: Daemon) -> Iterator[None]:
    yield
    daemon.wait_empty(2)


def both(engine: Engine, daemon: Daemon, path: str, body: object) -> tuple[Answer, Answer]:
    return post(engine.base_url + path, body), post(daemon.base_url + path, body)


@pytest.mark.parametrize("limit", ["7", 7, " 7 ", True, None, 7.0])
def test_odd_limits_that_the_engine_takes(engine: Engine, daemon: Daemon, limit: object) -> None:
    body = {"model": NAME, "prompt": "hi", "max_tokens": limit, "ignore_eos": True}
    direct, through = both(engine, daemon, TEXT, body)
    assert (direct.status, through.status) == (200, 200)
    assert through.json["usage"] == direct.json["usage"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("limit", [7.5, -1, "x", "7.5", [7], {}, "", "null"])
def test_limits_that_the_engine_refuses(engine: Engine, daemon: Daemon, path: str, limit: object) -> None:
    body = {"model": NAME, "max_tokens": limit} | ({"messages": HI} if path == CHAT else {"prompt": "hi"})
    direct, through = both(engine, daemon, path, body)
    assert (direct.status, through.status) == (400, 400)
    assert through.error.keys() == direct.error.keys()


BROKEN: list[tuple[str, object]] = [
    (TEXT, b'{"model": "tiny", "prompt": "hi"'),
    (TEXT, b""),
    (TEXT, b"[]"),
    (TEXT, b"\xff\xfe{}"),
    (TEXT, {"model": NAME, "prompt": ""}),
    (TEXT, {"model": NAME, "prompt": []}),
    (TEXT, {"model": NAME}),
    (TEXT, {"model": NAME, "prompt": 7}),
    (TEXT, {"model": NAME, "prompt": "hi", "n": 0}),
    (TEXT, {"model": NAME, "prompt": "hi", "stream": "perhaps"}),
    (CHAT, {"model": NAME, "messages": []}),
    (CHAT, {"model": NAME, "messages": "hi"}),
    (CHAT, {"model": NAME}),
    (CHAT, {"model": NAME, "messages": [{"role": "user"}], "max_tokens": -1}),
    (CHAT, b"null"),
]


@pytest.mark.parametrize(("path", "body"), BROKEN)
def test_broken_bodies(engine: Engine, daemon: Daemon, path: str, body: object) -> None:
    direct, through = both(engine, daemon, path, body)
    assert direct.status in {400, 422}
    assert through.status in {direct.status, 400}
    assert through.error["message"]


def test_unknown_model_is_the_engines_answer(engine: Engine, daemon: Daemon) -> None:
    direct, through = both(engine, daemon, TEXT, {"model": "nope", "prompt": "hi", "max_tokens": 1})
    assert (through.status, through.body) == (404, direct.body)


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "/sleep", "/reset_prefix_cache", "/v1/load_lora_adapter", "/pause"]
)
def test_unlisted_routes_are_refused(daemon: Daemon, path: str) -> None:
    answer = post(daemon.base_url + path, {})
    assert answer.status == 404
    assert answer.error["message"]


def test_large_body_is_refused_before_it_is_read(daemon: Daemon) -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nHost: kvctl\r\nContent-Length: {100 << 20}\r\n\r\n"
    assert status_of(daemon, head.encode() + b"x" * 1024) == 413


def test_two_lengths(daemon: Daemon) -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nHost: kvctl\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert status_of(daemon, head.encode() + b"2\r\n{}\r\n0\r\n\r\n") == 400


def test_absurd_headers(daemon: Daemon) -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nHost: kvctl\r\nX-Long: {'x' * 300_000}\r\nContent-Length: 2\r\n\r\n{{}}"
    assert status_of(daemon, head.encode()) in {400, 431}


def status_of(daemon: Daemon, request: bytes) -> int:
    """The status of the answer to raw bytes."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as connection:
        with suppress(ConnectionError):  # refused while we still sent: the answer may lie in the buffer
            connection.sendall(request)
        return int(connection.recv(4096).split(b" ", 2)[1])
