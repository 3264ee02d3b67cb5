"""The engine's answers reach the client as they were sent."""

import asyncio
import gzip
import hashlib

import pytest

from kvctl.core.outcomes import EndReason, ProxyFault
from kvctl.proxy.seams import ProxyConfig
from tests.proxy.harness import (
    CHAT,
    CHAT_STREAM,
    DONE,
    LAST,
    PLAIN,
    STREAM,
    STREAM_HEAD,
    USAGE_EVENT,
    Wire,
    answering,
    chunk,
    event,
    get,
    plain,
    post,
    rig,
)
from tests.steady import in_time


def dechunk(data: bytes) -> tuple[bytes, bool]:
    """The body in chunked framing, and whether it ended."""
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return body, rest == b"\r\n"
        body, data = body + rest[:length], rest[length + 2 :]
    return body, False


def split(answer: bytes) -> tuple[bytes, list[bytes], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return status, lines, body


async def test_plain_answer() -> None:
    async with rig(answering(plain(PLAIN))) as it:
        status, lines, body = split(await it.post())
        assert (status, body) == (b"HTTP/1.1 200 OK", PLAIN)
        assert b"content-length: %d" % len(PLAIN) in lines
        assert it.reasons == [EndReason.FINISHED]
        assert it.ended[0].record.output_tokens == 3
        assert it.ended[0].record.prompt_tokens == 5
        assert it.engine.requests == []
    record = it.seen.records[0]
    assert (record.route, record.status, record.end) == ("chat", 200, EndReason.FINISHED)
    assert record.output_tokens == 3


async def test_stream_is_counted_and_relayed() -> None:
    """B20: a streamed answer tells proxies in front not to buffer it."""
    async with rig(answering(STREAM_HEAD + chunk(STREAM) + LAST)) as it:
        status, lines, body = split(await it.post(CHAT_STREAM))
        assert status == b"HTTP/1.1 200 OK"
        assert dechunk(body) == (STREAM, True)
        assert b"X-Accel-Buffering: no" in lines
        assert b"Cache-Control: no-cache" in lines
        assert it.reasons == [EndReason.FINISHED]
        assert it.ended[0].record.output_tokens == 3


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_b09_multi_byte_characters_cut_at_any_place(size: int) -> None:
    """B09: CJK and emoji, a few bytes a segment: the relay is equal byte for byte."""
    body = "".join(f"data: 日本語{n}🙂\n\n" for n in range(20)).encode() + STREAM

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send_split(STREAM_HEAD + chunk(body) + LAST, size)
        await wire.gone()

    async with rig(script) as it:
        _, _, got = split(await it.post(CHAT_STREAM))
        assert dechunk(got) == (body, True)


async def test_b10_one_line_of_three_megabytes() -> None:
    """B10: an event larger than any reader's line limit is relayed intact."""
    huge = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 3_000_000 + b'"}}]}\n\n'
    body = huge + event("a", "stop") + DONE
    async with rig(answering(STREAM_HEAD + chunk(body) + LAST)) as it:
        _, _, got = split(await it.post(CHAT_STREAM))
        assert hashlib.sha256(dechunk(got)[0]).digest() == hashlib.sha256(body).digest()
        assert it.reasons == [EndReason.FINISHED]


async def test_b12_compressed_body_stays_compressed() -> None:
    """B12: nobody inflates on the way: header and bytes agree."""
    body = b"\x1f\x8b\x08\x00 not looked into"
    async with rig(answering(plain(body, "200 OK", b"content-encoding: gzip"))) as it:
        _, lines, got = split(await it.post())
        assert got == body
        assert b"content-encoding: gzip" in lines


async def test_b12_compressed_stream_stays_compressed() -> None:
    """B12: events in gzip are relayed as they are; what cannot be read is no error."""
    body = gzip.compress(STREAM)
    head = STREAM_HEAD[:-2] + b"content-encoding: gzip\r\n\r\n"
    async with rig(answering(head + chunk(body) + LAST)) as it:
        _, lines, got = split(await it.post(CHAT_STREAM))
        assert gzip.decompress(dechunk(got)[0]) == STREAM
        assert b"content-encoding: gzip" in lines
        assert it.reasons == [EndReason.FINISHED]


async def test_b20_every_event_is_sent_on_before_the_next_one_comes() -> None:
    """B20: nothing is gathered: each event arrives while the engine waits to send the next."""
    arrived = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD)
        for number in range(50):
            await wire.send(chunk(event(str(number))))
            await arrived.wait()
            arrived.clear()
        await wire.send(chunk(event("", "stop") + DONE) + LAST)
        await wire.gone()

    async with rig(script) as it:
        wire = await it.client()
        await wire.send(post(CHAT_STREAM))
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert b"X-Accel-Buffering: no" in head
        assert b"Cache-Control: no-cache" in head
        for number in range(50):
            await wire.reader.readuntil(event(str(number)))
            arrived.set()
        await wire.reader.readuntil(LAST)
        wire.close()


@pytest.mark.parametrize("body", [CHAT, CHAT_STREAM], ids=["plain", "stream"])
async def test_b18_no_time_ends_a_long_answer(body: bytes) -> None:
    """B18: an answer outlasts every time limit there is; silence has none unless the operator sets it."""
    config = ProxyConfig(header_timeout=0.05, body_timeout=0.05, keepalive_timeout=0.05)
    events = [chunk(event(str(number))) for number in range(8)]

    async def script(wire: Wire) -> None:
        await wire.request()
        if body == CHAT:
            await asyncio.sleep(0.4)
            await wire.send(plain(PLAIN))
        else:
            await wire.send(STREAM_HEAD)
            for piece in events:
                await asyncio.sleep(0.05)
                await wire.send(piece)
            await wire.send(chunk(event("", "stop") + DONE) + LAST)
        await wire.gone()

    async def scenario() -> None:
        async with rig(script, config=config, connect_timeout=0.1) as it:
            answer = await it.post(body)
            assert answer.endswith(PLAIN if body == CHAT else LAST)
            assert it.reasons == [EndReason.FINISHED]

    await in_time(scenario, 0.05)


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ("400 Bad Request", b"x-a: b"),
        ("429 Too Many Requests", b"retry-after: 7"),
        ("503 Busy Now", b"x-a: b"),
    ],
)
async def test_b08_e20_refusals_of_the_engine_are_its_own(status: str, line: bytes) -> None:
    """B08, E20: 400, 429 and 503 of the engine pass verbatim, and the lease ends at once."""
    body = b'{"error":{"message":"no","code":1}}'
    async with rig(answering(plain(body, status, line))) as it:
        got_status, lines, got = split(await it.post(CHAT_STREAM))
        assert got_status == b"HTTP/1.1 " + status.encode()
        assert got == body
        assert line in lines
        assert not any(name.startswith(b"x-kvctl") for name in lines)
        assert it.reasons == [EndReason.ENGINE_REFUSED]


async def test_b08_error_inside_a_good_stream() -> None:
    """B08: a 200 whose first event is an error is relayed and is no finished answer."""
    body = b'data: {"error":{"message":"overloaded","code":503}}\n\n' + DONE
    async with rig(answering(STREAM_HEAD + chunk(body) + LAST)) as it:
        _, _, got = split(await it.post(CHAT_STREAM))
        assert dechunk(got) == (body, True)
        assert it.reasons == [EndReason.ENGINE_REFUSED]


async def test_capped_answer() -> None:
    body = event("a") + event("b", "length") + DONE
    async with rig(answering(STREAM_HEAD + chunk(body) + LAST)) as it:
        await it.post(CHAT_STREAM)
        assert it.reasons == [EndReason.CAPPED]
        assert it.ended[0].record.output_tokens == 2


async def test_b26_duplicates_keep_their_order_both_ways() -> None:
    """B26: five cookies and two links down, two traces up; Host is the engine's own."""
    cookies = [b"set-cookie: c%d=%d" % (n, n) for n in range(5)]
    got: list[tuple[bytes, bytes]] = []

    async def script(wire: Wire) -> None:
        got.extend((await wire.request()).headers)
        await wire.send(plain(PLAIN, "200 OK", *cookies, b"Link: <a>", b"Link: <b>"))
        await wire.gone()

    async with rig(script) as it:
        _, lines, _ = split(await it.post(CHAT, "/v1/chat/completions", b"X-Trace: 1", b"X-Trace: 2"))
        assert [line for line in lines if line.startswith(b"set-cookie")] == cookies
        assert [line for line in lines if line.startswith(b"Link")] == [b"Link: <a>", b"Link: <b>"]
        assert [value for name, value in got if name == b"X-Trace"] == [b"1", b"2"]
        assert [v for n, v in got if n.lower() == b"host"] == [b"127.0.0.1:%d" % it.engine.port]
        assert (b"X-Forwarded-Host", b"public.example") in got


async def test_b27_connection_headers_and_what_they_name_stop_here() -> None:
    """B27: hop-by-hop headers and those that Connection names do not travel, in either direction."""
    got: list[tuple[bytes, bytes]] = []

    async def script(wire: Wire) -> None:
        got.extend((await wire.request()).headers)
        await wire.send(
            plain(PLAIN, "200 OK", b"Connection: X-Hop", b"X-Hop: 1", b"Keep-Alive: timeout=5", b"X-Stays: 1")
        )
        await wire.gone()

    lines = (
        b"Connection: close, X-Internal-Auth",
        b"X-Internal-Auth: secret",
        b"TE: trailers",
        b"Proxy-Authorization: Basic eA==",
        b"Authorization: Bearer t",
        b"traceparent: 00-1-2-01",
    )
    async with rig(script) as it:
        _, back, _ = split(await it.talk(post(CHAT, "/v1/chat/completions", *lines)))
        names = {name.lower() for name, _ in got}
        assert names & {b"connection", b"x-internal-auth", b"te", b"proxy-authorization", b"expect"} == set()
        assert {b"authorization", b"traceparent", b"content-type"} <= names
        back_names = {line.partition(b":")[0].lower() for line in back}
        assert back_names & {b"x-hop", b"keep-alive"} == set()
        assert b"x-stays" in back_names


@pytest.mark.parametrize("sent", [b"my-id-1", None])
async def test_request_id_is_kept_or_made_and_echoed(sent: bytes | None) -> None:
    got: list[bytes] = []

    async def script(wire: Wire) -> None:
        got.extend((await wire.request()).values(b"x-request-id"))
        await wire.send(plain(PLAIN))
        await wire.gone()

    async with rig(script) as it:
        lines = [b"X-Request-Id: " + sent] if sent else []
        _, back, _ = split(await it.post(CHAT, "/v1/chat/completions", *lines))
        assert len(got) == 1
        assert got[0] == sent or sent is None
        assert b"X-Request-Id: " + got[0] in back


async def test_http_1_0_client_gets_no_chunks() -> None:
    async with rig(answering(STREAM_HEAD + chunk(STREAM) + LAST)) as it:
        request = post(CHAT_STREAM).replace(b"HTTP/1.1", b"HTTP/1.0")
        status, lines, body = split(await it.talk(request))
        assert status == b"HTTP/1.0 200 OK"
        assert body == STREAM
        assert not any(line.lower().startswith(b"transfer-encoding") for line in lines)


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_b34_answers_without_a_body(status: str) -> None:
    """B34: 204 and 304, chunked by mistake: no body, and the client's connection goes on."""
    answer = f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    async with rig(answering(answer)) as it:
        wire = await it.client()
        for _ in range(2):
            await wire.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await wire.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + status.encode())
            assert b"transfer-encoding" not in head.lower()
        wire.close()


async def test_b34_head_then_get_on_one_connection() -> None:
    """B34: HEAD has the length and no bytes; the next request on the connection works."""
    head_only = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(PLAIN)

    async def script(wire: Wire) -> None:
        while True:
            request = await wire.request()
            await wire.send(head_only if request.line.startswith(b"HEAD") else plain(PLAIN))

    async with rig(script) as it:
        wire = await it.client()
        await wire.send(
            b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert b"content-length: %d" % len(PLAIN) in head
        await wire.reader.readuntil(b"\r\n\r\n")
        assert await wire.reader.readexactly(len(PLAIN)) == PLAIN
        wire.close()


async def test_answer_until_close() -> None:
    """No length, no chunks: the engine's clean close is the end, and is framed for the client."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + PLAIN)

    async with rig(script) as it:
        _, _, body = split(await it.post())
        assert dechunk(body) == (PLAIN, True)
        assert it.reasons == [EndReason.FINISHED]


async def test_interim_answers_are_not_the_answer() -> None:
    async with rig(answering(b"HTTP/1.1 103 Early Hints\r\nlink: <a>\r\n\r\n" + plain(PLAIN))) as it:
        status, lines, body = split(await it.post())
        assert (status, body) == (b"HTTP/1.1 200 OK", PLAIN)
        assert b"link: <a>" not in lines


async def test_tokens_reach_the_ledger_while_they_come() -> None:
    go_on = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD + chunk(event("a") + event("b")))
        await go_on.wait()
        await wire.send(chunk(event("", "stop") + USAGE_EVENT + DONE) + LAST)
        await wire.gone()

    async with rig(script) as it:
        wire = await it.client()
        await wire.send(post(CHAT_STREAM))
        await wire.reader.readuntil(event("b"))
        (lease,) = it.gate.ledger
        assert lease.output_tokens == 2
        go_on.set()
        await wire.reader.readuntil(LAST)
        await it.quiet()
        wire.close()


async def test_passed_routes_hold_no_lease() -> None:
    """A28: what only counts (tokenize, count_tokens) is passed and not charged."""
    async with rig(answering(plain(b'{"count":1}'))) as it:
        _, _, body = split(await it.post(b'{"prompt":"x"}', "/tokenize"))
        assert body == b'{"count":1}'
        assert it.seen.admissions == 0
        assert it.ended == []


async def test_a28_agents_do_not_get_past_the_gate_on_their_own_route() -> None:
    """A28: generation in Anthropic's form has a lease like every other; counting passes without one."""
    body = b'{"model":"m","max_tokens":80,"system":[],"messages":[{"role":"user","content":"hi"}]}'
    answer = b'{"type":"message","stop_reason":"end_turn","usage":{"input_tokens":3,"output_tokens":2}}'
    async with rig(answering(plain(answer), plain(b'{"input_tokens":3}'))) as it:
        _, _, counted = split(await it.post(body, "/v1/messages"))
        assert counted == answer
        assert [(end.record.reason, end.record.output_tokens) for end in it.ended] == [
            (EndReason.FINISHED, 2)
        ]
        _, _, counted = split(await it.post(body, "/v1/messages/count_tokens"))
        assert counted == b'{"input_tokens":3}'
        assert (it.seen.admissions, len(it.ended)) == (1, 1)


async def test_b31_preflight_passes_without_charge() -> None:
    """B31: OPTIONS goes to the engine's own CORS rules, whatever the budget."""
    async with rig(
        answering(b"HTTP/1.1 200 OK\r\naccess-control-allow-origin: *\r\ncontent-length: 0\r\n\r\n")
    ) as it:
        answer = await it.talk(get("/v1/chat/completions", b"Origin: http://ui", method="OPTIONS"))
        assert b"access-control-allow-origin: *" in answer
        assert it.seen.admissions == 0
        # ... and what it allowed holds for kvctl's own refusals
        for origin, allowed in ((b"http://ui", True), (b"http://other", False)):
            refused = await it.post(b"{", "/v1/chat/completions", b"Origin: " + origin)
            assert refused.startswith(b"HTTP/1.1 400 ")
            assert (b"Access-Control-Allow-Origin: *" in refused) is allowed
            assert (b"Access-Control-Expose-Headers: Retry-After" in refused) is allowed


async def test_strangers_cannot_use_up_the_origins_that_are_remembered() -> None:
    answer = b"HTTP/1.1 200 OK\r\naccess-control-allow-origin: *\r\ncontent-length: 0\r\n\r\n"
    async with rig(answering(answer)) as it:
        for number in range(300):
            await it.talk(get("/v1/models", b"Origin: http://stranger-%d" % number, method="OPTIONS"))
        endless = b"http://" + b"u" * 5000
        for origin in (b"http://ui", endless):
            await it.talk(get("/v1/models", b"Origin: " + origin, method="OPTIONS"))
        known = [
            b"Allow-Origin" in await it.post(b"{", "/v1/chat/completions", b"Origin: " + origin)
            for origin in (b"http://ui", b"http://stranger-0", b"http://stranger-299", endless)
        ]
        assert known == [True, False, True, False]


async def test_keep_alive_client_and_engine() -> None:
    """Many requests, one connection on either side."""
    async with rig(answering(plain(PLAIN))) as it:
        wire = await it.client()
        for _ in range(5):
            await wire.send(post())
            await wire.reader.readuntil(b"\r\n\r\n")
            assert await wire.reader.readexactly(len(PLAIN)) == PLAIN
        assert it.engine.accepted == 1
        assert it.seen.faults == []
        wire.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with rig(answering(plain(b'{"n":1}'), plain(b'{"n":2}'), plain(b'{"n":3}'))) as it:
        answer = await it.talk(post() * 2 + post(CHAT, "/v1/chat/completions", b"Connection: close"))
        assert [body[:7] for body in answer.split(b"\r\n\r\n")[1:]] == [b'{"n":1}', b'{"n":2}', b'{"n":3}']


async def test_b19_three_hundred_streams_at_once() -> None:
    """B19: no pool limit: 300 streams are 300 connections to the engine."""
    gate = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await gate.wait()
        await wire.send(STREAM_HEAD + chunk(STREAM) + LAST)
        await wire.gone()

    async with rig(script, capacity=1_000_000) as it:
        calls = [asyncio.create_task(it.post(CHAT_STREAM)) for _ in range(300)]
        while it.engine.open < 300:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        gate.set()
        answers = await asyncio.gather(*calls)
        assert all(dechunk(split(answer)[2]) == (STREAM, True) for answer in answers)
        assert ProxyFault.CONNECT_FAILED not in it.seen.faults
