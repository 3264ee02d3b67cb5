"""When the certificates of a PEM file expire (RFC 5280, section 4.1).

OpenSSL is not asked: through Python it shows the dates of authorities, but not of the chain that it was
given. A certificate that cannot be read here has no date; whether it can be used is OpenSSL's decision.
"""

import re
import ssl
from pathlib import Path

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _INTEGER, _UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x30, 0x02, 0x17, 0x18, 0xA0
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def chain_end(path: Path | None) -> float | None:
    """When the first certificate of a chain expires, and the chain with it, in seconds since the epoch."""
    return min(ends(path), default=None)


def authorities_end(path: Path | None) -> float | None:
    """When the last of several authorities expires, after which nobody is trusted."""
    return max(ends(path), default=None)


def ends(path: Path | None) -> list[float]:
    """Expiry of each certificate in the file that can be read; empty without a file. Blocks."""
    if path is None:
        return []
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    found = (_end(each) for each in _PEM.findall(text))
    return [each for each in found if each is not None]


def _end(pem: str) -> float | None:
    try:
        return _not_after(ssl.PEM_cert_to_DER_cert(pem))
    except (ValueError, IndexError):
        return None


def _not_after(der: bytes) -> float:
    """Raises ValueError or IndexError."""
    _, certificate, _ = _element(der)
    _, fields, _ = _element(certificate)  # tbsCertificate
    if fields[0] == _VERSION:
        _, _, fields = _element(fields)
    for expected in (_INTEGER, _SEQUENCE, _SEQUENCE):  # serialNumber, signature, issuer
        tag, _, fields = _element(fields)
        if tag != expected:
            raise ValueError("not a certificate")
    _, validity, _ = _element(fields)
    _, _, rest = _element(validity)  # notBefore
    tag, moment, _ = _element(rest)
    return _seconds(tag, moment.decode("ascii"))


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """(tag, content, what comes behind) of the first DER element."""
    tag, length, at = data[0], data[1], 2
    if length & 0x80:
        size = length & 0x7F
        length, at = int.from_bytes(data[2 : 2 + size], "big"), 2 + size
    if len(data) < at + length:
        raise ValueError("cut short")
    return tag, data[at : at + length], data[at + length :]


def _seconds(tag: int, text: str) -> float:
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("not a time")
    year, month, day = int(text[:4]), int(text[4:6]), int(text[6:8])
    hour, minute, second = int(text[8:10]), int(text[10:12]), int(text[12:14])
    shown = f"{_MONTHS[month - 1]} {day:2} {hour:02}:{minute:02}:{second:02} {year} GMT"
    return float(ssl.cert_time_to_seconds(shown))
