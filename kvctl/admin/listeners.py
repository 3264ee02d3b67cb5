"""The admin side's sockets: a unix socket that one process owns, and plain TCP."""

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from kvctl.settings.units import Address

MODE = 0o660


class ListenError(RuntimeError):
    """A listener cannot be opened; the text says which and why."""


class BusyError(ListenError):
    """Another kvctl owns it."""


class OwnedSocket:
    """A listening unix socket, mode 0660, and the lock that makes its path this process's own.

    The lock, not the path, shows a living owner: it disappears with its process, however that ends. So a
    stale socket file is replaced, and two simultaneous starts cannot both win.
    """

    def __init__(self, path: Path) -> None:
        """Raises BusyError, ListenError."""
        self.path = path
        lock = _locked(path)
        try:
            self.socket = _bound(path)
        except BaseException:
            os.close(lock)
            raise
        self._lock: int | None = lock

    def close(self) -> None:
        """Remove the path and release the lock. Only once: after that the path may be another process's."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.socket.close()
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        handle = os.open(
            path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError as error:
        raise ListenError(f"admin_socket {path}: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise BusyError(
            f"admin_socket {path}: another kvctl runs with it; stop that one or set another path"
        ) from None
    return handle


def _bound(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear(path)
        made.bind(str(path))
        path.chmod(MODE)  # the group is let in, whatever the umask
        made.listen(64)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise ListenError(f"admin_socket {path}: {error.strerror}") from error
    except ListenError:
        made.close()
        raise
    return made


def _clear(path: Path) -> None:
    """Remove a socket that nobody owns, and nothing else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"admin_socket {path}: a file of another kind is there; it is left alone")
    path.unlink()


def tcp_socket(name: str, address: Address) -> socket.socket:
    """A listening TCP socket; ``name`` is the setting that it serves. Raises ListenError."""
    try:
        found = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = found[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"{name} {address}: {error.strerror}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bool(address.host)))
        made.bind(where)
        made.listen(128)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise ListenError(f"{name} {address}: {error.strerror}") from error
    return made
