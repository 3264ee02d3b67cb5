"""The client against whatever may sit on a socket: kvctl, another HTTP server, and none."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvctl.admin.client import AdminClient, ClientError, TimedOutError, UnreachableError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: x\r\n"


@contextmanager
def saying(path: Path, *parts: bytes, hold: bool = False) -> Iterator[AdminClient]:
    """A server that reads a request, says the parts and goes (or holds the connection)."""
    over = threading.Event()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(65536)
            for part in parts:
                peer.sendall(part)
            if hold:
                over.wait(20)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield AdminClient(path, timeout=60 if not hold else 0.3)
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    "parts",
    [
        (b'Content-Length: 8\r\n\r\n{"a": 1}',),
        (b'Content-Length: 8\r\n\r\n{"a"', b": 1}"),
        (b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n5;x=y\r\n": 1}\r\n0\r\n\r\n',),
        (b"transfer-encoding: Chunked\r\n\r\n", b"8\r", b'\n{"a": 1', b"}\r\n0\r\n\r\n"),
        (b'\r\n{"a": 1}',),
    ],
)
def test_every_form_of_a_body(tmp_path: Path, parts: tuple[bytes, ...]) -> None:
    with saying(tmp_path / "s", HEAD, *parts) as client:
        assert client.get("/v1/status") == {"a": 1}


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n", b"\x00" * 100, b"a" * 200_000,
        HEAD + b"Content-Length: 999\r\n\r\n{}", HEAD + b"Content-Length: -1\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", HEAD + b"X: y\r\n" * 500 + b"\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\n{}", HEAD + b"\r\nnot json", HEAD + b"\r\n[1]", HEAD,
    ],
)  # fmt: skip
def test_what_is_no_kvctl(tmp_path: Path, answer: bytes) -> None:
    with saying(tmp_path / "s", answer) as client, pytest.raises(ClientError):
        client.get("/v1/status")


def test_lines_come_as_they_are_said_and_over_chunks(tmp_path: Path) -> None:
    said = b'Transfer-Encoding: chunked\r\n\r\n8\r\n{"a":1}\n\r\n5\r\n{"b":\r\n3\r\n2}\n\r\n0\r\n\r\n'
    with saying(tmp_path / "s", HEAD, said) as client:
        assert list(client.lines("/v1/events")) == [{"a": 1}, {"b": 2}]


def test_silence_has_an_end(tmp_path: Path) -> None:
    with (
        saying(tmp_path / "s", HEAD, hold=True) as client,
        pytest.raises(TimedOutError, match="no answer within"),
    ):
        client.get("/v1/status")


def test_nobody_is_there(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="is the daemon running"):
        AdminClient(tmp_path / "none").get("/v1/status")
