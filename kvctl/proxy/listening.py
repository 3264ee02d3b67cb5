"""The data port's listening sockets: opened, or taken over from the process before this one.

During a restart the service manager holds the sockets: clients that connect meanwhile wait in the kernel's
queue and are served by the next process. A socket whose address is no longer in the settings is closed.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from ssl import SSLContext
from typing import Any

BACKLOG = 4096  # clients that the kernel queues until they are accepted
AT_ONCE = 16
"""Clients accepted in one round of the loop: each takes a descriptor, even if it is then refused."""
_UNIX = "unix:"
_PORTS = 65536
Protocol = Callable[[], asyncio.Protocol]
Place = tuple[int, Any]  # address family, address


class Listeners:
    """What the data port listens on."""

    def __init__(self) -> None:
        self.sockets: tuple[socket.socket, ...] = ()
        self._servers: list[asyncio.Server] = []

    async def open(
        self,
        listen: str,
        protocol: Protocol,
        *,
        ssl: SSLContext | None = None,
        handshake_timeout: float = 10.0,
        inherited: Sequence[socket.socket] = (),
    ) -> None:
        """Listen on ``HOST:PORT``, ``[V6]:PORT``, ``:PORT`` or ``unix:/PATH``; takes all of ``inherited``.

        A client that does not finish its TLS handshake within ``handshake_timeout`` seconds is cut off.
        Raises ValueError where ``listen`` is none of these, OSError where the address cannot be used.
        """
        places = await _places(listen)
        self.sockets = _opened(places, inherited)
        loop = asyncio.get_running_loop()
        for made in self.sockets:
            serve = loop.create_unix_server if made.family == socket.AF_UNIX else loop.create_server
            patience = None if ssl is None else handshake_timeout
            self._servers.append(
                await serve(protocol, sock=made, ssl=ssl, backlog=AT_ONCE, ssl_handshake_timeout=patience)
            )
            made.listen(BACKLOG)  # asyncio has one number for the queue and for AT_ONCE

    def close(self) -> None:
        """Accept no more. Clients in the kernel's queue stay there if another process holds the socket."""
        for server in self._servers:
            server.close()
        self.sockets = ()

    async def wait_closed(self) -> None:
        """Return when all are closed."""
        for server in self._servers:
            await server.wait_closed()


def split_listen(listen: str) -> tuple[str | None, int]:
    """Host (None: every address) and port of ``HOST:PORT``. Raises ValueError."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) >= _PORTS:
        raise ValueError(f"listen address {listen!r} is not HOST:PORT, [V6]:PORT, :PORT or unix:/PATH")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"listen address {listen!r}: write an IPv6 address in brackets")
    return host or None, int(port)


async def _places(listen: str) -> list[Place]:
    if listen.startswith(_UNIX):
        return [(socket.AF_UNIX, listen.removeprefix(_UNIX))]
    host, port = split_listen(listen)
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))


def _opened(places: Iterable[Place], inherited: Sequence[socket.socket]) -> tuple[socket.socket, ...]:
    left = {(int(sock.family), sock.getsockname()): sock for sock in inherited}
    made: list[socket.socket] = []
    try:
        taken = {place: sock for place in places if (sock := left.pop(place, None)) is not None}
        made += taken.values()
        for sock in left.values():
            sock.close()  # before anything is bound: it may hold the same port at another address
        for place in places:
            if place not in taken and (bound := _bound(*place)) is not None:
                made.append(bound)
    except BaseException:
        for sock in (*made, *left.values()):
            sock.close()
        raise
    if not made:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return tuple(made)


def _bound(family: int, address: Any) -> socket.socket | None:
    """A listening socket; None where this machine lacks the address family."""
    try:
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        if family == socket.AF_UNIX:
            _unlink_dead(address)
        else:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return made


def _unlink_dead(path: str) -> None:
    """Remove the socket file of a process that is gone, as asyncio does; any other file stays."""
    if Path(path).is_socket():
        Path(path).unlink()
