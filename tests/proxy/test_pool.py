"""Where the engine is, and which connection to it is used."""

import asyncio
import ssl
from pathlib import Path

import pytest

from kvctl.control.certificates import Trust, TrustFiles
from kvctl.core.outcomes import EndReason, ProxyFault
from kvctl.proxy import pool
from kvctl.proxy.pool import Upstream, parse_address
from kvctl.proxy.response import BrokenError, ConnectError
from tests.proxy.harness import (
    PLAIN,
    FakeEngine,
    Wire,
    answering,
    eventually,
    get,
    plain,
    rig,
)


@pytest.mark.parametrize(
    ("url", "prefix", "authority"),
    [
        ("http://h:8000", b"", b"h:8000"),
        ("http://h:8000/", b"", b"h:8000"),
        ("http://h:8000/v1", b"", b"h:8000"),
        ("http://h:8000/v1/", b"", b"h:8000"),
        ("http://h/prefix/v1/", b"/prefix", b"h"),
        ("http://[::1]:8000", b"", b"[::1]:8000"),
        ("unix:/run/engine.sock", b"", b"localhost"),
    ],
)
def test_b28_base_urls_with_and_without_v1(url: str, prefix: bytes, authority: bytes) -> None:
    """B28: however the operator writes it, the path is the intended one."""
    address = parse_address(url)
    assert (address.prefix, address.authority) == (prefix, authority)


@pytest.mark.parametrize(
    "url",
    ["h:8000", "ftp://h", "http://", "unix:", "http://u:p@h", "http://h?x=1", "http://h:8x", "http://hé"],
)
def test_b28_an_unusable_base_url_fails_at_once(url: str) -> None:
    """B28: or it fails at start-up."""
    with pytest.raises(ValueError, match=r"engine URL|[Pp]ort"):
        parse_address(url)


async def test_idle_connections_go_before_the_engine_closes_them() -> None:
    async with rig(answering(plain(PLAIN)), idle_life=600.0) as it:
        await it.post()
        assert it.upstream.connections == 1
    async with rig(answering(plain(PLAIN)), idle_life=0.05) as it:
        await it.post()
        await eventually(lambda: it.upstream.connections == 0 and it.engine.open == 0)
        await it.post()
        assert it.engine.accepted == 2


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this machine stands still, a reset came within a round trip."""
    monkeypatch.setattr(pool, "_RACE_S", 600.0)


@pytest.mark.usefixtures("at_once")
async def test_b16_engine_that_closes_at_the_very_moment() -> None:
    """B16: a connection that the engine just closed costs no client an error: once more, on a fresh one."""
    served: list[int] = []

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(plain(PLAIN))
        served.append(1)
        getattr(wire.writer.transport, "pause_reading")()  # noqa: B009 - what comes now is never read
        await eventually(lambda: len(served) >= 100)

    async with rig(script) as it:
        assert (await it.post()).startswith(b"HTTP/1.1 200 ")
        call = asyncio.create_task(it.post())
        await eventually(lambda: it.upstream.busy == 1)
        await asyncio.sleep(0.02)  # the request lies unread in the engine's kernel
        served.extend([1] * 100)  # ... and its connection closes
        assert (await call).startswith(b"HTTP/1.1 200 ")
        assert it.seen.faults == [ProxyFault.UPSTREAM_RETRIED]
        assert it.engine.accepted == 2
        assert it.reasons == [EndReason.FINISHED] * 2


@pytest.mark.usefixtures("at_once")
async def test_b16_idle_close_in_a_race_many_times() -> None:
    """B16: requests at the moment of the engine's own idle time-out: zero failures."""

    async def script(wire: Wire) -> None:
        buffered: bytearray = getattr(wire.reader, "_buffer")  # noqa: B009 - no part of its public type
        while True:
            idle_until = asyncio.get_running_loop().time() + 0.03
            while not buffered:  # as uvicorn does: what was read is answered, what was not is thrown away
                await asyncio.sleep(0.001)
                if asyncio.get_running_loop().time() > idle_until and not buffered:
                    wire.close()
                    return
            await wire.request()
            await wire.send(plain(PLAIN))

    async with rig(script) as it:
        for step in range(24):
            assert (await it.post()).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(0.028 + step * 0.0002)


@pytest.mark.parametrize(("method", "sent"), [("POST", 2), ("GET", 3)])
@pytest.mark.parametrize("end", ["close", "late reset"])
async def test_a_generation_that_may_have_begun_is_not_sent_twice(
    method: str, sent: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine read all of it and died: a POST is not repeated, a GET is."""
    monkeypatch.setattr(pool, "_RACE_S", 0.02)
    requests: list[bytes] = []

    async def script(wire: Wire) -> None:
        while True:
            requests.append((await wire.request()).line)
            if len(requests) == 2:
                if end == "late reset":
                    await asyncio.sleep(0.05)
                    wire.reset()
                return
            await wire.send(plain(PLAIN))

    async with rig(script) as it:
        for _ in range(2):
            answer = await (it.post() if method == "POST" else it.talk(get("/v1/models")))
        assert answer.startswith(b"HTTP/1.1 200 " if method == "GET" else b"HTTP/1.1 502 ")
        assert len(requests) == sent


async def test_fresh_connection_that_breaks_is_not_tried_again() -> None:
    async def script(wire: Wire) -> None:
        wire.reset()

    async with rig(script) as it:
        assert (await it.post()).startswith(b"HTTP/1.1 502 ")
        assert it.engine.accepted == 1


async def test_connection_close_of_the_engine_is_honoured() -> None:
    async with rig(answering(plain(PLAIN, "200 OK", b"Connection: close"))) as it:
        for _ in range(2):
            assert (await it.post()).startswith(b"HTTP/1.1 200 ")
        assert it.engine.accepted == 2


async def test_engine_that_speaks_out_of_turn_loses_its_connection() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(plain(PLAIN))
        await asyncio.sleep(0.02)
        await wire.send(plain(b'{"of":"nobody"}'))
        await wire.gone()

    async with rig(script) as it:
        await it.post()
        await eventually(lambda: it.engine.open == 0)
        assert (await it.post()).endswith(PLAIN)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_b30_localhost_finds_either_family(host: str) -> None:
    """B30: an engine on one family only is found under the name localhost."""
    engine = FakeEngine(answering(plain(PLAIN)))
    await engine.start(host)
    upstream = Upstream(f"http://localhost:{engine.port}")
    for _ in range(2):
        assert (await upstream.request("GET", b"/v1/models", [], None)).status == 200
    await upstream.close()
    await engine.stop()


async def test_unix_socket(tmp_path: Path) -> None:
    engine = FakeEngine(answering(plain(PLAIN)))
    await engine.start_unix(str(tmp_path / "e"))
    upstream = Upstream(f"unix:{tmp_path}/e")
    for _ in range(2):
        response = await upstream.request("POST", b"/tokenize", [], b"{}")
        await response.wait()
    assert (engine.accepted, upstream.connections) == (1, 1)
    await upstream.close()
    await engine.stop()


async def test_connect_timeout_and_refusal_are_told_apart_from_broken(tmp_path: Path) -> None:
    upstream = Upstream(f"unix:{tmp_path}/nobody")
    with pytest.raises(ConnectError):
        await upstream.request("GET", b"/", [], None)
    await upstream.close()
    with pytest.raises(ConnectError, match="closing"):
        await upstream.request("GET", b"/", [], None)


async def test_https_engine(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    engine = FakeEngine(answering(plain(PLAIN)))
    await engine.start(ssl=server)
    trusting = Upstream(f"https://localhost:{engine.port}", trust=Trust(TrustFiles(ca=cert)))
    for _ in range(2):
        response = await trusting.request("POST", b"/tokenize", [], b"{}")
        await response.wait()
    assert engine.accepted == 1
    await trusting.close()
    doubting = Upstream(f"https://localhost:{engine.port}")
    with pytest.raises(ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        await doubting.request("GET", b"/", [], None)
    await doubting.close()
    await engine.stop()


async def test_cancelled_request_closes_its_connection() -> None:
    engine = FakeEngine(answering(plain(PLAIN)))

    async def silent(wire: Wire) -> None:
        await wire.request()
        await wire.gone()

    engine.script = silent
    await engine.start()
    upstream = Upstream(f"http://127.0.0.1:{engine.port}")
    call = asyncio.create_task(upstream.request("GET", b"/", [], None))
    await eventually(lambda: engine.open == 1 and upstream.busy == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually(lambda: engine.open == 0)
    assert upstream.busy == 0
    await upstream.close()
    await engine.stop()


async def test_broken_head_raises_once_for_all() -> None:
    engine = FakeEngine(answering(b"nonsense\r\n\r\n"))
    await engine.start()
    upstream = Upstream(f"http://127.0.0.1:{engine.port}")
    with pytest.raises(BrokenError):
        await upstream.request("GET", b"/", [], None)
    assert upstream.connections == 0
    await upstream.close()
    await engine.stop()
