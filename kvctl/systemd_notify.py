"""What kvctl tells systemd: ready, status, alive, stopping (sd_notify(3)), over $NOTIFY_SOCKET.

The variables are taken out of the environment, so that no helper process speaks for the main one. WATCHDOG=1
is to be sent only from a finished control tick: a loop that hangs must be seen to hang.

Listening sockets are given into systemd's descriptor store and come back over $LISTEN_FDS to the next process
of the unit (sd_listen_fds(3)): a restart then loses no connection attempt.
"""

import array
import os
import socket
import time
from collections.abc import Iterable, MutableMapping
from contextlib import suppress

STORED = "listen"  # the name of kvctl's descriptors in the store
_FIRST_FD = 3  # of those that systemd passes
_STATUS_MAX = 400  # characters; systemctl shows one line


class Notifier:
    """The socket to the service manager; without one, no method does anything. None raises or waits."""

    def __init__(self, env: MutableMapping[str, str] = os.environ) -> None:
        self._address = _address(env.pop("NOTIFY_SOCKET", ""))
        self.inherited = _inherited(
            env.pop("LISTEN_PID", ""), env.pop("LISTEN_FDS", ""), env.pop("LISTEN_FDNAMES", "")
        )
        self.watchdog_interval_s = _interval(env.pop("WATCHDOG_USEC", ""), env.pop("WATCHDOG_PID", ""))
        self._socket = _socket() if self._address else None
        self._last_status = ""
        self._last_alive = float("-inf")

    def ready(self, status: str = "") -> None:
        """The listeners are open; not tied to the engine's model load."""
        self._send("READY=1", *self._status(status))

    def status(self, sentence: str) -> None:
        """The sentence that ``systemctl status`` shows; the same one again costs nothing."""
        if fields := self._status(sentence):
            self._send(*fields)

    def alive(self, now: float) -> None:
        """A control tick is done at ``now`` (monotonic seconds). Sent four times in a watchdog's interval."""
        if self.watchdog_interval_s is not None and now - self._last_alive >= self.watchdog_interval_s / 4:
            self._last_alive = now
            self._send("WATCHDOG=1")

    def reloading(self) -> None:
        """A reload begins; ``ready`` ends it, however it went."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def keep(self, listening: Iterable[socket.socket]) -> None:
        """Have the sockets kept for the next process of this unit, instead of what was kept before."""
        self._send("FDSTOREREMOVE=1", f"FDNAME={STORED}")
        for each in listening:
            self._send("FDSTORE=1", f"FDNAME={STORED}", descriptor=each.fileno())

    def stopping(self, status: str = "") -> None:
        """The end begins: a drain, then the exit."""
        self._send("STOPPING=1", *self._status(status))

    def extend_timeout(self, seconds: float) -> None:
        """Start or stop goes on: wait this much longer, from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def close(self) -> None:
        """Let go of the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _status(self, sentence: str) -> list[str]:
        clean = " ".join(sentence.split())[:_STATUS_MAX]
        if not clean or clean == self._last_status:
            return []
        self._last_status = clean
        return [f"STATUS={clean}"]

    def _send(self, *fields: str, descriptor: int | None = None) -> None:
        if self._socket is None:
            return
        carried = [] if descriptor is None else [array.array("i", [descriptor])]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, each) for each in carried]
        try:
            self._socket.sendmsg(["\n".join(fields).encode()], ancillary, 0, self._address)
        except OSError:
            self._last_status = ""  # nobody heard it: say it again


def _address(given: str) -> str:
    """A path, or an abstract name, which systemd writes with @."""
    return f"\0{given[1:]}" if given.startswith("@") else given


def _inherited(pid: str, count: str, names: str) -> tuple[socket.socket, ...]:
    """The listening sockets that systemd passes to this process; whatever else it passes is closed."""
    if pid != str(os.getpid()) or not count.isdigit():
        return ()
    named = names.split(":") if names else []
    found = []
    for place in range(int(count)):
        name = named[place] if place < len(named) else STORED
        if (listening := _listening(_FIRST_FD + place)) is None:
            continue
        if name == STORED:
            found.append(listening)
        else:
            listening.close()
    return tuple(found)


def _listening(descriptor: int) -> socket.socket | None:
    try:
        os.set_inheritable(descriptor, False)
        made = socket.socket(fileno=descriptor)
    except OSError:
        with suppress(OSError):
            os.close(descriptor)
        return None
    if made.type != socket.SOCK_STREAM or not made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        made.close()
        return None
    made.setblocking(False)
    return made


def _interval(usec: str, pid: str) -> float | None:
    """The watchdog's interval in seconds, where it is meant for this process."""
    if not usec.isdigit() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    made.setblocking(False)
    return made
