"""What the engine tells of a stored response: in the answer that begins it, and when it is asked for.

The name of a response may be the caller's own choice (vLLM's ``request_id``), and two may bear one name. So
what is told is believed only of the response that was begun: generated in the background, and of its moment.
"""

import re
from collections.abc import Callable

import msgspec

from kvctl.core.outcomes import EndReason
from kvctl.proxy.dialects import UNREADABLE, Usage

MOST_BEGINNING = 1024 * 1024  # bytes of an answer in which its name is looked for
LIVES = frozenset({"queued", "in_progress"})
END_OF = {
    "completed": EndReason.FINISHED,
    "incomplete": EndReason.CAPPED,
    "failed": EndReason.ENGINE_ERROR,
    "cancelled": EndReason.CALLER_CANCELLED,
}

LONGEST_ID = 256
"""Characters of a name that is remembered."""
_ASKABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,255}")
_BORDER = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LONGEST_BORDER = 4


class Told(msgspec.Struct, frozen=True, gc=False):
    """A response, as far as it matters here."""

    id: str
    status: str = ""
    background: bool | None = None
    created_at: float | None = None
    usage: Usage | None = None

    @property
    def askable(self) -> bool:
        """Whether it can be asked for by its name as it is, in a path."""
        return _ASKABLE.fullmatch(self.id) is not None

    def is_same(self, begun: "Told") -> bool:
        """Whether this is the response that was begun so, and no later one of its name."""
        return self.id == begun.id and self.background is True and self.created_at == begun.created_at


class _Event(msgspec.Struct, frozen=True, gc=False):
    response: Told


_TOLD = msgspec.json.Decoder(Told)
_EVENT = msgspec.json.Decoder(_Event)


def read_told(document: bytes) -> Told | None:
    """Of a plain answer; None: it is none of a response."""
    try:
        return _TOLD.decode(document)
    except UNREADABLE:
        return None


def _read_event(payload: bytes) -> Told | None:
    try:
        return _EVENT.decode(payload).response
    except UNREADABLE:
        return None


class Beginning:
    """Reads the answer that begins a response along, and tells of the response; None: it names none."""

    __slots__ = ("_head", "_looked", "_stream", "_tell")

    def __init__(self, tell: Callable[[Told | None], None], *, stream: bool) -> None:
        self._tell = tell
        self._stream = stream
        self._head = bytearray()
        self._looked = 0  # bytes of it in which no border begins

    def feed(self, data: bytes) -> "Beginning | None":
        """More of the body; None: there is nothing more to look for."""
        self._head += data
        if len(self._head) > MOST_BEGINNING:
            self._done(None)
            return None
        while self._stream and (border := _BORDER.search(self._head, self._looked)):
            event = bytes(self._head[: border.start()])
            del self._head[: border.end()]
            self._looked = 0
            payload = b"".join([line[5:] for line in event.splitlines() if line.startswith(b"data:")])
            found = _read_event(payload) if payload else None
            if found is not None:
                self._done(found)
                return None
        self._looked = max(len(self._head) - _LONGEST_BORDER + 1, 0)
        return self

    def end(self) -> None:
        """The answer is over, or nobody reads on."""
        self._done(None if self._stream else read_told(bytes(self._head)))

    def _done(self, told: Told | None) -> None:
        self._head.clear()
        tell, self._tell = self._tell, _nobody
        tell(told)


def _nobody(told: Told | None) -> None:
    """It was told already."""
