"""Engines that break and clients that leave, at every phase: told truthfully, and the ledger is zero."""

import asyncio
import json
import os
import resource
import socket

import pytest

from kvctl.core.outcomes import EndReason, ProxyFault
from kvctl.proxy.seams import ProxyConfig
from tests.proxy.harness import (
    CHAT,
    CHAT_STREAM,
    LAST,
    PATIENCE,
    PLAIN,
    STREAM_HEAD,
    Rig,
    Script,
    Wire,
    chunk,
    event,
    eventually,
    get,
    plain,
    post,
    rig,
    turns,
)
from tests.steady import in_time

BROKEN = {
    "nothing": b"",
    "half a status line": b"HTTP/1.1 20",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nab",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 60_000,
    "switched protocols": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
}


def says(*data: bytes, end: str = "close") -> Script:
    """Send each piece as a segment of its own, then end the connection in that way."""

    async def script(wire: Wire) -> None:
        await wire.request()
        for piece in data:
            await wire.send(piece)
            await asyncio.sleep(0.01)
            await turns()
        if end == "reset":
            wire.reset()
        elif end == "hang":
            await wire.gone()

    return script


async def raw_answer(it: Rig, request: bytes) -> tuple[bytes, bool]:
    """All bytes that came, and whether the connection was reset behind them."""
    wire = await it.client()
    await wire.send(request)
    got = b""
    try:
        async with asyncio.timeout(PATIENCE):
            while more := await wire.reader.read(65536):
                got += more
    except ConnectionResetError:
        return got, True
    finally:
        wire.close()
    return got, False


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("end", ["close", "reset"])
async def test_broken_before_the_answer_is_502(data: bytes, end: str) -> None:
    async with rig(says(data, end=end)) as it:
        answer = await it.post()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 502 ")
        assert json.loads(body)["error"]["code"] == "engine_unreachable"
        await it.quiet()
        assert it.reasons == [EndReason.ENGINE_ERROR]
        assert ProxyFault.UPSTREAM_BROKE in it.seen.faults


async def test_engine_that_does_not_listen() -> None:
    async with rig(says(b""), url="http://127.0.0.1:1") as it:
        answer = await it.post()
        assert answer.startswith(b"HTTP/1.1 502 ")
        assert it.reasons == [EndReason.ENGINE_ERROR]
        assert it.seen.faults == [ProxyFault.CONNECT_FAILED]
        # the gate is told: soon it says so by itself, at once, with a time to come back
        for _ in range(5):
            answer = await it.post()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: " in answer
        assert b"x-kvctl-reason: engine_unreachable" in answer


async def test_f13_own_want_of_descriptors_is_not_the_engines_fault() -> None:
    """F13: no descriptor is left to reach the engine: 502, but it is not taken for dead, and it passes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with rig(says(plain(PLAIN), end="hang")) as it:
        wire = await it.client()
        await wire.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        await wire.reader.readuntil(b'"ok"}')
        probe = os.dup(0)
        os.close(probe)
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
        try:
            for _ in range(6):
                await wire.send(post())
                head = await wire.reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 502 ")
                length = int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0])
                assert b"Too many open files" in await wire.reader.readexactly(length)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await it.post()).startswith(b"HTTP/1.1 200 ")
        wire.close()


TRUNCATED = {
    "short of its length": b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 99\r\n\r\n{",
    "without the last chunk": STREAM_HEAD + chunk(event("a")),
    "inside a chunk": STREAM_HEAD + chunk(event("a")) + b"ff\r\ndata: x",
    "bad chunk size": STREAM_HEAD + chunk(event("a")) + b"zz\r\n",
}


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
@pytest.mark.parametrize("data", TRUNCATED.values(), ids=TRUNCATED)
@pytest.mark.parametrize("end", ["close", "reset"])
async def test_b06_a_cut_answer_is_seen_to_be_cut(data: bytes, end: str, version: bytes) -> None:
    """B06: the client's connection is reset behind what came; no end marker is invented."""
    async with rig(says(data, end=end)) as it:
        got, reset = await raw_answer(it, post(CHAT_STREAM).replace(b"HTTP/1.1", version))
        assert got.startswith(version + b" 200 OK")
        assert reset
        assert not got.endswith(LAST)
        assert b"[DONE]" not in got
        assert got.count(b'"code":"engine_error"') == (event("a") in got and b"data: x" not in got)
        await it.quiet()
        assert it.reasons == [EndReason.ENGINE_ERROR]


async def test_b06_five_events_then_reset() -> None:
    """B06: the events arrive, then one error event in the protocol's own shape, then an abnormal end."""
    events = [chunk(event(str(n))) for n in range(5)]
    async with rig(says(STREAM_HEAD, *events, end="reset")) as it:
        got, reset = await raw_answer(it, post(CHAT_STREAM))
        assert reset
        assert all(piece in got for piece in events)
        assert got.index(b'"engine_error"') > got.index(events[-1])
        assert it.ended[0].record.output_tokens == 5


async def test_length_shorter_than_the_body() -> None:
    """What is beyond the announced length belongs to nothing: not relayed, connection not used again."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    async with rig(says(answer, end="hang")) as it:
        for _ in range(2):
            assert (await it.post()).partition(b"\r\n\r\n")[2] == b"{}"
        assert it.engine.accepted == 2


async def test_clean_close_in_the_middle_of_a_generation_is_no_finished_answer() -> None:
    async with rig(says(STREAM_HEAD + chunk(event("a")) + LAST)) as it:
        got, reset = await raw_answer(it, post(CHAT_STREAM, "/v1/chat/completions", b"Connection: close"))
        assert got.endswith(LAST)  # as the engine sent it
        assert not reset
        assert it.reasons == [EndReason.ENGINE_ERROR]


@pytest.mark.parametrize(
    "head", [b"", STREAM_HEAD, STREAM_HEAD + chunk(event("a"))], ids=["head", "first", "more"]
)
async def test_read_timeout_where_one_is_set(head: bytes) -> None:
    async def scenario() -> None:
        async with rig(says(head, end="hang"), read_timeout=0.1) as it:
            got, reset = await raw_answer(it, post(CHAT_STREAM, "/v1/chat/completions", b"Connection: close"))
            assert reset if head else got.startswith(b"HTTP/1.1 504 ")
            assert it.reasons == [EndReason.TIMEOUT]
            assert ProxyFault.UPSTREAM_TIMEOUT in it.seen.faults
            await eventually(lambda: it.engine.open == 0)

    await in_time(scenario, 0.1)


# --- clients that leave -----------------------------------------------------------------------------


@pytest.mark.parametrize("body", [CHAT, CHAT_STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize(
    "sent",
    [b"", b"HTTP/1.1 200 OK\r\n", STREAM_HEAD, STREAM_HEAD + chunk(event("a"))],
    ids=["before the answer", "inside the head", "silent prefill", "mid-stream"],
)
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_b01_client_gone_cancels_the_engine(body: bytes, sent: bytes, how: str) -> None:
    """B01: at every phase the engine's connection closes and the lease ends."""
    async with rig(says(sent, end="hang")) as it:
        wire = await it.client()
        await wire.send(post(body))
        await eventually(lambda: len(it.gate.ledger) == 1 and it.engine.open == 1)
        if sent.endswith(b"\r\n\r\n"):
            await wire.reader.readuntil(b"\r\n\r\n")
        if how == "reset":
            wire.reset()
        else:
            wire.close()
        await eventually(lambda: it.engine.open == 0)
        await it.quiet()
        assert it.reasons == [EndReason.CLIENT_GONE]
        assert it.seen.faults == [ProxyFault.CLIENT_GONE]


async def test_client_gone_while_it_sends_its_body() -> None:
    async with rig(says(plain(PLAIN))) as it:
        wire = await it.client()
        await wire.send(post(CHAT)[:-10])
        await eventually(lambda: it.proxy.body_bytes > 0)
        wire.close()
        await eventually(lambda: it.proxy.body_bytes == 0)
        assert it.engine.accepted == 0
        assert it.seen.admissions == 0


async def test_client_gone_from_a_passed_route() -> None:
    async with rig(says(b"", end="hang")) as it:
        wire = await it.client()
        await wire.send(get("/v1/models"))
        await eventually(lambda: it.engine.open == 1)
        wire.close()
        await eventually(lambda: it.engine.open == 0)


async def slow_client(it: Rig) -> Wire:
    """A client whose kernel holds little for it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", it.port))
    return Wire(*await asyncio.open_connection(sock=sock, limit=1 << 18))


def torrent(size: int, sent: list[int], text: int = 8192) -> Script:
    """A stream of that many bytes in all, noting in ``sent`` what the engine got rid of.

    Events of texts so long; small ones come one by one, and are only counted.
    """
    piece = chunk(event("x" * text))

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD)
        while sum(sent) < size:
            await wire.send(piece)
            sent.append(len(piece))
            if text < 4000:
                await asyncio.sleep(0)
        await wire.send(chunk(event("", "stop")) + LAST)
        await wire.gone()

    return script


@pytest.mark.parametrize("text", [8192, 3500])
async def test_stalled_reader_stops_the_engine_and_then_loses_its_lease(text: int) -> None:
    sent: list[int] = []
    config = ProxyConfig(client_write_timeout=0.2)
    async with rig(torrent(200_000_000, sent, text), config=config) as it:
        wire = await slow_client(it)
        wire.writer.write(post(CHAT_STREAM))
        await eventually(lambda: EndReason.CLIENT_STALLED in it.reasons)
        assert sum(sent) < 50_000_000  # what the kernels hold, and no more
        await eventually(lambda: it.engine.open == 0)
        assert ProxyFault.CLIENT_STALLED in it.seen.faults
        wire.close()


async def test_slow_reader_is_waited_for() -> None:
    async def scenario() -> None:
        async with rig(torrent(20_000_000, []), config=ProxyConfig(client_write_timeout=0.3)) as it:
            wire = await slow_client(it)
            wire.writer.write(post(CHAT_STREAM))
            got = b""
            async with asyncio.timeout(PATIENCE):
                while not got.endswith(LAST):  # a reset raises
                    got = got[-8:] + (await wire.reader.read(1 << 18) or b"!")
                    assert not got.endswith(b"!"), "a clean end in the middle"
                    await asyncio.sleep(0.001)
            await eventually(lambda: it.reasons == [EndReason.FINISHED])
            wire.close()

    await in_time(scenario, 0.3)


async def test_large_body_goes_up_and_an_early_refusal_comes_down() -> None:
    """An answer that comes before the body was read is relayed; its connection is not used again."""

    async def script(wire: Wire) -> None:
        await wire.reader.readuntil(b"\r\n\r\n")
        await wire.send(plain(b'{"error":{}}', "413 Payload Too Large"))
        await wire.gone()

    body = CHAT[:-1] + b',"user":"' + b"x" * 20_000_000 + b'"}'
    async with rig(script) as it:
        for _ in range(2):
            assert (await it.post(body)).startswith(b"HTTP/1.1 413 Payload")
        assert it.engine.accepted == 2
        assert it.reasons == [EndReason.ENGINE_REFUSED] * 2


async def test_b14_a_body_of_thirty_megabytes_arrives_whole() -> None:
    """B14: nobody's default of 1 MiB stands in the way."""
    sizes: list[int] = []

    async def script(wire: Wire) -> None:
        request = await wire.request()
        sizes.append(len(request.body))
        await wire.send(plain(PLAIN))
        await wire.gone()

    body = CHAT[:-1] + b',"user":"' + b"x" * 30_000_000 + b'"}'
    async with rig(script) as it:
        assert (await it.post(body)).startswith(b"HTTP/1.1 200 OK")
        assert sizes == [len(body)]
