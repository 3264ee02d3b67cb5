"""Streams whose usual reads go past the connection: it hears of all else, and is itself again afterwards."""

import asyncio
import ssl
from pathlib import Path

import pytest

from kvctl.control.certificates import Trust, TrustFiles
from kvctl.core.outcomes import EndReason
from kvctl.proxy.answer_ends import Swift
from kvctl.proxy.pool import Upstream
from kvctl.proxy.upstream import Connection
from tests.proxy.ends import Taker
from tests.proxy.harness import (
    CHAT_STREAM,
    LAST,
    PLAIN,
    STREAM_HEAD,
    FakeEngine,
    Wire,
    chunk,
    event,
    plain,
    post,
    rig,
)

TEXTS = ("a", "b", "c", "d", "e")


class Stepped:
    """An engine's script whose events come each in a read of its own: the next when the client has one."""

    def __init__(self, end: str = "whole") -> None:
        self._end = end
        self._had = asyncio.Event()

    async def __call__(self, wire: Wire) -> None:
        while True:
            request = await wire.request()
            if b"stream" not in request.body:
                await wire.send(plain(PLAIN))
                continue
            await wire.send(STREAM_HEAD)
            for text in TEXTS:
                await wire.send(chunk(event(text)))
                await self._had.wait()
                self._had.clear()
            if self._end == "whole":
                await wire.send(chunk(event("", "stop")) + LAST)
                continue
            if self._end == "reset":
                wire.reset()
            if self._end == "silent":
                await wire.gone()
            return

    async def read_by(self, wire: Wire) -> None:
        await wire.send(post(CHAT_STREAM))
        for text in TEXTS:
            await wire.reader.readuntil(chunk(event(text)))
            self._had.set()


async def test_the_connection_carries_other_requests_afterwards() -> None:
    script = Stepped()
    async with rig(script) as it:
        for number in range(3):
            wire = await it.client()
            await script.read_by(wire)
            await wire.reader.readuntil(LAST)
            await it.quiet()
            assert it.ended[-1].record.output_tokens == len(TEXTS) + 1
            assert (await it.post()).endswith(PLAIN)
            await it.quiet()
            assert it.engine.accepted == 1, number
            wire.close()


@pytest.mark.parametrize(
    ("end", "reason"), [("close", EndReason.ENGINE_ERROR), ("reset", EndReason.ENGINE_ERROR)]
)
async def test_an_engine_that_dies_is_seen(end: str, reason: EndReason) -> None:
    await _broken(Stepped(end), reason)


async def test_silence_is_seen_where_it_is_bounded() -> None:
    await _broken(Stepped("silent"), EndReason.TIMEOUT, read_timeout=2.0)


async def _broken(script: Stepped, reason: EndReason, read_timeout: float | None = None) -> None:
    async with rig(script, read_timeout=read_timeout) as it:
        wire = await it.client()
        await script.read_by(wire)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await wire.reader.readuntil(LAST)
        await it.quiet()
        assert it.reasons == [reason]
        assert it.ended[0].record.output_tokens == len(TEXTS)
        wire.close()


async def test_a_client_that_leaves_takes_the_engines_connection_along() -> None:
    script = Stepped("silent")
    async with rig(script) as it:
        wire = await it.client()
        await script.read_by(wire)
        wire.close()
        await it.quiet()
        assert it.reasons == [EndReason.CLIENT_GONE]
        assert it.upstream.connections == 0


async def test_clients_over_tls(certificate: tuple[Path, Path]) -> None:
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(*certificate)
    theirs = ssl.create_default_context(cafile=str(certificate[0]))
    script = Stepped()
    async with rig(script, ssl=ours) as it:
        wire = Wire(*await asyncio.open_connection("localhost", it.port, ssl=theirs))
        await script.read_by(wire)
        await wire.reader.readuntil(LAST)
        await it.quiet()
        assert it.ended[0].record.output_tokens == len(TEXTS) + 1
        wire.close()


async def test_engines_over_tls(certificate: tuple[Path, Path]) -> None:
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(*certificate)
    go = asyncio.Event()

    async def script(wire: Wire) -> None:
        for _ in range(2):
            await wire.request()
            await wire.send(STREAM_HEAD)
            await go.wait()
            await wire.send(chunk(event("a")) + LAST)
        await wire.gone()

    engine = FakeEngine(script)
    await engine.start(ssl=theirs)
    upstream = Upstream(f"https://localhost:{engine.port}", trust=Trust(TrustFiles(ca=certificate[0])))
    for _ in range(2):
        response, taker = await upstream.request("POST", b"/", [], b"{}"), Taker()
        response.attach(taker)
        response.divert(Swift())
        go.set()
        while not response.finished:
            await response.wait()
        assert (taker.body, taker.end) == (event("a"), "None")
    assert engine.accepted == 1
    await upstream.close()
    await engine.stop()


class Transport(asyncio.Transport):
    """Keeps the protocols that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.protocols: list[asyncio.BaseProtocol] = []
        self.written = b""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocols.append(protocol)

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)


@pytest.mark.parametrize("read_timeout", [None, 600.0])
async def test_what_is_taken_is_noted_where_silence_is_bounded(read_timeout: float | None) -> None:
    """And what is before a connection is gone with the answer."""
    released = list[bool]()
    connection = Connection(lambda _, reusable: released.append(reusable), read_timeout)
    transport, swift = Transport(), Swift()
    connection.connection_made(transport)
    response = connection.start(head_only=False)
    connection.send(b"GET / HTTP/1.1\r\n\r\n", None)
    response.divert(swift)
    assert transport.protocols == [swift]
    assert (swift.noted is None) == (read_timeout is None)
    swift.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
    assert response.has_head
    swift.data_received(b"ok")
    assert released == [True]
    assert transport.protocols == [swift, connection]
    response.divert(swift)
    assert transport.protocols == [swift, connection]
