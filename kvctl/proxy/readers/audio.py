"""Speech bodies: a form with a sound file. Nothing in them can be counted; the duration bounds them.

The engine cuts sound into clips of thirty seconds and runs each as a prompt of its own. A second of sound is
at most ``TOKENS_PER_SECOND`` prompt tokens (Whisper's encoder; other families take half of that or less).
The duration is read from the headers of WAV and FLAC; for every other format it is what the bytes would last
at ``LEAST_BYTES_PER_SECOND`` (32 kbit/s). Text fields (``prompt``) add their bytes.
"""

import struct
from collections.abc import Iterator, Mapping
from email.message import Message

from kvctl.proxy.limits import BadRequest, Fields
from kvctl.proxy.readers.base import Asked, Counted, Facts, bounded
from kvctl.tokens.bound import text_bound

TOKENS_PER_SECOND = 50
LEAST_BYTES_PER_SECOND = 4000
MOST_BYTES_PER_SECOND = 1_600_000
CLIP_SECONDS = 30
_SMALL = 64 * 1024  # a field of more bytes than this is a file, whatever it says
_MOST_CLIPS = 4096

Form = dict[str, str]


def read_audio(facts: Facts, content_type: str, body: bytes) -> tuple[Form, Counted]:
    """The text fields of a multipart body, and its claim: a prompt for each clip of sound."""
    boundary = _boundary(content_type)
    if boundary is None:
        words = "The request is no multipart form: send the sound file as multipart/form-data."
        return {}, BadRequest(message=words, status=415, type="Unsupported Media Type", code=415)
    form: Form = {}
    seconds, found = 0.0, False
    for name, data in _parts(body, boundary):
        if name == "file" or len(data) > _SMALL:
            seconds, found = seconds + duration(data), True
        else:
            form[name] = data.tobytes().decode("utf-8", "replace")
    if not found:
        seconds = duration(memoryview(body))
    written = sum(text_bound(text) for text in form.values())
    fields = Fields(form)
    output = fields.integer("max_completion_tokens")
    asked = Asked(output=None if fields.wrongs or (output or 0) < 1 else output)
    return form, (asked, bounded(*_clips(facts, seconds, written)))


def _clips(facts: Facts, seconds: float, words: int) -> list[int]:
    """Prompt tokens of each clip. A clip of more tokens than the context is several, to be claimed whole."""
    whole, rest = divmod(min(seconds, _MOST_CLIPS * CLIP_SECONDS), CLIP_SECONDS)
    lengths = [float(CLIP_SECONDS)] * int(whole) + ([rest] if rest or not whole else [])
    context = facts.context() or 1 << 30
    prompts: list[int] = []
    for length in lengths:
        tokens = words + 8 + int(length * TOKENS_PER_SECOND + 1)
        while tokens > 0:
            prompts.append(min(tokens, context))
            tokens -= context
    return prompts


def _boundary(content_type: str) -> bytes | None:
    header = Message()
    header["Content-Type"] = content_type
    if header.get_content_type() != "multipart/form-data":
        return None
    boundary = header.get_boundary()
    return boundary.encode("latin-1", "replace") if boundary else None


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[str, memoryview]]:
    """Name and content of each part, without a copy of the body. Broken framing ends it."""
    view, mark = memoryview(body), b"--" + boundary
    start = body.find(mark)
    while start >= 0:
        start += len(mark)
        end = body.find(b"\r\n" + mark, start)
        head = body.find(b"\r\n\r\n", start, start + 8192)
        if end < 0 or head < 0 or head + 4 > end:
            return
        yield _name(body[start:head]), view[head + 4 : end]
        start = end + 2


def _name(head: bytes) -> str:
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            header = Message()
            header["Content-Disposition"] = value.decode("utf-8", "replace").strip()
            name = header.get_param("name", header="content-disposition")
            return name if isinstance(name, str) else ""
    return ""


def duration(data: memoryview) -> float:
    """Seconds of sound, at most. A header that makes it shorter than any sound could be is not believed."""
    known = _wav_seconds(data) or _flac_seconds(data)
    if known is None:
        return len(data) / LEAST_BYTES_PER_SECOND
    return max(known, len(data) / MOST_BYTES_PER_SECOND)


def _wav_seconds(data: memoryview) -> float | None:
    """From the slower of the two rates that the format chunk tells, and the bytes that there are."""
    head = data[:44].tobytes()
    if len(head) < 44 or not head.startswith(b"RIFF") or head[8:16] != b"WAVEfmt ":
        return None
    channels, samples, told, _, bits = struct.unpack_from("<HIIHH", head, 22)
    rate = min(told, channels * samples * bits // 8 or told)
    return len(data) / rate if rate >= 1000 else None


def _flac_seconds(data: memoryview) -> float | None:
    """From the stream's own count of samples."""
    head = data[:42].tobytes()
    if len(head) < 42 or not head.startswith(b"fLaC") or head[4] & 0x7F != 0:
        return None
    packed = int.from_bytes(head[18:26], "big")
    rate, samples = packed >> 44, packed & ((1 << 36) - 1)
    return samples / rate if rate and samples else None


def as_body(form: Mapping[str, str]) -> dict[str, object]:
    """The form as the other readers know bodies; ``stream`` comes as text."""
    return {key: form[key] for key in ("model", "stream", "priority") if key in form}
