"""Events of a stream that differ in their text alone: one that was decoded vouches for all that look like it.

Nearly every event of a stream is the one before with another piece of text. What stands around the text is
noted of one that was read; where it stands around another text again, the other event says the same: one more
token and no other news. A text that holds a quote, a backslash or a control character, or is no UTF-8, may
not end where it seems to: its event is decoded.
"""

from kvctl.proxy.chunks import HEADS
from kvctl.proxy.dialects import piece_in

_MARKS = [
    b'"%b":%b"' % (name, space)
    for name in (b"content", b"text", b"reasoning_content", b"reasoning")
    for space in (b"", b" ")
]
_PROBE = b"another text"
_DATA = b"data: "
_ENDS = b"\n\n\r\n"  # of an event, and of the chunk that it came in
_LARGEST = 64 * 1024  # bytes of an event that is looked at so
_PLAIN = bytes([code for code in range(0x20, 0x100) if code not in b'"\\\x7f'])


class Alike:
    """How events look that bring one more token of the choice ``index``, and nothing else."""

    __slots__ = ("_before", "_begin", "_behind", "_behind_framed", "_end", "_least", "index")

    def __init__(self, before: bytes, behind: bytes, index: int) -> None:
        self._before = before
        self._behind = behind
        self._behind_framed = behind + _ENDS
        self._begin = len(before)
        self._end = -len(behind)
        self._least = len(before) + len(behind)
        self.index = index

    def fits(self, event: bytes) -> bool:
        """Whether ``event`` (a line, without what ends it) is such a one."""
        if not (event.startswith(self._before) and event.endswith(self._behind)):
            return False
        if not self._least <= len(event) <= _LARGEST:
            return False
        text = event[self._begin : self._end]
        return not text.translate(None, _PLAIN) and (text.isascii() or _is_utf8(text))

    def fits_framed(self, chunk: bytes) -> bool:
        """Whether ``chunk`` is one, whole, small and plainly framed, that holds one such event alone."""
        size = len(chunk)
        head = HEADS[size] if size < len(HEADS) else None
        behind, begin = self._behind_framed, self._begin
        if head is None or not (chunk.startswith(head) and chunk.endswith(behind)):
            return False
        begin += len(head)
        if not chunk.startswith(self._before, len(head)) or begin + len(behind) > size:
            return False
        text = chunk[begin : size - len(behind)]
        return not text.translate(None, _PLAIN) and (text.isascii() or _is_utf8(text))


def alike(event: bytes) -> Alike | None:
    """How events look that are like ``event``; None: that cannot be said of it."""
    for mark in _MARKS:
        begin = event.rfind(mark) + len(mark)
        if begin < len(mark):
            continue
        end = event.find(b'"', begin)
        before, behind = event[:begin], event[end:]
        index = piece_in((before + _PROBE + behind).removeprefix(_DATA))
        if end > 0 and index is not None:
            return Alike(before, behind, index)
    return None


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
