"""Ports of loopback for servers that a test starts: nobody takes one away before its server listens, or
between two of its lives.

A port that the kernel picked and that was closed again may be anybody's a moment later: the local end of a
connection, even of a client that tries to reach the very server. These lie below those that the kernel
gives to connections, and no two processes hand out the same.
"""

import random
import socket
from collections.abc import Iterator
from pathlib import Path

LOWEST, HIGHEST = 10_000, 32_767
BLOCK = 64  # ports that a process reserves at a time
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_reserved: list[socket.socket] = []  # for as long as this process lives


def free_port() -> int:
    """A port that nobody listens on, handed out once."""
    return next(port for port in _ports if _is_free(port))


def _own() -> Iterator[int]:
    blocks = list(range(LOWEST, _highest() - BLOCK, BLOCK))
    random.SystemRandom().shuffle(blocks)
    for first in blocks:
        if _reserve(first):
            yield from range(first, first + BLOCK)


def _highest() -> int:
    """Below the ports of connections; where those begin too low for that, all may be taken."""
    lowest = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else HIGHEST
    return min(lowest, HIGHEST) if lowest > 2 * LOWEST else HIGHEST


def _reserve(block: int) -> bool:
    """The block is marked by a name that the kernel frees when the process ends."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0kvctl-tests-ports-{block}")
    except OSError:
        mark.close()
        return False
    _reserved.append(mark)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_ports = _own()
