"""The payload of HTTP chunks that arrived whole, found without a parser.

An engine writes each event of a stream as one chunk, and it mostly arrives in one read. However the bytes are
cut, the result is what the parser would have given (``tests/proxy/test_chunks.py``).
"""

_SIZES = {b"%x" % size: size for size in range(1, 4096)}  # of most events' chunks, as written
_HEAD_OF = {len(digits) + size + 4: digits + b"\r\n" for digits, size in _SIZES.items()}
HEADS = tuple(_HEAD_OF.get(length) for length in range(max(_HEAD_OF) + 1))
"""``HEADS[length]``: how a whole chunk of so many bytes begins in its plainest form; None: there is none."""


def payload_of(data: bytes) -> bytes:
    """The payload of whole chunks whose heads have the plainest form; empty for anything else.

    The last chunk, extensions and parts of chunks are left to the parser.
    """
    border = data.find(b"\r\n", 1, 9)
    size = _SIZES.get(data[:border])
    if size is not None and len(data) == border + size + 4 and data.endswith(b"\r\n"):
        return data[border + 2 : -2]
    return _payloads_of(data)


def _payloads_of(data: bytes) -> bytes:
    pieces: list[bytes] = []
    at, length = 0, len(data)
    while at < length:
        border = data.find(b"\r\n", at, at + 9)
        if border < 0:
            return b""
        head = data[at:border]
        try:
            size = int(head, 16)
        except ValueError:
            return b""
        start, at = border + 2, border + 4 + size
        if size <= 0 or b"%x" % size != head or data[at - 2 : at] != b"\r\n":
            return b""
        pieces.append(data[start : at - 2])
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
