"""Values as people write them ("200ms", "1GiB", "8%", "host:port") -> numbers and texts, and back.

Standard library only: commands that need one of these must not wait for pydantic. A number without a unit is
in the base unit (seconds, bytes, a share of one). Readers raise ValueError with what is wrong with the value.
"""

import ipaddress
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

_PIECE = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?|\.\d+)\s*([a-zA-Z%]*)\s*", re.ASCII)
_SECONDS = {"ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SOCKET_PATH_MAX = 107  # bytes of sockaddr_un.sun_path that a path may fill


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. ``host`` empty: every address of the machine; ``port`` 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def duration(value: object) -> float:
    """Seconds."""
    return _amount(value, _SECONDS)


def size(value: object) -> int:
    """Bytes."""
    if (amount := _amount(value, _BYTES)) % 1:
        raise ValueError("is not a whole number of bytes")
    return int(amount)


def ratio(value: object) -> float:
    """A share, as "8%" or 0.08."""
    if (amount := _amount(value, {"%": 0.01})) > 1 and "%" in str(value):
        raise ValueError("is more than the whole")
    if amount > 1:
        raise ValueError(f"is more than the whole: for {amount:g} percent write {amount:g}%")
    return amount


def _amount(value: object, units: Mapping[str, float]) -> float:
    """A finite number, or the sum of a text's numbers with units."""
    try:
        amount = _sum(value, units) if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        amount = math.nan
    if isinstance(value, bool) or not math.isfinite(amount):
        raise ValueError("is not a finite number")
    return amount


def _sum(text: str, units: Mapping[str, float]) -> float:
    total, at = 0.0, 0
    while (piece := _PIECE.match(text, at)) and (piece[2] or piece[0] == text):
        amount, unit = piece.groups()
        if unit and unit not in units:
            raise ValueError(f"has the unit {unit!r}: use {', '.join(units)}")
        total, at = total + float(amount) * units.get(unit, 1), piece.end()
    if not text or at < len(text):
        raise ValueError("is not a number")
    return total


def whole_path(path: Path) -> Path:
    """A path that means the same in every folder and to every user; nothing expands ~ here."""
    if not path.is_absolute() or not str(path).isprintable():
        raise ValueError("is not an absolute path")
    return path


def socket_path(path: Path) -> Path:
    """A path that a unix socket can have."""
    if len(os.fsencode(whole_path(path))) > _SOCKET_PATH_MAX:
        raise ValueError(f"is too long: a unix socket's path has at most {_SOCKET_PATH_MAX} bytes")
    return path


def address(value: object) -> Address:
    """host:port, [v6]:port or :port."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]*)):(\d{1,5})", str(value).strip(), re.ASCII)
    if not match or int(match[3]) > 65535:
        raise ValueError("is not host:port")
    return Address(str(ipaddress.IPv6Address(match[1])) if match[1] else match[2], int(match[3]))


def base_url(value: object) -> str:
    """The root of an engine's API, as routes are joined to it: no trailing slash, no /v1.

    A unix socket is unix:/PATH, whichever of its spellings (unix:///PATH, http+unix://%2FPATH) was given.
    """
    clean = str(value).strip()
    if (path := _socket_in(clean)) is not None:
        return f"unix:{socket_path(path)}"
    parts = urlsplit(clean)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("is not a URL with scheme and host")
    if not re.fullmatch(r"[!-~]+", clean) or re.search(r"[@?#]", clean):
        raise ValueError("has more than scheme, host, port and prefix")
    segments = [segment for segment in parts.path.split("/") if segment]
    if segments[-1:] == ["v1"]:
        segments.pop()
    if "v1" in segments:
        raise ValueError("names a route: write the base of the API, without what follows /v1")
    return "/".join([f"{parts.scheme}://{parts.netloc}", *segments])


def _socket_in(url: str) -> Path | None:
    scheme, _, rest = url.partition(":")
    if scheme == "http+unix":
        rest = unquote(rest.removeprefix("//").rstrip("/"))
    elif scheme != "unix":
        return None
    path = "/" + rest.lstrip("/") if rest.startswith("/") else rest
    if path in ("", "/") or any(mark in path for mark in "?#"):
        raise ValueError("names no socket: write unix:/PATH")
    return Path(path)


def show_duration(seconds: float) -> str:
    """Seconds in the largest unit that keeps the number whole."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:g}ms"
    unit, factor = next((u, f) for u, f in (("h", 3600), ("min", 60), ("s", 1)) if not seconds % f or f == 1)
    return f"{seconds / factor:g}{unit}" if seconds else "0s"


def show_size(amount: float) -> str:
    """Bytes in the largest unit that keeps the number whole."""
    units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    unit, factor = next(((u, f) for u, f in units if amount and not amount % f), ("B", 1))
    return f"{amount / factor:.0f}{unit}"
