"""Stream events that differ in their text alone: one decoded event vouches for all that look like it.

Nearly every event of a stream is the previous one with another piece of text. Once an event was decoded, what
stands around its text is remembered; a later event with the same surroundings says the same: one more token
and nothing else. A text that holds a quote, a backslash or a control character, or is not UTF-8, may not end
where it seems to, so its event is decoded.
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
_LARGEST = 64 * 1024  # bytes of an event that is compared in this way
_PLAIN = bytes([code for code in range(0x20, 0x100) if code not in b'"\\\x7f'])
_LONGEST_FRAMED = len(HEADS) - 1

_SHORT = 16  # bytes of a text that is remembered
_MOST_KNOWN = 4096
_known: set[bytes] = set()  # the first short texts that were plain: most of any answer is made of few


class Alike:
    """The look of events that bring one more token of the choice ``index``, and nothing else."""

    __slots__ = ("_before", "_begin", "_behind", "_behind_framed", "_end", "_end_framed", "_least", "index")

    def __init__(self, before: bytes, behind: bytes, index: int) -> None:
        self._before = before
        self._behind = behind
        self._behind_framed = behind + _ENDS
        self._begin = len(before)
        self._end = -len(behind)
        self._end_framed = -len(self._behind_framed)
        self._least = len(before) + len(behind)
        self.index = index

    def fits(self, event: bytes) -> bool:
        """Whether ``event`` (a line without its end) looks so."""
        if not (event.startswith(self._before) and event.endswith(self._behind)):
            return False
        if not self._least <= len(event) <= _LARGEST:
            return False
        text = event[self._begin : self._end]
        return text in _known or _is_plain(text)

    def fits_framed(self, chunk: bytes) -> bool:
        """Whether ``chunk`` is one small, plainly framed HTTP chunk that holds one such event alone."""
        size = len(chunk)
        if size > _LONGEST_FRAMED or (head := HEADS[size]) is None:
            return False
        text = chunk[len(head) + self._begin : self._end_framed]
        # one comparison of the whole is cheaper than one of each part
        if chunk != b"".join((head, self._before, text, self._behind_framed)):
            return False
        return text in _known or _is_plain(text)


def alike(event: bytes) -> Alike | None:
    """The look of events like ``event``; None where it brings anything but one plain piece of text."""
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


def _is_plain(text: bytes) -> bool:
    """Whether ``text`` needs no decoding; of short ones the answer is remembered, while there is room."""
    if text.translate(None, _PLAIN) or not (text.isascii() or _is_utf8(text)):
        return False
    if len(_known) < _MOST_KNOWN and len(text) <= _SHORT:
        _known.add(text)
    return True


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
