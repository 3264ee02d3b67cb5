"""The chunks of a body that came whole: what they carry, without a parser."""

_SIZES = {b"%x" % size: size for size in range(1, 4096)}  # of most events' chunks, as written


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
