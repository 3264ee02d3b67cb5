"""Which headers travel, in which order: everything end to end, nothing hop by hop.

Law 5: bytes pass unchanged. Headers stay a list of pairs from one side to the other: order, spelling and
duplicates are kept. Dropped are the hop-by-hop headers, those that ``Connection`` names, and the framing, of
which each side has its own.
"""

from collections.abc import Sequence
from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]
RawHeaders = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_UPSTREAM = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_UNFRAMED = HOP_BY_HOP | {b"content-length"}
_NOTABLE = frozenset(
    {
        b"cache-control",
        b"connection",
        b"host",
        b"x-accel-buffering",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-request-id",
    }
)
_REASONS = {status.value: status.phrase.encode("ascii") for status in HTTPStatus}


def _kept(headers: RawHeaders, dropped: frozenset[bytes]) -> tuple[Headers, dict[bytes, bytes]]:
    """The headers that travel on, and the first value of each one that ``_NOTABLE`` names (in lower case)."""
    kept: Headers = []
    noted: dict[bytes, bytes] = {}
    for header in headers:
        name = header[0].lower()
        if name in _NOTABLE:
            noted.setdefault(name, header[1])
        if name not in dropped:
            kept.append(header)
    if b"connection" in noted:
        kept = _without_nominated(kept, noted, headers)
    return kept, noted


def _without_nominated(kept: Headers, noted: dict[bytes, bytes], headers: RawHeaders) -> Headers:
    values = [value.lower() for name, value in headers if name.lower() == b"connection"]
    if values == [b"keep-alive"]:
        return kept
    nominated = {word.strip() for value in values for word in value.split(b",")}
    for name in nominated:
        noted.pop(name, None)
    return [header for header in kept if header[0].lower() not in nominated]


def for_engine(headers: RawHeaders, *, peer: str | None, scheme: str, request_id: str) -> Headers:
    """The client's headers as the engine gets them; Host and Content-Length are the upstream's to add.

    The peer is appended to X-Forwarded-For as a line of its own: the client's lines stay untouched.
    """
    kept, present = _kept(headers, _NOT_UPSTREAM)
    if (host := present.get(b"host")) is not None and b"x-forwarded-host" not in present:
        kept.append((b"X-Forwarded-Host", host))
    if peer is not None:
        kept.append((b"X-Forwarded-For", peer.encode("ascii", "replace")))
    if b"x-forwarded-proto" not in present:
        kept.append((b"X-Forwarded-Proto", scheme.encode("ascii")))
    if b"x-request-id" not in present:
        kept.append((b"X-Request-Id", request_id.encode("ascii", "replace")))
    return kept


def for_client(headers: RawHeaders, *, request_id: str, keep_length: bool, event_stream: bool) -> Headers:
    """The engine's headers as the client gets them, without Connection and Transfer-Encoding.

    ``keep_length``: the body's length was declared and holds. Event streams ask proxies in front not to
    buffer or store them.
    """
    kept, present = _kept(headers, HOP_BY_HOP if keep_length else _UNFRAMED)
    if event_stream and b"x-accel-buffering" not in present:
        kept.append((b"X-Accel-Buffering", b"no"))
    if event_stream and b"cache-control" not in present:
        kept.append((b"Cache-Control", b"no-cache"))
    if b"x-request-id" not in present:
        kept.append((b"X-Request-Id", request_id.encode("ascii", "replace")))
    return kept


def reason_of(status: int) -> bytes:
    """The usual reason phrase of a status; empty where there is none."""
    return _REASONS.get(status, b"")


def serialise(version: tuple[int, int], status: int, reason: bytes, headers: RawHeaders) -> bytes:
    """Status line and headers, with the empty line that ends them."""
    lines = [b"HTTP/%d.%d %d %b" % (*version, status, reason)]
    lines += [b"%b: %b" % header for header in headers]
    lines.append(b"\r\n")
    return b"\r\n".join(lines)
