"""The chunks of a body that came whole: what they carry, without a parser.

An engine writes each event of a stream as a chunk, and it comes as one. Wherever the bytes are cut, what is
told of the answer is what the parser would have told (``tests/proxy/test_chunks.py``).
"""

_SIZES = {b"%x" % size: size for size in range(1, 4096)}  # of most events' chunks, as written
_HEAD_OF = {len(digits) + size + 4: digits + b"\r\n" for digits, size in _SIZES.items()}
HEADS = tuple(_HEAD_OF.get(length) for length in range(max(_HEAD_OF) + 1))
"""By the length of one whole chunk in its plainest form, how it begins; None: none is so long."""


def payload_of(data: bytes) -> bytes:
    """What whole chunks carry, each with a head in its plainest form; empty where they are anything else.

    The last chunk, extensions and parts of chunks are the parser's.
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
