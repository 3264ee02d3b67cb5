"""Reads along with an answer, on a copy: tokens so far, usage, how it ended, errors inside a 200.

Nothing here alters or delays what is relayed. The result does not depend on how the bytes were split.
An event larger than ``MAX_EVENT`` is not read (it counts as one token); memory stays bounded.
"""

import re
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

MAX_EVENT = 256 * 1024  # bytes
MAX_JSON = 64 * 1024  # bytes of a plain answer that are kept, from its end

_BORDER = b"\n\n"


@dataclass(slots=True)
class Findings:
    """What an answer showed so far. None: it did not say."""

    tokens: int = 0  # output tokens over all choices, as counted
    output_tokens: int | None = None  # by the engine's own usage
    prompt_tokens: int | None = None
    finished: bool = False  # a finish reason was seen
    capped: bool = False  # a choice ended at its limit
    error: bool = False  # an error object inside the answer
    recognised: bool = False  # the format is one that is understood


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


# --- what events look like --------------------------------------------------------------------------


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Delta(msgspec.Struct):
    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    """OpenAI's chat and completion chunks; ``type`` and ``token`` give away the other formats."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    type: str | None = None
    token: Any = None


class _Answer(msgspec.Struct):
    """A plain answer of any of the APIs."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    stop_reason: str | None = None  # Anthropic
    status: str | None = None  # OpenAI responses
    details: Any = None  # TGI


_EVENT = msgspec.json.Decoder(_Event)
_ANSWER = msgspec.json.Decoder(_Answer)
_USAGE = msgspec.json.Decoder(_Usage)
_CAPPED = frozenset({"length", "max_tokens", "incomplete", "max_output_tokens"})


def _natural(value: int | None) -> int | None:
    """A count, or None for what is none."""
    return value if value is not None and value >= 0 else None


def _take_usage(found: Findings, usage: _Usage) -> None:
    prompt, output = _natural(usage.prompt_tokens), _natural(usage.completion_tokens)
    prompt = _natural(usage.input_tokens) if prompt is None else prompt
    output = _natural(usage.output_tokens) if output is None else output
    found.prompt_tokens = found.prompt_tokens if prompt is None else prompt
    found.output_tokens = found.output_tokens if output is None else output


def _take_finish(found: Findings, reason: object) -> None:
    if isinstance(reason, str):
        found.finished = True
        found.capped = found.capped or reason in _CAPPED


# --- event streams ----------------------------------------------------------------------------------


class StreamSniffer:
    """Reads a server-sent event stream. Lines may end in LF, CRLF or CR."""

    __slots__ = ("_per_choice", "_skip_lf", "_skipping", "_tail", "found")

    def __init__(self) -> None:
        self.found = Findings()
        self._tail = bytearray()  # of an event that is not over, line ends made LF
        self._skip_lf = False  # the last byte was a CR: an LF now belongs to it
        self._skipping = False  # inside an event that is too large to be read
        self._per_choice: dict[int, int] = {}

    @property
    def at_border(self) -> bool:
        """Whether the last event was ended by its empty line."""
        return not self._tail and not self._skipping

    def feed(self, data: bytes) -> int:
        """More of the stream; returns the output tokens that it brought."""
        before = self.found.tokens
        if self._skip_lf or b"\r" in data:
            data = self._plain_line_ends(data)
        tail = self._tail
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
        """An event that is too large is let go; the LF that may begin its end does not count."""
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
            self._payload(block[6:])
            return
        values = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if values:
            self._payload(b"\n".join(values))

    def _payload(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            return
        try:
            event = _EVENT.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        if event.choices is not None:
            self._openai(event)
        elif event.error is not None:
            self.found.error = True
        elif event.type is not None or event.token is not None:
            self._other(payload)
        elif event.usage is not None:
            _take_usage(self.found, event.usage)

    def _openai(self, event: _Event) -> None:
        found, choices = self.found, event.choices or []
        found.recognised = True
        for choice in choices:
            if choice.finish_reason is not None:
                _take_finish(found, choice.finish_reason)
            new = _tokens_in(choice)
            if event.usage is not None and event.usage.completion_tokens is not None:
                # usage on every chunk counts this choice alone
                new = event.usage.completion_tokens - self._per_choice.get(choice.index, 0)
            if new > 0:
                self._per_choice[choice.index] = self._per_choice.get(choice.index, 0) + new
                found.tokens += new
        if event.usage is not None and not choices:
            _take_usage(found, event.usage)
        if event.error is not None:
            found.error = True

    def _other(self, payload: bytes) -> None:
        event = msgspec.json.decode(payload)
        if "token" in event:
            _read_tgi(self.found, event)
        elif not _read_typed(self.found, str(event.get("type"))):
            _read_typed_usage(self.found, event)


def _tokens_in(choice: _Choice) -> int:
    """Tokens that a chunk brought for a choice. The chunk that only names the role brought none."""
    if choice.token_ids is not None:
        return len(choice.token_ids)
    delta = choice.delta
    if delta is None or delta.role is None or choice.finish_reason is not None:
        return 1
    return 1 if delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls else 0


def _read_tgi(found: Findings, event: dict[str, Any]) -> None:
    found.recognised = True
    if event["token"] is not None:
        found.tokens += 1
    details = event.get("details")
    if isinstance(details, dict):
        _take_finish(found, details.get("finish_reason"))
        if isinstance(details.get("generated_tokens"), int):
            found.output_tokens = _natural(details["generated_tokens"])


def _read_typed(found: Findings, kind: str) -> bool:
    """Events of Anthropic's and OpenAI's typed streams that say all by their type."""
    if kind == "content_block_delta" or (kind.startswith("response.") and kind.endswith(".delta")):
        found.recognised = True
        found.tokens += 1
        return True
    if kind in ("error", "response.failed"):
        found.error = True
        return True
    return False


def _read_typed_usage(found: Findings, event: dict[str, Any]) -> None:
    """message_start, message_delta (Anthropic), response.completed, response.incomplete (OpenAI)."""
    inner = next((event[key] for key in ("message", "response") if isinstance(event.get(key), dict)), event)
    if isinstance(event.get("delta"), dict):
        _take_finish(found, event["delta"].get("stop_reason"))
    if inner is not event and inner.get("status") in ("completed", "incomplete"):
        _take_finish(found, inner["status"])
    try:
        _take_usage(found, msgspec.convert(inner.get("usage") or {}, _Usage))
    except msgspec.ValidationError:
        return


# --- plain answers ----------------------------------------------------------------------------------

# A quoted word before a colon cannot stand inside a JSON string: its quotes would be escaped there.
_USAGE_AT = re.compile(rb'"usage"\s*:\s*(\{)')
_FINISH_AT = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"([a-z_]+)"')


class JsonSniffer:
    """Reads a plain JSON answer: all of it up to ``MAX_JSON`` bytes, else what its last bytes show."""

    __slots__ = ("_kept", "_size", "found")

    def __init__(self) -> None:
        self.found = Findings()
        self._kept = bytearray()
        self._size = 0

    @property
    def at_border(self) -> bool:
        """An event can never be added to a JSON document."""
        return False

    def feed(self, data: bytes) -> int:
        """More of the answer. Its tokens are known only at its end: always 0."""
        self._size += len(data)
        self._kept += data
        if len(self._kept) > 2 * MAX_JSON:
            del self._kept[:-MAX_JSON]
        return 0

    def end(self) -> None:
        """The answer is whole."""
        if self._size > MAX_JSON:
            self._read_tail(bytes(self._kept[-MAX_JSON:]))
            return
        try:
            self._read(_ANSWER.decode(self._kept))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return

    def _read(self, answer: _Answer) -> None:
        found = self.found
        found.error = answer.error is not None
        for choice in answer.choices or ():
            _take_finish(found, choice.finish_reason)
        _take_finish(found, answer.stop_reason)
        _take_finish(found, answer.status)
        if isinstance(answer.details, dict):
            _read_tgi(found, {"token": None, "details": answer.details})
        if answer.usage is not None:
            _take_usage(found, answer.usage)
        found.recognised = answer.usage is not None or answer.choices is not None

    def _read_tail(self, tail: bytes) -> None:
        for reason in _FINISH_AT.findall(tail):
            _take_finish(self.found, reason.decode("ascii"))
        places = [match.start(1) for match in _USAGE_AT.finditer(tail)]
        for place in reversed(places):
            usage = _object_at(tail, place)
            if usage is not None:
                _take_usage(self.found, usage)
                self.found.recognised = True
                return


def _object_at(data: bytes, start: int) -> _Usage | None:
    """The usage object that begins at ``start``; it holds no strings, so braces can be counted."""
    depth = 0
    for place in range(start, len(data)):
        depth += {0x7B: 1, 0x7D: -1}.get(data[place], 0)
        if depth == 0:
            try:
                return _USAGE.decode(data[start : place + 1])
            except msgspec.MsgspecError:
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


def sniffer_for(content_type: bytes, content_encoding: bytes) -> Sniffer:
    """The reader for an answer's headers (both values as sent, empty when absent)."""
    if content_encoding.strip().lower() not in (b"", b"identity"):
        return NoSniffer()
    kind = content_type.partition(b";")[0].strip().lower()
    if kind == b"text/event-stream":
        return StreamSniffer()
    return JsonSniffer() if kind.endswith((b"/json", b"+json")) else NoSniffer()
