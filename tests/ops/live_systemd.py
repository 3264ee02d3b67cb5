"""What a service manager makes of kvctl's unit; runs beside it, in its namespaces, and prints JSON.

The argument is the unit as it was placed. It runs with its own life cycle (type, watchdog, descriptor store,
restart, reload); the sandbox is the system manager's to make, and is left out.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 120.0
UNIT = Path("/run/units/kvctl.service")
SETTINGS = Path("/mnt/kvctl.toml")
_KEPT = (
    "Type", "ExecStart", "ExecReload", "Restart", "RestartSec", "TimeoutStopSec", "FileDescriptorStoreMax",
    "NotifyAccess", "LimitNOFILE", "WatchdogSec", "TimeoutStartSec",
)  # fmt: skip
ASK = b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def systemctl(*words: str) -> int:
    """The exit status."""
    return subprocess.run(["systemctl", "--user", *words], timeout=PATIENCE_S, check=False).returncode


def show(*names: str) -> dict[str, str]:
    """Properties of the unit."""
    command = ["systemctl", "--user", "show", "kvctl", *(f"-p{name}" for name in names)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    return dict(line.split("=", 1) for line in told.splitlines())


def until(condition: Callable[[], bool]) -> bool:
    """Whether it came to be."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def place(unit: Path, port: int) -> None:
    """The unit's life cycle, with settings of its own."""
    pattern = rf"(?m)^(?:{'|'.join(_KEPT)})=.*$"
    lines = [
        "[Unit]", "DefaultDependencies=no", "StartLimitIntervalSec=0", "[Service]",
        *re.findall(pattern, unit.read_text()),
        "StandardOutput=append:/mnt/journal", "StandardError=append:/mnt/journal",
        "Environment=KVCTL_CONFIG=/mnt/kvctl.toml KVCTL_TOKENIZER=bound",
        "Environment=KVCTL_ADMIN_SOCKET=/run/own/kvctl.sock",
    ]  # fmt: skip
    UNIT.write_text("\n".join([*lines, ""]))
    settings(port, "5%")


def settings(port: int, margin: str) -> None:
    SETTINGS.write_text(
        'engine_url = "http://127.0.0.1:1"\nadmin_listen = "127.0.0.1:0"\nstate_dir = "/mnt/state"\n'
        f'listen = "127.0.0.1:{port}"\ngpus = ["none"]\nmargin = "{margin}"\n'
    )


class Callers:
    """Connect, ask, read to the end, again; how each attempt went."""

    def __init__(self, port: int) -> None:
        self.went: Counter[str] = Counter()
        self._port = port
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call, daemon=True) for _ in range(4)]
        for thread in self._threads:
            thread.start()

    def _call(self) -> None:
        while not self._stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_S) as wire:
                    wire.sendall(ASK)
                    answer = b"".join(iter(lambda: wire.recv(4096), b""))
                self.went["answered" if answer.startswith(b"HTTP/1.1 ") else "cut"] += 1
            except OSError as error:
                self.went[type(error).__name__] += 1
            time.sleep(0.01)

    def stop(self) -> dict[str, int]:
        """How it went."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return dict(self.went)


def restarted(callers: Callers) -> bool:
    """``systemctl restart``, with callers before, meanwhile and behind."""
    more = callers.went["answered"] + 20
    before = until(lambda: callers.went["answered"] >= more) and systemctl("restart", "kvctl") == 0
    more = callers.went["answered"] + 20
    return before and until(lambda: callers.went["answered"] >= more)


def comes_back_after(number: signal.Signals) -> dict[str, str]:
    """Its main process gets a signal; what the manager says when another one serves."""
    pid, count = int(show("MainPID")["MainPID"]), int(show("NRestarts")["NRestarts"])
    os.kill(pid, number)
    until(
        lambda: int(show("NRestarts")["NRestarts"]) > count and show("ActiveState")["ActiveState"] == "active"
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the old process still is")
    return show("ActiveState", "SubState", "NFileDescriptorStore")


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place(Path(sys.argv[1]), port)
    seen: dict[str, object] = {"manager": until(lambda: systemctl("daemon-reload") == 0)}
    seen["start"] = systemctl("start", "kvctl")
    until(lambda: "budget" in show("StatusText")["StatusText"])
    seen["up"] = show("ActiveState", "StatusText", "NFileDescriptorStore", "Type")
    settings(port, "8%")
    seen["reload"] = systemctl("reload", "kvctl")
    seen["margin"] = until(lambda: "margin 8%" in show("StatusText")["StatusText"])
    settings(port, "no share")
    seen["bad_reload"] = systemctl("reload", "kvctl")
    seen["after_bad_reload"] = show("ActiveState")
    settings(port, "8%")
    callers = Callers(port)
    seen["restart"] = restarted(callers)
    seen["callers"] = callers.stop()
    seen["killed"] = comes_back_after(signal.SIGKILL)
    seen["hung"] = comes_back_after(signal.SIGSTOP)
    seen["stop"] = systemctl("stop", "kvctl")
    seen["end"] = show("ActiveState", "Result")
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
