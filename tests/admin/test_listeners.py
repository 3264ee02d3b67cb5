import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from kvctl.admin.listeners import BusyError, ListenError, OwnedSocket
from kvctl.admin.pace import Pace
from kvctl.admin.server import PublicApi, PublicServer
from kvctl.settings.units import Address

OWNER = """
import pathlib, sys
from kvctl.admin.listeners import OwnedSocket
owned = OwnedSocket(pathlib.Path(sys.argv[1]))
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, None])
def test_a_second_instance_and_a_stale_socket(tmp_path: Path, ending: signal.Signals | None) -> None:
    path = tmp_path / "kvctl.sock"
    first = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdin is not None
    assert first.stdout is not None
    try:
        assert first.stdout.readline() == b"up\n"
        with pytest.raises(BusyError, match="another kvctl runs with it"):
            OwnedSocket(path)
        assert path.is_socket()
        if ending is not None:
            first.send_signal(ending)
            first.wait(10)
    finally:
        first.stdin.close()
        first.wait(10)
        first.stdout.close()
    with OwnedSocket(path), pytest.raises(BusyError):
        OwnedSocket(path)


def test_a_second_close_leaves_the_successor_alone(tmp_path: Path) -> None:
    first = OwnedSocket(tmp_path / "s")
    first.close()
    with OwnedSocket(tmp_path / "s") as second:
        first.close()
        assert second.path.is_socket()
        with pytest.raises(BusyError):
            OwnedSocket(tmp_path / "s")


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "kvctl.sock"
    path.write_text("precious")
    with pytest.raises(ListenError, match="left alone"):
        OwnedSocket(path)
    assert path.read_text() == "precious"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ListenError, match="left alone"):
        OwnedSocket(path)
    path.unlink()
    OwnedSocket(path).close()


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ListenError, match=r"admin_socket .*/file/kvctl.sock: "):
        OwnedSocket(tmp_path / "file" / "kvctl.sock")


class Stand:
    ready = True

    def metrics(self) -> tuple[list[bytes], str]:
        return [b"kvctl_leases", b" 0\n"], "text/plain; version=0.0.4; charset=utf-8"

    def readiness(self) -> tuple[bool, str]:
        return self.ready, "engine up" if self.ready else "engine_unreachable: no engine"


async def test_the_metrics_port() -> None:
    stand = Stand()
    server = PublicServer(PublicApi(stand, Pace()), Address("127.0.0.1", 0))
    await server.start()
    base = f"http://127.0.0.1:{server.port}"
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base}/metrics") as answer:
                assert (answer.status, await answer.read()) == (200, b"kvctl_leases 0\n")
                assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            async with session.head(f"{base}/healthz") as answer:
                assert answer.status == 200
            stand.ready = False
            async with session.get(f"{base}/readyz") as answer:
                assert (answer.status, await answer.text()) == (503, "engine_unreachable: no engine\n")
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                for route in ("/metrics", "/healthz", "/readyz"):
                    async with session.request(method, base + route) as answer:
                        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
            for route in ("/v1/status", "/v1/overrides/margin", "/v1/drain"):
                async with session.put(base + route, json={"value": 0.1, "reason": "r"}) as answer:
                    assert answer.status == 404
    finally:
        await server.close()


@pytest.mark.parametrize("data", [b"SECRET\r\n\r\n", b"GET /" + b"SECRET" * 2000 + b" HTTP/1.1\r\n\r\n"])
async def test_what_is_no_http_leaves_one_line_and_none_of_its_words(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "kvctl")
    server = PublicServer(PublicApi(Stand(), Pace()), Address("127.0.0.1", 0))
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        assert (await reader.read()).startswith(b"HTTP/1.0 400")
        writer.close()
    finally:
        await server.close()
    assert all(record.exc_info is None and record.levelname != "ERROR" for record in caplog.records)
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize("begun", [b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_a_connection_that_is_only_held_is_closed(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvctl.admin.serving.SILENCE_S", 0.1)
    server = PublicServer(PublicApi(Stand(), Pace()), Address("127.0.0.1", 0))
    await server.start()
    try:
        async with asyncio.timeout(60):
            answer = await held(server.port, begun)
            while begun.endswith(b"\n") and not answer:  # the machine stood still for longer than the silence
                answer = await held(server.port, begun)
        assert answer.startswith(b"HTTP/1.1 200" if begun.endswith(b"\n") else b"")
    finally:
        await server.close()


async def held(port: int, begun: bytes) -> bytes:
    """What comes before a connection on which nothing more is said is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ListenError, match=rf"admin_listen {address}: Address already in use"):
            PublicServer(PublicApi(Stand(), Pace()), address)


def test_a_host_that_is_not_there() -> None:
    with pytest.raises(ListenError, match=r"admin_listen 192\.0\.2\.1:0: "):
        PublicServer(PublicApi(Stand(), Pace()), Address("192.0.2.1", 0))


@pytest.mark.parametrize("host", ["", "::1"])
async def test_ipv6(host: str) -> None:
    if not os.path.exists("/proc/net/if_inet6"):  # noqa: ASYNC240, PTH110
        pytest.skip("this machine has no IPv6")
    try:
        server = PublicServer(PublicApi(Stand(), Pace()), Address(host, 0))
    except ListenError as error:
        pytest.skip(f"this machine has no IPv6 loopback: {error}")
    await server.start()
    try:
        reader, writer = await asyncio.open_connection(host or "127.0.0.1", server.port)
        writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.0 200")
        writer.close()
    finally:
        await server.close()
