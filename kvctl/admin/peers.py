"""Who is at the other end of a unix socket, as the kernel says."""

import os
import pwd
import socket
import struct
from asyncio import BaseTransport
from dataclasses import dataclass

_UCRED = struct.Struct("3i")  # pid, uid, gid: struct ucred of socket(7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """A process and its user. ``user`` is the number as text where no name is known."""

    uid: int
    gid: int
    pid: int
    user: str


DAEMON = Actor(uid=os.getuid(), gid=os.getgid(), pid=os.getpid(), user="kvctl")


def credentials(transport: BaseTransport) -> tuple[int, int, int]:
    """(pid, uid, gid) of the peer when it connected. Raises OSError."""
    peer = transport.get_extra_info("socket")
    return _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))


def user_name(uid: int) -> str:
    """The name of a user, else the number as text. Blocks: the name may come from a directory service."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return str(uid)
