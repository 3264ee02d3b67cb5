"""Chunks that are only counted, since they are like those before: relayed and told as any other."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.outcomes import EndReason
from kvctl.proxy.alike import alike
from kvctl.proxy.chunks import HEADS, payload_of
from kvctl.proxy.sniffer import StreamSniffer
from tests.effort import examples
from tests.proxy.harness import (
    CHAT_STREAM,
    DONE,
    LAST,
    STREAM_HEAD,
    USAGE_EVENT,
    Wire,
    chunk,
    event,
    post,
    rig,
)

MODEL = event("a")[:-2]
TEXTS = st.sampled_from(["", "b", "日本", '"', "\\", "\n", "stop", "\x7f", "x" * 300, "y" * 4000, "z" * 5000])
PARTS = st.builds(event, TEXTS, st.sampled_from([None, None, None, "stop"])) | st.sampled_from(
    [USAGE_EVENT, DONE, b": a comment\n\n", b"data: [DONE]\r\n\r\n", event("a").replace(b"\n\n", b"\r\n\r\n")]
)
WAYS = st.sampled_from(["whole", "whole", "whole", "in parts", "upper case", "extended", "cut"])


def framed(data: bytes, way: str) -> bytes:
    """The data in chunks, written in one of several ways."""
    if way == "in parts":
        return chunk(data[:3]) + chunk(data[3:])
    if way == "upper case":
        return b"%X\r\n%b\r\n" % (len(data), data)
    return b"%x;a=b\r\n%b\r\n" % (len(data), data) if way == "extended" else chunk(data)


@given(PARTS, WAYS, st.binary(max_size=3))
@settings(max_examples=examples(300), deadline=None)
def test_a_chunk_fits_where_its_event_does(part: bytes, way: str, noise: bytes) -> None:
    """What is looked at in its framing alone is what is found by taking the framing off."""
    known = alike(MODEL)
    assert known is not None
    data = framed(part.replace(b"b", noise), way)
    data = data[:-1] if way == "cut" else data
    payload = payload_of(data)
    inside = len(data) < len(HEADS) and payload.endswith(b"\n\n") and known.fits(payload[:-2])
    assert known.fits_framed(data) == (inside and data == chunk(payload))


@pytest.mark.parametrize("size", [1, 15, 16, 255, 256, 4095])
def test_the_head_of_a_whole_chunk_is_told_by_its_length(size: int) -> None:
    whole = chunk(b"x" * size)
    head = HEADS[len(whole)]
    assert head is not None
    assert whole.startswith(head)
    assert payload_of(head + whole[len(head) :]) == b"x" * size


def test_behind_a_part_of_an_event_nothing_is_only_counted() -> None:
    """The next bytes belong to what is not over yet, whatever they look like."""
    sniffer = StreamSniffer()
    sniffer.feed(event("a"))
    assert sniffer.like is not None
    for unfinished in (b"data: {", b": comment\r"):
        sniffer.feed(unfinished)
        assert sniffer.like is None
        sniffer.feed(b"\n\n" + event("a"))
        assert sniffer.like is not None
    sniffer.feed(event("", "stop"))
    assert sniffer.like is None


@given(st.lists(st.tuples(PARTS, WAYS, st.booleans()), min_size=1, max_size=14))
@settings(max_examples=examples(25), deadline=None)
def test_nothing_that_is_relayed_or_told_depends_on_it(parts: list[tuple[bytes, str, bool]]) -> None:
    """Each part is a read of its own, or comes in two."""
    asyncio.run(_relayed([(part, way, cut) for part, way, cut in parts if part != DONE]))


async def _relayed(parts: list[tuple[bytes, str, bool]]) -> None:
    sent = [(event("a"), "whole", False), (event("b"), "whole", False), *parts]
    alone = StreamSniffer()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD)
        for part, way, cut in sent:
            data = framed(part, way)
            for piece in (data[:9], data[9:]) if cut else (data,):
                await wire.send(piece)
                await asyncio.sleep(0.0005)
        await wire.send(LAST)
        await wire.gone()

    for part, _, _ in sent:
        alone.feed(part)
    async with rig(script) as it:
        wire = await it.client()
        await wire.send(post(CHAT_STREAM))
        await wire.reader.readuntil(b"\r\n\r\n")
        body = b""
        while size := int(await wire.reader.readuntil(b"\r\n"), 16):
            body += (await wire.reader.readexactly(size + 2))[:-2]
        assert body == b"".join(part for part, _, _ in sent)
        await it.quiet()
        wire.close()
        found = alone.found
        output = found.output_tokens if found.output_tokens is not None else found.tokens
        assert it.seen.records[0].output_tokens == output
        assert it.ended[0].record.output_tokens == output


async def test_what_is_only_counted_reaches_the_ledger_while_it_comes() -> None:
    """Also where the client leaves in the middle."""
    arrived = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(STREAM_HEAD)
        for number in range(40):
            await wire.send(chunk(event(str(number))))
            await arrived.wait()
            arrived.clear()
        await wire.gone()

    async with rig(script) as it:
        wire = await it.client()
        await wire.send(post(CHAT_STREAM))
        for number in range(40):
            await wire.reader.readuntil(event(str(number)))
            (lease,) = it.keeper.gate.ledger
            assert lease.output_tokens == number + 1
            arrived.set()
        wire.close()
        await it.quiet()
        assert it.reasons == [EndReason.CLIENT_GONE]
        assert it.ended[0].record.output_tokens == 40
        assert it.seen.records[0].output_tokens == 40
