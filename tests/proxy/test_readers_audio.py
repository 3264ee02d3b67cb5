"""Speech bodies: bounded by the sound that they hold, and never parsed as JSON."""

import struct
from collections.abc import Iterable

import pytest

from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Reader
from kvctl.proxy.limits import BadRequest
from kvctl.proxy.readers.audio import (
    LEAST_BYTES_PER_SECOND,
    MOST_BYTES_PER_SECOND,
    TOKENS_PER_SECOND,
    duration,
)
from kvctl.tokens.chain import ChainCounter
from tests.proxy.harness import PLAIN, Request, Wire, plain, rig
from tests.proxy.reading import route_of, shape

SPEECH = route_of(VLLM(), "/v1/audio/transcriptions")
TYPE = 'multipart/form-data; boundary="a b"'


def wav(seconds: float, rate: int = 32_000) -> bytes:
    size = int(seconds * rate)
    form = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        36 + size,
        b"WAVE",
        b"fmt ",
        16,
        1,
        1,
        rate // 2,
        rate,
        2,
        16,
        b"data",
        size,
    )
    return form + bytes(size)


def flac(seconds: int, rate: int = 44_100) -> bytes:
    packed = (rate << 44 | 1 << 41 | 15 << 36 | seconds * rate).to_bytes(8, "big")
    return b"fLaC\x80\x00\x00\x22" + bytes(10) + packed + bytes(16 + 60_000)


def form_of(sound: bytes, fields: Iterable[tuple[str, str]] = (("model", "whisper"),)) -> bytes:
    parts = [
        f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode() for name, value in fields
    ]
    parts.append(b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + sound)
    return b"".join(b"--a b\r\n" + part + b"\r\n" for part in parts) + b"--a b--\r\n"


@pytest.mark.parametrize(
    ("sound", "seconds"),
    [
        (wav(90), 90.0),
        (flac(60), 60.0),
        (bytes(LEAST_BYTES_PER_SECOND * 7), 7.0),
        (b"", 0.0),
        (b"RIFF", 4 / LEAST_BYTES_PER_SECOND),
        (b"fLaC" + bytes(100), 104 / LEAST_BYTES_PER_SECOND),
    ],
)
def test_how_long_it_lasts(sound: bytes, seconds: float) -> None:
    assert duration(memoryview(sound)) == pytest.approx(seconds, rel=0.01)


def test_a_header_that_claims_no_time_at_all_is_not_believed() -> None:
    """A length that no sound of so many bytes can have is put down to the bytes."""
    lying = bytearray(flac(60) + bytes(500_000))
    lying[18:26] = (44_100 << 44 | 1).to_bytes(8, "big")
    assert duration(memoryview(lying)) == len(lying) / MOST_BYTES_PER_SECOND
    lying = bytearray(wav(60))
    lying[28:32] = (1 << 31).to_bytes(4, "little")
    assert duration(memoryview(lying)) == pytest.approx(60, rel=0.01)


async def test_clips_are_prompts_of_their_own(tiny_counter: ChainCounter) -> None:
    """The engine runs clips of thirty seconds side by side: 75 seconds are three prompts."""
    reader = Reader(tiny_counter, VLLM(), context=lambda: 8192)
    asked = await shape(reader, SPEECH, form_of(wav(75)), TYPE)
    assert (len(asked.prompts), asked.exact, asked.model) == (3, False, "whisper")
    assert 30 * TOKENS_PER_SECOND < asked.prompts[0] < 30 * TOKENS_PER_SECOND + 50
    assert asked.prompts[2] < asked.prompts[0]
    short = Reader(tiny_counter, VLLM(), context=lambda: 448)
    pieces = (await shape(short, SPEECH, form_of(wav(30)), TYPE)).prompts
    assert max(pieces) == 448
    assert sum(pieces) > 30 * TOKENS_PER_SECOND


async def test_fields_of_the_form(tiny_reader: Reader) -> None:
    fields = [("model", "m"), ("stream", "true"), ("max_completion_tokens", "50"), ("prompt", "w" * 300)]
    asked = await shape(tiny_reader, SPEECH, form_of(wav(1), fields), TYPE)
    assert (asked.model, asked.stream, asked.asked_output) == ("m", True, 50)
    assert asked.prompts[0] > 350
    odd = await shape(tiny_reader, SPEECH, form_of(wav(1), [("max_completion_tokens", "x")]), TYPE)
    assert odd.asked_output is None


@pytest.mark.parametrize(
    "sent", ["application/json", "", "multipart/form-data", "multipart/mixed; boundary=x"]
)
async def test_what_is_no_form_is_refused(tiny_reader: Reader, sent: str) -> None:
    read = await tiny_reader.read(SPEECH, {"Content-Type": sent}, b"{}")
    assert isinstance(read, BadRequest)
    assert read.status == 415


@pytest.mark.parametrize("body", [b"", b"--a b", b"--a b\r\n\r\n", b"--a b\r\nx\r\n--a b--", b"\x00" * 9000])
async def test_broken_forms_are_bounded_by_their_bytes(tiny_reader: Reader, body: bytes) -> None:
    asked = await shape(tiny_reader, SPEECH, body, TYPE)
    assert not asked.exact
    assert asked.prompts[0] >= len(body) / LEAST_BYTES_PER_SECOND * TOKENS_PER_SECOND


@pytest.mark.parametrize("chunked", [False, True])
async def test_a31_eight_megabytes_of_sound_pass_untouched(tiny_reader: Reader, chunked: bool) -> None:
    """A31: a multipart upload, with and without Content-Length: no JSON parse, no hang, the same bytes."""
    body = form_of(bytes(8 * 1024 * 1024), [("model", "m"), ("response_format", "json")])
    got: list[Request] = []

    async def script(wire: Wire) -> None:
        got.append(await wire.request())
        await wire.send(plain(PLAIN))
        await wire.gone()

    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    lines = (
        b"POST /v1/audio/transcriptions HTTP/1.1",
        b"Host: x",
        b"Content-Type: " + TYPE.encode(),
        framing,
    )
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    async with rig(script, reader=tiny_reader, capacity=1 << 22) as it:
        answer = await it.answer(b"\r\n".join(lines) + b"\r\n\r\n" + sent)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert [request.body for request in got] == [body]
    assert got[0].values(b"content-type") == [TYPE.encode()]
