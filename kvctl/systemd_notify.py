"""What kvctl tells systemd: ready, status, alive, stopping (sd_notify(3)), over $NOTIFY_SOCKET.

The variables are taken out of the environment, so that no helper process speaks for the main one. WATCHDOG=1
is to be sent only from a finished control tick: a loop that hangs must be seen to hang.
"""

import os
import socket
from collections.abc import MutableMapping

_STATUS_MAX = 400  # characters; systemctl shows one line


class Notifier:
    """The socket to the service manager; without one, no method does anything. None raises or waits."""

    def __init__(self, env: MutableMapping[str, str] = os.environ) -> None:
        self._address = _address(env.pop("NOTIFY_SOCKET", ""))
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

    def _send(self, *fields: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(fields).encode(), self._address)
        except OSError:
            self._last_status = ""  # nobody heard it: say it again


def _address(given: str) -> str:
    """A path, or an abstract name, which systemd writes with @."""
    return f"\0{given[1:]}" if given.startswith("@") else given


def _interval(usec: str, pid: str) -> float | None:
    """The watchdog's interval in seconds, where it is meant for this process."""
    if not usec.isdigit() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    made.setblocking(False)
    return made
