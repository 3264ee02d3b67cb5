"""HTTP/1.1 over a unix socket, as far as kvctl's own API needs it.

The library's client costs every command a third of its start: it brings mail headers and TLS along.
"""

import socket
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Self

LINE_MAX = 2**16  # bytes of a line of the head
HEADERS_MAX = 100


class WireError(Exception):
    """The other side does not speak HTTP, or broke off."""


class Exchange:
    """One request and its answer; close it (``with``). Steps raise OSError, WireError.

    ``status`` is the answer's. Read it whole (``read``) or line by line as it comes (``readline``).
    """

    def __init__(
        self, path: Path, timeout: float, method: str, route: str, *, body: bytes, headers: Mapping[str, str]
    ) -> None:
        """``timeout`` in seconds holds for each step."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        self._file: BufferedReader | None = None
        self._left = 0  # bytes of the chunk that is being read
        self._ended = False
        try:
            self._socket.connect(str(path))
            self._socket.sendall(_request(method, route, body, headers))
            self._file = self._socket.makefile("rb")
            self.status = _status(self._line())
            told = self._headers()
        except BaseException:
            self.close()
            raise
        self._chunked = told.get("transfer-encoding", "").lower() == "chunked"
        self._length = told.get("content-length", "")

    def read(self) -> bytes:
        """The whole body."""
        if self._chunked:
            return b"".join(iter(self.readline, b""))
        file = self._reader()
        if not self._length:
            return file.read()
        if not self._length.isdecimal():
            raise WireError(f"a length of {self._length!r:.20}")
        body = file.read(int(self._length))
        if len(body) < int(self._length):
            raise WireError("the answer broke off")
        return body

    def readline(self) -> bytes:
        """The next line of the body, b"" at its end."""
        line = b""
        while not line.endswith(b"\n"):
            if self._ended or (self._chunked and self._left == 0 and not self._next_chunk()):
                break
            part = self._reader().readline(self._left if self._chunked else -1)
            if not part:
                if self._chunked:
                    raise WireError("the answer broke off")
                break
            line += part
            self._left -= len(part) if self._chunked else 0
            if self._chunked and self._left == 0:
                self._line()  # what ends a chunk
        return line

    def close(self) -> None:
        """Close the connection."""
        if self._file is not None:
            self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next_chunk(self) -> bool:
        """Whether there is one more."""
        size = self._line().split(b";")[0].strip()
        try:
            self._left = int(size, 16)
        except ValueError:
            raise WireError(f"a chunk of {size!r:.20}") from None
        self._ended = self._left == 0
        return not self._ended

    def _headers(self) -> dict[str, str]:
        told: dict[str, str] = {}
        for _ in range(HEADERS_MAX):
            line = self._line()
            if not line:
                return told
            name, _, value = line.decode("latin-1").partition(":")
            told[name.lower()] = value.strip()
        raise WireError("more headers than any kvctl sends")

    def _line(self) -> bytes:
        """One line of the framing, without its end."""
        line = self._reader().readline(LINE_MAX)
        if not line.endswith(b"\n"):
            raise WireError("the answer broke off" if line == b"" else "a line without an end")
        return line.rstrip(b"\r\n")

    def _reader(self) -> BufferedReader:
        if self._file is None:
            raise WireError("closed")
        return self._file


def _request(method: str, route: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {route} HTTP/1.1", "Host: kvctl", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii", "replace") + body


def _status(line: bytes) -> int:
    parts = line.split(maxsplit=2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise WireError(f"{line!r:.40} is no HTTP")
    return int(parts[1])
