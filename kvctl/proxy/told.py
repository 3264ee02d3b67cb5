"""What the engine says of a stored response: in the answer that begins it, and when asked for it.

The name of a response may be the caller's own choice (vLLM's ``request_id``), and two may have the same name.
So what the engine says is believed only if it is of the response that was begun: generated in the background,
and created at that moment.
"""

import re
from collections.abc import Callable

import msgspec

from kvctl.core.outcomes import EndReason
from kvctl.proxy.dialects import UNREADABLE, Usage

MOST_BEGINNING = 1024 * 1024  # bytes of an answer in which its name is searched
LIVES = frozenset({"queued", "in_progress"})
END_OF = {
    "completed": EndReason.FINISHED,
    "incomplete": EndReason.CAPPED,
    "failed": EndReason.ENGINE_ERROR,
    "cancelled": EndReason.CALLER_CANCELLED,
}

LONGEST_ID = 256
"""The most characters of a name that is remembered."""
_ASKABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,255}")
_BORDER = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LONGEST_BORDER = 4


class Told(msgspec.Struct, frozen=True, gc=False):
    """What is known of a response."""

    id: str
    status: str = ""
    background: bool | None = None
    created_at: float | None = None
    usage: Usage | None = None

    @property
    def askable(self) -> bool:
        """Whether its name can stand in a path as it is."""
        return _ASKABLE.fullmatch(self.id) is not None

    def is_same(self, begun: "Told") -> bool:
        """Whether this is the response that ``begun`` tells of, and not a later one of the same name."""
        return self.id == begun.id and self.background is True and self.created_at == begun.created_at


class _Event(msgspec.Struct, frozen=True, gc=False):
    response: Told


_TOLD = msgspec.json.Decoder(Told)
_EVENT = msgspec.json.Decoder(_Event)


def read_told(document: bytes) -> Told | None:
    """What a plain answer says of a response; None: nothing."""
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
    """Reads the answer that begins a response, and tells of the response once; None: it names none."""

    __slots__ = ("_head", "_looked", "_stream", "_tell")

    def __init__(self, tell: Callable[[Told | None], None], *, stream: bool) -> None:
        self._tell = tell
        self._stream = stream
        self._head = bytearray()
        self._looked = 0  # bytes in which no event border begins

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
