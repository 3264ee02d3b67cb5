"""Requests that ask for another protocol: none is spoken, and none slips past the meter."""

import pytest

from tests.proxy.harness import CHAT, PLAIN, Request, Wire, get, plain, post, rig


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"TLS/1.0"])
async def test_a_metered_request_stays_metered_and_its_wish_is_not_forwarded(protocol: bytes) -> None:
    """Java's client asks for h2c with every request; what it gets is HTTP/1.1."""
    got: list[Request] = []

    async def script(wire: Wire) -> None:
        got.append(await wire.request())
        await wire.send(plain(PLAIN))
        await wire.gone()

    wish = (
        b"Connection: Upgrade, HTTP2-Settings, close",
        b"Upgrade: " + protocol,
        b"HTTP2-Settings: AAMAAABk",
    )
    async with rig(script) as it:
        answer = await it.talk(post(CHAT, "/v1/chat/completions", *wish))
        assert it.seen.admissions == 1
    assert answer.startswith(b"HTTP/1.1 200 ")
    (request,) = got
    assert request.body == CHAT
    names = {name.lower() for name, _ in request.headers}
    assert names.isdisjoint({b"upgrade", b"http2-settings", b"connection"})


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/realtime/", "/unknown"])
async def test_a_websocket_is_refused_in_words(path: str) -> None:
    lines = (
        b"Upgrade: websocket",
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        b"Sec-WebSocket-Version: 13",
    )
    async with rig(_never_asked) as it:
        answer = await it.talk(get(path, *lines))
        assert it.engine.accepted == 0
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert (b"WebSocket" in answer) is ("realtime" in path)


async def _never_asked(wire: Wire) -> None:
    await wire.gone()
