"""Reads a copy of an answer as it passes: tokens so far, usage, how it ended, errors inside a 200.

Nothing here alters or delays what is relayed. The result does not depend on how the bytes were split.
An event larger than ``MAX_EVENT`` is not read (it counts as one token); memory stays bounded. What the events
of each API say is told by ``proxy.dialects``.
"""

import re
from functools import lru_cache
from typing import Protocol

import msgspec

from kvctl.proxy.alike import Alike, alike
from kvctl.proxy.dialects import UNREADABLE, Events, Findings, Usage, read_answer, take_finish, take_usage

__all__ = ["Findings", "JsonSniffer", "NoSniffer", "Sniffer", "StreamSniffer", "sniffer_for"]

MAX_EVENT = 256 * 1024  # bytes
MAX_JSON = 64 * 1024  # bytes of a plain answer that are kept, from its end

_BORDER = b"\n\n"
_MOST_USAGE = 4096  # bytes of a usage object; with all its details one has some hundred
_MOST_PLACES = 16  # of the tail that may be the usage and are looked at, from its end
_TRIES = 8  # events of a stream that are tried as patterns for later ones


class Sniffer(Protocol):
    """Reads one answer."""

    found: Findings

    def feed(self, data: bytes) -> int:
        """More bytes; returns the output tokens that they brought."""

    def end(self) -> None:
        """The answer is whole."""

    @property
    def at_border(self) -> bool:
        """Whether an event may be added behind what came so far."""


# --- event streams ----------------------------------------------------------------------------------


def _is_plain_event(data: bytes) -> bool:
    """Whether ``data`` is one event in one line, as nearly all single events are."""
    end = len(data) - 2
    return data.startswith(b"data: ") and data.find(b"\n") == end <= MAX_EVENT and data.endswith(b"\n")


class StreamSniffer:
    """Reads a server-sent event stream. Lines may end in LF, CRLF or CR."""

    __slots__ = ("_alike", "_events", "_skip_lf", "_skipping", "_tail", "_tries", "found")

    def __init__(self) -> None:
        self._events = Events()
        self.found = self._events.found
        self._tail = bytearray()  # of an unfinished event, with line ends made LF
        self._skip_lf = False  # the last byte was a CR: an LF now belongs to it
        self._skipping = False  # inside an event that is too large to be read
        self._alike: Alike | None = None  # the look of events that need not be decoded
        self._tries = _TRIES

    @property
    def at_border(self) -> bool:
        """Whether the last event was ended by its empty line."""
        return not self._tail and not self._skipping

    @property
    def like(self) -> Alike | None:
        """The look of events that may be reported by ``pieces`` instead of fed; None: all must be fed."""
        return None if self._tail or self._skipping or self._skip_lf else self._alike

    def pieces(self, like: Alike, events: int) -> None:
        """``events`` events came that look like ``like``."""
        self._events.piece(like.index, events)

    def feed(self, data: bytes) -> int:
        """More of the stream; returns the output tokens that it brought."""
        tail, known = self._tail, self._alike
        whole = not (tail or self._skipping or self._skip_lf)
        if whole and known is not None and data.endswith(_BORDER) and known.fits(data[:-2]):
            self._events.piece(known.index)
            return 1
        before = self.found.tokens
        if self._skip_lf or b"\r" in data:
            data = self._plain_line_ends(data)
        if whole and _is_plain_event(data):
            self._line(data[:-2])
            return self.found.tokens - before
        if tail or self._skipping:
            start = max(len(tail) - 1, 0)
            tail += data
            if tail.find(_BORDER, start) < 0:
                self._bound()
                return 0
            data = bytes(tail)
            tail.clear()
        *events, rest = data.split(_BORDER)
        for event in events:
            known = None if self._skipping else self._alike
            if known is not None and known.fits(event):
                self._events.piece(known.index)
            else:
                self._event(event)
        tail += rest.lstrip(b"\n")
        self._bound()
        return self.found.tokens - before

    def end(self) -> None:
        """The stream is whole; a last event without its empty line is read all the same."""
        if self._tail or self._skipping:
            self._event(bytes(self._tail))
            self._tail.clear()

    def _plain_line_ends(self, data: bytes) -> bytes:
        if self._skip_lf and data.startswith(b"\n"):
            data = data[1:]
            self._skip_lf = False
        if data:
            self._skip_lf = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _bound(self) -> None:
        """Drop an event that is too large; the LF that may begin its end does not count."""
        ends = self._tail.endswith(b"\n")
        if len(self._tail) - ends > MAX_EVENT or self._skipping:
            self._skipping = True
            self._tail[:] = b"\n" if ends else b""

    def _event(self, block: bytes) -> None:
        block = block.lstrip(b"\n")
        if self._skipping or len(block) > MAX_EVENT:
            self._skipping = False
            self.found.tokens += 1
            return
        if block.startswith(b"data: ") and b"\n" not in block:
            self._line(block)
            return
        values = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if values and not self._events.read(b"\n".join(values)):
            self._alike = None

    def _line(self, event: bytes) -> None:
        """Read an event in one line that does not look like the known ones."""
        if not self._events.read(event[6:]):
            self._alike = None  # what it says may change what the others mean
        elif self._tries:
            self._tries -= 1
            self._alike = alike(event)


# --- plain answers ----------------------------------------------------------------------------------

_USAGE = msgspec.json.Decoder(Usage)
# a quoted word before a colon cannot be inside a JSON string: its quotes would be escaped there
_USAGE_AT = re.compile(rb'"usage"\s*:\s*(\{)')
_BRACE = re.compile(rb"[{}]")
_FINISH_AT = re.compile(
    rb'"(?:finish_reason|stop_reason|stop_type|status)"\s*:\s*(?:\{\s*"type"\s*:\s*)?"([a-z_]+)"'
)
_TOTAL_AT = re.compile(
    rb'"(?:(prompt_tokens|tokens_evaluated)|completion_tokens|tokens_predicted|generated_tokens)"\s*:\s*(\d{1,15})'
)


class JsonSniffer:
    """Reads a plain JSON answer: the whole of it up to ``MAX_JSON`` bytes, else what its last bytes tell."""

    __slots__ = ("_kept", "_kept_size", "_size", "found")

    def __init__(self) -> None:
        self.found = Findings()
        self._kept: list[bytes] = []
        self._size = self._kept_size = 0

    @property
    def at_border(self) -> bool:
        """An event can never be added to a JSON document."""
        return False

    def feed(self, data: bytes) -> int:
        """More of the answer. Its tokens are known only at its end: always 0."""
        self._size += len(data)
        self._kept_size += len(data)
        self._kept.append(data)
        if self._kept_size > 2 * MAX_JSON:
            self._kept = [b"".join(self._kept)[-MAX_JSON:]]
            self._kept_size = MAX_JSON
        return 0

    def end(self) -> None:
        """The answer is whole."""
        kept = self._kept[0] if len(self._kept) == 1 else b"".join(self._kept)
        if self._size > MAX_JSON:
            self._read_tail(kept[-MAX_JSON:])
        else:
            read_answer(self.found, kept)

    def _read_tail(self, tail: bytes) -> None:
        for reason in _FINISH_AT.findall(tail):
            take_finish(self.found, reason.decode("ascii"))
        places = [match.start(1) for match in _USAGE_AT.finditer(tail)]
        for place in places[: -_MOST_PLACES - 1 : -1]:
            usage = _object_at(tail, place)
            if usage is not None:
                take_usage(self.found, usage)
                self.found.recognised = True
                return
        for prompt, number in _TOTAL_AT.findall(tail):
            total = {"prompt_tokens" if prompt else "completion_tokens": int(number)}
            take_usage(self.found, Usage(**total))
            self.found.recognised = True


def _object_at(data: bytes, start: int) -> Usage | None:
    """The usage object that begins at ``start``; it holds no strings, so braces can be counted."""
    depth = 0
    for brace in _BRACE.finditer(data, start, start + _MOST_USAGE):
        depth += 1 if brace[0] == b"{" else -1
        if depth == 0:
            try:
                return _USAGE.decode(data[start : brace.end()])
            except UNREADABLE:
                return None
    return None


class NoSniffer:
    """For answers that cannot be read: compressed, or of another type."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found = Findings()

    @property
    def at_border(self) -> bool:
        """Unknown, so no."""
        return False

    def feed(self, data: bytes) -> int:
        """Reads nothing."""
        del data
        return 0

    def end(self) -> None:
        """Nothing was read."""


@lru_cache(maxsize=256)
def media_type(content_type: bytes) -> bytes:
    """The type alone, in lower case, of a Content-Type as sent."""
    return content_type.partition(b";")[0].strip().lower()


def sniffer_for(content_type: bytes, content_encoding: bytes) -> Sniffer:
    """The reader for an answer's headers (both values as sent, empty when absent)."""
    if content_encoding and content_encoding.strip().lower() not in (b"", b"identity"):
        return NoSniffer()
    kind = media_type(content_type)
    if kind == b"text/event-stream":
        return StreamSniffer()
    return JsonSniffer() if kind.endswith((b"/json", b"+json")) else NoSniffer()
