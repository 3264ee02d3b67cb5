"""The data port itself: limits, malformed requests, own routes."""

import asyncio
import json
import resource
import socket
import ssl
import time
from pathlib import Path

import pytest
from aiohttp import web

from kvctl.core.outcomes import Policy, ProxyFault, RejectReason
from kvctl.proxy.listening import AT_ONCE, Listeners, split_listen
from kvctl.proxy.relay import Written
from kvctl.proxy.seams import ProxyConfig
from kvctl.proxy.server import _COMPLAINT_S, ClientServer, most_connections
from tests.proxy.harness import (
    CHAT,
    CHAT_STREAM,
    PATIENCE,
    PLAIN,
    STREAM_HEAD,
    Wire,
    answering,
    chunk,
    event,
    eventually,
    get,
    plain,
    post,
    rig,
)

ENGINE = answering(plain(PLAIN))

MALFORMED = {
    "not HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 64,
    "length and chunks": post().replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nContent-Length"),
    "two lengths": post().replace(b"Content-Length", b"Content-Length: 3\r\nContent-Length"),
    "negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "folded header": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "space before colon": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n",
    "bad chunks": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_requests_get_the_apis_error_and_the_door(data: bytes) -> None:
    async with rig(ENGINE) as it:
        answer = await it.talk(data)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert b"connection: close" in head.lower()
        assert json.loads(body)["error"]["type"] == "BadRequestError"
        assert it.engine.accepted == 0
        assert it.seen.faults == [ProxyFault.MALFORMED_HTTP]


async def test_b22_large_headers_pass_up_to_the_limit() -> None:
    """B22: a 12 kB token, cookies of 9 kB and 120 headers pass; beyond the limit: 431, counted."""
    lines = [b"Authorization: Bearer " + b"t" * 12_000, b"Cookie: " + b"; ".join([b"c=" + b"v" * 400] * 22)]
    lines += [b"X-H%d: v" % n for n in range(120)]
    async with rig(ENGINE) as it:
        assert (await it.post(CHAT, "/v1/chat/completions", *lines)).startswith(b"HTTP/1.1 200 ")
        answer = await it.post(CHAT, "/v1/chat/completions", b"X-Big: " + b"x" * 70_000)
        assert answer.split(b" ", 2)[1] == b"431"
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        many = await it.post(CHAT, "/v1/chat/completions", *[b"X-H%d: v" % n for n in range(400)])
        assert many.split(b" ", 2)[1] in (b"431", b"400")
        assert ProxyFault.HEADERS_TOO_LARGE in it.seen.faults


async def test_b22_complaints_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """B22: a rejection is in the log, but a stranger cannot write one line after the other."""
    async with rig(ENGINE) as it:
        began = time.monotonic()
        for _ in range(20):
            await it.talk(b"hello\r\n\r\n")
        took = time.monotonic() - began
        lines = [record for record in caplog.records if record.name == "kvctl.proxy"]
        assert 1 <= len(lines) <= 1 + took / _COMPLAINT_S
        assert len(it.seen.faults) == 20


SECRETIVE = {
    "in a header": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer SECRET\x01\r\n\r\n",
    "without a colon": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nBearer SECRET\r\n\r\n",
    "for a method": b"SECRET is what I wanted to say\r\n\r\n",
    "in the path": b"GET /SECRET\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "for a chunk size": MALFORMED["bad chunks"].replace(b"zz", b"SECRET"),
    "behind a chunk": MALFORMED["bad chunks"].replace(b"zz", b"2\r\nSECRET"),
    "in a long header": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nSECRET " + b"S" * 60_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("data", SECRETIVE.values(), ids=SECRETIVE)
async def test_what_a_malformed_request_held_is_not_logged(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with rig(ENGINE) as it:
        answer = await it.talk(data)
        assert len(answer) < 1500
    assert "refused a request that is not HTTP" in caplog.text
    assert "SECRET" not in caplog.text


async def test_descriptors_are_left_for_telemetry_and_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients beyond what the descriptors allow are told so, and let in again once others left."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    async with rig(ENGINE) as it:
        idle = [await it.client() for _ in range(9)]
        assert (await it.post(CHAT)).startswith(b"HTTP/1.1 200 ")
        idle.append(await it.client())
        over = await it.client()
        async with asyncio.timeout(60):
            answer = await over.reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        assert it.seen.faults == [ProxyFault.TOO_MANY_CONNECTIONS]
        for wire in (over, *idle):
            wire.close()
        await asyncio.sleep(0.1)
        assert (await it.post(CHAT)).startswith(b"HTTP/1.1 200 ")


async def test_a_burst_of_clients_is_accepted_a_few_at_a_time() -> None:
    """Each has a descriptor until it is counted: thousands at once would leave none to anybody."""
    protocols = [0]

    def protocol() -> asyncio.Protocol:
        protocols[0] += 1
        return asyncio.Protocol()

    listeners = Listeners()
    await listeners.open("127.0.0.1:0", protocol)
    clients = [socket.create_connection(listeners.sockets[0].getsockname()) for _ in range(100)]
    before = 0
    while protocols[0] < len(clients):
        await asyncio.sleep(0)
        assert protocols[0] - before <= AT_ONCE
        before = protocols[0]
    listeners.close()
    for client in clients:
        client.close()
    await listeners.wait_closed()


@pytest.mark.parametrize(("descriptors", "most"), [(64, 16), (1024, 448), (65536, 30688), (-1, 491488)])
def test_clients_take_two_descriptors_each(descriptors: int, most: int) -> None:
    assert most_connections(descriptors) == most


async def test_a_client_that_takes_nothing_cannot_keep_a_closing_connection() -> None:
    """Closing waits for what was written to leave, which is for ever where the client never reads."""

    async def handler(request: web.BaseRequest) -> Written:
        assert request.transport is not None
        request.transport.write(b"x" * 64_000_000)  # more than any kernel takes
        return Written(200, keep_alive=False)

    async with rig(ENGINE) as it:
        server = ClientServer(handler, ProxyConfig(client_write_timeout=60.0), it.seen)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname(), limit=1024)
        writer.write(get("/v1/models"))
        async with asyncio.timeout(60):
            await reader.read(1)
        now = time.monotonic()
        for later, still in ((0, 1), (59, 1), (61, 0)):
            server.close_late(now + later, 1000.0)
            await asyncio.sleep(0.05)
            await eventually(lambda still=still: server.open == still)  # type: ignore[misc]
        writer.close()
        listener.close()


SMALL = ProxyConfig(max_body_bytes=1000, max_body_bytes_total=1500)


async def test_declared_body_above_the_limit_is_refused_unread() -> None:
    """B14: above the configured limit: 413 in the API's shape, before the body is read."""
    async with rig(ENGINE, config=SMALL) as it:
        head = post(b"").replace(b"Content-Length: 0", b"Content-Length: 1001")
        answer = await it.answer(head)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"
        assert it.seen.faults == [ProxyFault.BODY_TOO_LARGE]


async def test_undeclared_body_above_the_limit_is_refused_while_it_comes() -> None:
    async with rig(ENGINE, config=SMALL) as it:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await it.answer(head + (b"100\r\n" + b"x" * 256 + b"\r\n") * 8)
        assert answer.startswith(b"HTTP/1.1 413 ")


async def test_bodies_of_the_whole_process_are_bounded() -> None:
    async with rig(ENGINE, config=SMALL) as it:
        first = await it.client()
        await first.send(post(b"x" * 900)[:-10])
        await eventually(lambda: it.proxy.body_bytes == 900)
        answer = await it.answer(post(b"x" * 700))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in answer
        assert it.seen.faults == [ProxyFault.BODY_MEMORY]
        first.close()


async def test_chunked_body_is_forwarded_with_a_length() -> None:
    got: list[tuple[bytes, list[bytes]]] = []

    async def script(wire: Wire) -> None:
        request = await wire.request()
        got.append((request.body, request.values(b"content-length")))
        await wire.send(plain(PLAIN))

    async with rig(script) as it:
        head = post(b"", "/v1/chat/completions", b"Connection: close", b"Transfer-Encoding: chunked")
        head = head.replace(b"Content-Length: 0\r\n", b"")
        pieces = b"".join(b"%x\r\n%b\r\n" % (1, CHAT[n : n + 1]) for n in range(len(CHAT)))
        assert (await it.talk(head + pieces + b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert got == [(CHAT, [b"%d" % len(CHAT)])]


async def test_late_headers_are_not_waited_for() -> None:
    async with rig(ENGINE, config=ProxyConfig(header_timeout=0.1)) as it:
        for begun in (b"", b"POST /v1/completions HTT"):
            with socket.create_connection(("127.0.0.1", it.port)) as late:
                late.sendall(begun)  # it is there before the connection is accepted, and no more comes
                late.setblocking(False)
                wire = Wire(*await asyncio.open_connection(sock=late))
                async with asyncio.timeout(PATIENCE):
                    assert await wire.reader.read() == b""
                wire.close()
        assert it.seen.faults == [ProxyFault.HEADER_TIMEOUT] * 2


async def test_a_head_that_came_while_kvctl_stood_still_is_not_late() -> None:
    async with rig(ENGINE, config=ProxyConfig(header_timeout=0.5)) as it:
        for _ in range(5):
            wire = await it.client()
            await it.answer(post())  # kvctl has accepted ``wire`` by now
            await wire.send(post())
            time.sleep(0.6)  # noqa: ASYNC251 - the loop of both
            assert (await wire.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
            wire.close()
        assert it.seen.faults == []


async def test_late_bodies_are_not_waited_for() -> None:
    async with rig(ENGINE, config=ProxyConfig(header_timeout=600.0, body_timeout=0.1)) as it:
        assert (await it.answer(post()[:-5])).startswith(b"HTTP/1.1 408 ")
        assert it.seen.faults == [ProxyFault.BODY_TIMEOUT]


async def test_b24_expect_is_answered_once_and_not_forwarded() -> None:
    """B24: one 100 at most, no 417, header not forwarded."""
    got: list[bytes] = []

    async def script(wire: Wire) -> None:
        got.extend((await wire.request()).values(b"expect"))
        await wire.send(plain(PLAIN))

    async with rig(script) as it:
        wire = await it.client()
        head, _, body = post(CHAT, "/v1/chat/completions", b"Expect: 100-continue").partition(b"\r\n\r\n")
        await wire.send(head + b"\r\n\r\n")
        assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await wire.send(body)
        assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await wire.reader.readexactly(len(PLAIN)) == PLAIN
        assert got == []
        wire.close()


async def test_b24_a_body_above_the_limit_is_not_invited() -> None:
    """B24: 413 at once, no 100 before it."""
    async with rig(ENGINE, config=SMALL) as it:
        head = post(b"", "/v1/completions", b"Expect: 100-continue").replace(b"Length: 0", b"Length: 5000")
        assert (await it.answer(head)).startswith(b"HTTP/1.1 413 ")


BIG = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":7000}'


async def test_b24_b31_while_the_budget_is_spent() -> None:
    """B24, B31: Expect gets one 100 and the 429; a preflight passes, and what it allowed is on the 429."""
    hold = asyncio.Event()

    async def script(wire: Wire) -> None:
        while True:
            if (await wire.request()).line.startswith(b"OPTIONS"):
                await wire.send(plain(b"", "200 OK", b"access-control-allow-origin: http://ui"))
                continue
            await hold.wait()
            await wire.send(plain(PLAIN))

    async with rig(script, capacity=8000, policy=Policy.STATIC) as it:
        first = asyncio.create_task(it.post(BIG))
        await eventually(lambda: len(it.gate.ledger) == 1)
        preflight = await it.talk(get("/v1/chat/completions", b"Origin: http://ui", method="OPTIONS"))
        assert preflight.startswith(b"HTTP/1.1 200 ")
        wire = await it.client()
        expecting = post(BIG, "/v1/chat/completions", b"Expect: 100-continue", b"Origin: http://ui")
        head, _, body = expecting.partition(b"\r\n\r\n")
        await wire.send(head + b"\r\n\r\n")
        assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await wire.send(body)
        refused = await wire.reader.readuntil(b"\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"Access-Control-Allow-Origin: http://ui" in refused
        assert b"Access-Control-Expose-Headers: Retry-After" in refused
        wire.close()
        hold.set()
        assert (await first).startswith(b"HTTP/1.1 200 ")


async def test_e12_probes_answer_while_the_budget_is_spent() -> None:
    """E12: a full gate is alive and ready: refusing is its work, not a fault to restart it for."""
    hold = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await hold.wait()
        await wire.send(plain(PLAIN))

    async with rig(script, capacity=8000, policy=Policy.STATIC) as it:
        first = asyncio.create_task(it.post(BIG))
        await eventually(lambda: len(it.gate.ledger) == 1)
        for _ in range(10):
            assert (await it.post(BIG)).startswith(b"HTTP/1.1 429 ")
            for path in ("/healthz", "/readyz"):
                assert (await it.talk(get(path))).startswith(b"HTTP/1.1 200 ")
        hold.set()
        await first


async def test_own_routes_live_apart_from_the_engine() -> None:
    """E12: alive while the engine is not; ready says why it is not."""
    async with rig(ENGINE, url="http://127.0.0.1:1", ready=lambda: (False, "engine_unreachable")) as it:
        assert (await it.talk(get("/healthz"))).startswith(b"HTTP/1.1 200 ")
        answer = await it.talk(get("/readyz"))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {
            "ready": False,
            "reason": "engine_unreachable",
        }
        head = await it.talk(get("/healthz", method="HEAD"))
        assert head.endswith(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/unheard-of", 404),
        ("POST", "/sleep", 404),
        ("GET", "/server_info", 404),
        ("GET", "/v1/chat/completions", 405),
        ("HEAD", "/v1/chat/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("CONNECT", "h:443", 404),
    ],
)
async def test_routes_that_are_not_served(method: str, path: str, status: int) -> None:
    async with rig(ENGINE) as it:
        answer = await it.talk(get(path, method=method))
        assert answer.split(b" ", 2)[1] == b"%d" % status
        assert (b"\r\nAllow: POST" in answer) is (status == 405)
        assert it.engine.accepted == 0


async def test_opened_routes_pass() -> None:
    config = ProxyConfig(opened=("/v1/unheard-of",), admin_opened=("/sleep",))
    async with rig(ENGINE, config=config) as it:
        for path in ("/v1/unheard-of", "/sleep"):
            assert (await it.talk(get(path, method="POST"))).startswith(b"HTTP/1.1 200 ")
        assert it.seen.admissions == 0


async def test_refusals_of_the_gate() -> None:
    """E07: busy is 429 with whole seconds to wait; never is 400 and no time."""
    hold = asyncio.Event()

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await hold.wait()
            await wire.send(plain(PLAIN))

    big = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":7000}'
    async with rig(script, capacity=8000, policy=Policy.STATIC) as it:
        first = asyncio.create_task(it.post(big))
        await eventually(lambda: len(it.gate.ledger) == 1)
        await asyncio.gather(*(it.post(b"%b" % big.replace(b"7000", b"7001")) for _ in range(3)))
        refused = [record for record in it.seen.records if record.reject is not None]
        assert {record.status for record in refused} == {429}
        never = await it.post(big.replace(b"7000", b"9000"))
        assert never.startswith(b"HTTP/1.1 400 ")
        assert b"retry-after" not in never.lower()
        assert it.seen.records[-1].reject is RejectReason.CAPACITY  # tighter than the context here
        busy = await it.post(big)
        waits = [line for line in busy.split(b"\r\n") if line.lower().startswith(b"retry-after:")]
        assert 1 <= int(waits[0].partition(b":")[2]) <= 60
        hold.set()
        assert (await first).startswith(b"HTTP/1.1 200 ")


async def test_bad_body_changes_nothing() -> None:
    async with rig(ENGINE) as it:
        answer = await it.post(b'{"model":')
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert (it.seen.admissions, it.engine.accepted) == (0, 0)


async def test_upgrades_are_refused() -> None:
    lines = (b"Upgrade: websocket", b"Sec-WebSocket-Key: x", b"Sec-WebSocket-Version: 13")
    async with rig(ENGINE) as it:
        request = get("/v1/realtime", *lines).replace(b"Connection: close", b"Connection: Upgrade, close")
        answer = await it.answer(request)
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert it.engine.accepted == 0


async def test_clients_over_tls(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(cert, key)
    theirs = ssl.create_default_context(cafile=str(cert))

    async def cut(wire: Wire) -> None:
        await wire.request()
        await wire.send(plain(PLAIN))
        await wire.request()
        await wire.send(STREAM_HEAD + chunk(event("a")))
        wire.reset()

    async with rig(cut, ssl=ours) as it:
        wire = Wire(*await asyncio.open_connection("localhost", it.port, ssl=theirs))
        await wire.send(post())
        await wire.reader.readuntil(PLAIN)
        await wire.send(post(CHAT_STREAM))
        await wire.reader.readuntil(event("a"))
        with pytest.raises(ConnectionResetError):
            await wire.reader.readuntil(b"0\r\n\r\n")
        wire.close()


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [("127.0.0.1:80", "127.0.0.1", 80), ("[::1]:80", "::1", 80), (":80", None, 80), ("h:0", "h", 0)],
)
def test_listen_addresses(listen: str, host: str | None, port: int) -> None:
    assert split_listen(listen) == (host, port)


@pytest.mark.parametrize("listen", ["80", "::1:80", "h:", "h:99999", "h:x"])
def test_bad_listen_addresses(listen: str) -> None:
    with pytest.raises(ValueError, match="listen address"):
        split_listen(listen)
