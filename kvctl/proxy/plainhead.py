"""The head of an answer in its plainest form, read in one step. Any other is left to the parser.

Nearly every answer has one, and the parser would call back for each of its lines. The result is what the
parser would have given (``tests/proxy/test_plainhead.py`` plays both).

A head is plain if it came whole, is HTTP/1.1 with a status that has a body, its lines have one space behind
the colon and printable ASCII in their values, its framing is one length or chunks, and no other header
concerns the hop.
"""

import re
from typing import NamedTuple

from kvctl.proxy.headers import HOP_BY_HOP, Headers

_HEAD = re.compile(
    rb"HTTP/1\.1 ([2-5]\d\d) ([!-~][ -~]*+)\r\n((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++: [!-~][ -~]*+\r\n)++)\r\n"
)
_LINE = re.compile(rb"([^:]++): ([^\r]*+)\r\n")
_BODYLESS = (b"204", b"304")
_MOST_DIGITS = 15
_LENGTH, _CODING, _TYPE, _ENCODING, _ID, _OF_HOP = range(6)
_NOTED = {
    **dict.fromkeys(HOP_BY_HOP, _OF_HOP),
    b"content-length": _LENGTH,
    b"transfer-encoding": _CODING,
    b"content-type": _TYPE,
    b"content-encoding": _ENCODING,
    b"x-request-id": _ID,
}


class PlainHead(NamedTuple):
    """``size`` in bytes, ``lines`` the headers as they came. ``length`` None: the body comes in chunks."""

    size: int
    status: int
    reason: bytes
    headers: Headers
    lines: bytes
    length: int | None
    content_type: bytes
    content_encoding: bytes
    has_id: bool  # an X-Request-Id


def plain_head(data: bytes) -> PlainHead | None:
    """The head that ``data`` begins with; None: it is not whole, or not plain."""
    found = _HEAD.match(data)
    if found is None:
        return None
    status, reason, lines = found.groups()
    headers = _LINE.findall(lines)
    length, chunked, has_id = -1, False, False
    content_type = content_encoding = b""
    for name, value in headers:
        noted = _NOTED.get(name.lower())
        if noted is None:
            continue
        if noted == _TYPE:
            content_type = value
        elif noted == _LENGTH and length < 0 and value.isdigit() and len(value) <= _MOST_DIGITS:
            length = int(value)
        elif noted == _CODING and not chunked and value.lower() == b"chunked":
            chunked = True
        elif noted == _ENCODING:
            content_encoding = value
        elif noted == _ID:
            has_id = True
        else:
            return None
    if chunked == (length >= 0) or status in _BODYLESS or b" \r\n" in lines:
        return None
    return PlainHead(
        found.end(), int(status), reason, headers, lines, None if chunked else length,
        content_type, content_encoding, has_id,
    )  # fmt: skip
