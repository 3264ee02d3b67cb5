"""Child processes of the bench: started, waited for, their CPU time and memory read from /proc, stopped."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """One process and all that it started."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.port = port

    def pids(self) -> list[int]:
        """The process and its descendants."""
        found, todo = [], [self._process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    todo += map(int, task.read_text().split())
        return found

    def cpu_s(self) -> float:
        """CPU seconds so far, user and system, of the whole tree; threads that ended included."""
        return sum(time.clock_gettime(_cpu_clock(pid)) for pid in self.pids())

    def rss_bytes(self) -> int:
        """Resident memory of the whole tree."""
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE for pid in self.pids())


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, to the nanosecond (/proc has hundredths): clock_getcpuclockid(3)."""
    return ~pid << 3 | 2


@contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[Child]:
    """Until the block is left; raises RuntimeError with the log's tail where nobody listens in time."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(process, port, log)
        yield Child(process, port)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise RuntimeError(f"nobody listens on {port}:\n{tail}")


@contextmanager
def engine(folder: Path, *flags: str) -> Iterator[Child]:
    """The bench's own engine, with ``flags`` of its command line."""
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.dataplane.engine", "--port", str(port), *flags]
    with running(command, port, folder / "engine.log") as child:
        yield child
