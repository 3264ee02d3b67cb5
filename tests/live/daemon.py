"""``kvctl serve`` as a child process, and what a test asks of its listeners and of its commands."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from tests.live.engine import SilentError, http_get
from tests.ports import free_port

T = TypeVar("T")
PATIENCE = 10
CONTEXT_S = 5.0  # at most, for an engine that does not tell its context
CONSOLE = str(Path(sys.executable).with_name("kvctl"))


def eventually(probe: Callable[[], T], timeout: float, what: str) -> T:
    """The first truthy answer of ``probe``; AssertionError with the last answer when time runs out.

    ``timeout`` is for a machine that runs: one that stands still for seconds at a time gets PATIENCE of them,
    and a probe that finds nobody answering is asked again.
    """
    deadline = time.monotonic() + timeout * PATIENCE
    while not (answer := _asked(probe)):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what} (last: {answer!r})"
        time.sleep(0.02)
    return answer


def _asked(probe: Callable[[], T]) -> T | None:
    try:
        return probe()
    except SilentError:
        return None


@dataclass(slots=True)
class Daemon:
    """One kvctl in front of ``engine_url``; ``settings`` are KVCTL_* names without the prefix."""

    engine_url: str
    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    admin_port: int = field(default_factory=free_port)
    program: Sequence[str] = (CONSOLE, "serve")
    process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the daemon and of its commands."""
        clean = {key: text for key, text in os.environ.items() if not key.startswith("KVCTL_")}
        given = {
            "ENGINE_URL": self.engine_url,
            "LISTEN": f"127.0.0.1:{self.port}",
            "ADMIN_LISTEN": f"127.0.0.1:{self.admin_port}",
            "ADMIN_SOCKET": str(self.folder / "admin.sock"),
            "STATE_DIR": str(self.folder / "state"),
        }
        return clean | {f"KVCTL_{name}": text for name, text in (given | dict(self.settings)).items()}

    def start(self) -> None:
        """Returns when the data port answers."""
        (self.folder / "state").mkdir(exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.program,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        try:
            eventually(self.answers_or_ended, 20, "/healthz answers 200")
            assert self.process.poll() is None
        except AssertionError:
            self.stop()
            raise AssertionError(self.log_tail()) from None

    def answers_or_ended(self) -> bool:
        ended = self.process is None or self.process.poll() is not None
        return ended or self.get("/healthz")[0] == 200

    def stop(self, timeout: float = 20 * PATIENCE) -> int:
        """SIGTERM, then after ``timeout`` SIGKILL; the exit status."""
        if self.process is None:
            return 0
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        self.process.kill()
        return self.process.wait()

    def log_tail(self, size: int = 4000) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")[-size:]

    def get(self, path: str) -> tuple[int, str]:
        """Status and text from the data port."""
        return http_get(self.base_url + path)

    def wait_ready(self, timeout: float = 20) -> None:
        """Until it serves, and a little more for the engine's context: what comes before claims the pool."""
        eventually(lambda: self.get("/readyz")[0] == 200, timeout, f"/readyz: {self.get('/readyz')}")
        page, until = f"http://127.0.0.1:{self.admin_port}/metrics", time.monotonic() + CONTEXT_S
        while "\nkvctl_context_tokens{" not in http_get(page)[1] and time.monotonic() < until:
            time.sleep(0.05)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series of ``kvctl_<name>`` that carry these labels; absent ones are an error."""
        page = http_get(f"http://127.0.0.1:{self.admin_port}/metrics")[1]
        if not page:
            raise SilentError("the admin listener does not answer")
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        values = [
            sample.value
            for sample in samples
            if sample.name == f"kvctl_{name}" and labels.items() <= sample.labels.items()
        ]
        assert values, f"no kvctl_{name} {labels} on the metrics page"
        return sum(values)

    def command(self, *arguments: str, exit_status: int = 0) -> str:
        """Standard output of a kvctl command that must end with this status."""
        result = subprocess.run(
            [CONSOLE, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=20 * PATIENCE,
            check=False,
        )
        assert result.returncode == exit_status, (
            f"kvctl {arguments}: {result.returncode}\n{result.stdout}{result.stderr}"
        )
        return result.stdout

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.command("status", "-o", "json"))
        return answer

    def is_empty(self) -> bool:
        """Whether the ledger is exactly zero."""
        return self.metric("leases") == 0 and self.metric("claimed_tokens") == 0

    def wait_empty(self, timeout: float = 5) -> None:
        eventually(self.is_empty, timeout, "the ledger is exactly zero")
