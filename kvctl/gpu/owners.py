"""Which processes are an engine's: those that listen on its port on this machine, and their descendants.

Where none of those computes on a card, their control group counts as well: launchers start the server and its
workers side by side. All of it is read from /proc as kvctl's user: processes of another user, of another
container, or hidden by ProtectProc are not found, and then ``why`` says so. Blocks: run it in a thread.
"""

import contextlib
import ipaddress
import socket
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_PROC = Path("/proc")
_LISTENS = "0A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """``pids``: listeners and descendants; ``group``: their control group. ``why`` none was found."""

    pids: frozenset[int] = frozenset()
    group: frozenset[int] = frozenset()
    why: str = ""


def owners_of(url: str, proc: Path = _PROC) -> Owners:
    """The processes behind an engine's base URL."""
    parts = urlsplit(url)
    if not _is_here(parts.hostname or ""):
        return Owners(why="the engine's address is not known to be this machine's")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    sockets = frozenset(_listening(port, proc))
    holders = {pid for pid in _pids(proc) if sockets & _sockets(proc / str(pid))} if sockets else set()
    if not holders:
        return Owners(why=f"no process that kvctl may see listens on port {port}")
    return Owners(pids=_with_descendants(holders, proc), group=_group(min(holders), proc))


def _is_here(host: str) -> bool:
    """Whether an address is this machine's: whether it can be bound. Names are not looked up."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True


def _listening(port: int, proc: Path) -> Iterator[str]:
    """Inode numbers of the sockets that listen on ``port``, of this network namespace."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]


def _pids(proc: Path) -> list[int]:
    return [int(each.name) for each in proc.iterdir() if each.name.isdigit()]


def _sockets(process: Path) -> frozenset[str]:
    """Inode numbers of a process's sockets; none where kvctl may not look."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    return frozenset(found)


def _with_descendants(pids: set[int], proc: Path) -> frozenset[int]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in _pids(proc):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended meanwhile
            text = (proc / str(pid) / "stat").read_text()
            children[int(text.rpartition(")")[2].split()[1])].append(pid)
    found, open_ = set(pids), list(pids)
    while open_:
        fresh = [pid for pid in children[open_.pop()] if pid not in found]
        found.update(fresh)
        open_ += fresh
    return frozenset(found)


def _group(pid: int, proc: Path) -> frozenset[int]:
    """The processes of a process's control group; none where that is the root's, or kvctl's own."""
    group = _group_of(proc / str(pid))
    if group in ("", "/", _group_of(proc / "self")):
        return frozenset()
    return frozenset(each for each in _pids(proc) if _group_of(proc / str(each)) == group)


def _group_of(process: Path) -> str:
    """The path of the unified hierarchy; empty where there is none."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line[3:] for line in lines if line.startswith("0::")), "")
