"""The first evening with kvctl, as the README tells it, with commands alone.

Placed as a service and started as its unit says, before a simulated engine; the first 429 explained; the
margin moved, seen in a real Prometheus and on the status page, and back by itself.
"""

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ops.chromium import PROGRAM as BROWSER
from tests.ops.chromium import browser, new_tab
from tests.ops.prometheus import MISSING, PROGRAM, Prometheus, fetch, scraping
from tests.ops.stage import callers, child
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]
PATIENCE_S = 120.0
_SCRIPT = "#!{python}\nfrom kvctl.cli.main import main\nmain()\n"
_SETTINGS = """
engine_url = "{engine}"
listen = "127.0.0.1:{port}"
admin_listen = "127.0.0.1:{admin_port}"
admin_socket = "{folder}/run/kvctl.sock"
state_dir = "{folder}/state"
gpus = ["none"]
drain_timeout = "0s"
"""


class Box:
    """The machine: what is installed below ``root``, and the commands of somebody at its shell."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder, self.root, self.engine = folder, folder / "root", engine
        self.port, self.admin_port = free_port(), free_port()
        self.program = folder / "kvctl"
        self.program.write_text(_SCRIPT.format(python=sys.executable))
        self.program.chmod(0o755)
        clean = {key: text for key, text in os.environ.items() if not key.startswith("KVCTL_")}
        self.env = clean | {"KVCTL_CONFIG": str(self.root / "etc/kvctl/kvctl.toml"), "NO_COLOR": "1"}

    def kvctl(self, *words: str, status: int = 0) -> str:
        """What a command says; its exit status must be ``status``."""
        done = subprocess.run(
            [self.program, *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == status, (words, done.stdout, done.stderr)
        return done.stdout

    def document(self, *words: str) -> dict[str, Any]:
        """What a command says, as JSON."""
        answer: dict[str, Any] = json.loads(self.kvctl(*words, "-o", "json"))
        return answer

    def install(self) -> None:
        """``install-units``, and the settings where it says."""
        told = self.kvctl("install-units", "--prefix", str(self.root), "--program", str(self.program))
        assert "editor /etc/kvctl/kvctl.toml" in told
        (self.folder / "run").mkdir()
        settings = self.root / "etc/kvctl/kvctl.toml"
        text = settings.read_text()
        assert text.count('\nengine_url = "http://127.0.0.1:8000"\n') == 1
        given = _SETTINGS.format(
            engine=self.engine, port=self.port, admin_port=self.admin_port, folder=self.folder
        )
        settings.write_text(text.replace('engine_url = "http://127.0.0.1:8000"', given))

    @contextlib.contextmanager
    def service(self) -> Iterator[None]:
        """What the unit starts, with the manager's socket; ready inside."""
        unit = (self.root / "etc/systemd/system/kvctl.service").read_text()
        (command,) = re.findall(r"(?m)^ExecStart=(.*)$", unit)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(self.folder / "notify"))
            manager.settimeout(PATIENCE_S)
            env = self.env | {"NOTIFY_SOCKET": str(self.folder / "notify")}
            with (self.folder / "journal").open("wb") as log:
                process = subprocess.Popen(shlex.split(command), env=env, stdout=log, stderr=log)
            try:
                while "READY=1" not in manager.recv(4096).decode().split("\n"):
                    assert process.poll() is None, (self.folder / "journal").read_text()
                yield
            finally:
                process.terminate()
                process.wait(PATIENCE_S)
        assert process.returncode == 0, (self.folder / "journal").read_text()

    def first_refusal(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the first answer that is none; callers ask meanwhile."""
        body = {"model": "sim", "prompt": "word " * 150, "max_tokens": 1000}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(request, timeout=PATIENCE_S).close()  # noqa: S310 - loopback
            except urllib.error.HTTPError as error:
                return error.code, {key.lower(): text for key, text in error.headers.items()}
        raise AssertionError("nothing was refused")

    def page(self) -> dict[str, Any]:
        """What the status page shows."""
        shown: dict[str, Any] = json.loads(fetch(f"http://127.0.0.1:{self.admin_port}/v1/page"))
        return shown


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    words = f"-m kvctl.sim --port {free_port()} --with-stdin --blocks 300 --max-model-len 4000".split()
    with child(tmp_path, "engine", words, r"(http://\S+)") as engine:
        yield Box(tmp_path, engine)


def value(prometheus: Prometheus, expr: str) -> float | None:
    """The one series of a query; None: there is none."""
    found = prometheus.query(expr)
    return float(found[0]["value"][1]) if found else None


def wait(prometheus: Prometheus, **wanted: float | None) -> None:
    """Until the metrics are so; a label of a knob stands behind a double underscore."""

    def query(name: str) -> str:
        metric, _, knob = name.partition("__")
        return f'kvctl_{metric}{{knob="{knob}"}}' if knob else f"kvctl_{metric}"

    held: Callable[[], bool] = lambda: all(  # noqa: E731 - a predicate
        value(prometheus, query(name)) == number for name, number in wanted.items()
    )
    prometheus.wait(held, PATIENCE_S)


async def test_the_first_evening(box: Box, tmp_path: Path) -> None:
    box.install()
    assert "the settings are good" in box.kvctl("check-config")
    with box.service(), contextlib.ExitStack() as stack:
        assert "0 failed" in box.kvctl("doctor")
        assert box.kvctl("status").startswith("budget 4,544 of 4,784 KV tokens (margin 5%)")
        stack.enter_context(callers(f"http://127.0.0.1:{box.port}/v1/completions"))
        explained(box)
        metrics = f"http://127.0.0.1:{box.admin_port}/metrics"
        prometheus = stack.enter_context(scraping({"kvctl": metrics}, tmp_path))
        wait(prometheus, margin_ratio=0.05, override_active__margin=0)
        moved_for_half_an_hour(box, prometheus)
        if BROWSER is not None:
            async with new_tab(stack.enter_context(browser(tmp_path))) as tab:
                await tab.call("Page.navigate", url=f"http://127.0.0.1:{box.admin_port}/")
                await tab.until(
                    'document.getElementById("overrides")?.textContent.includes("margin = 12.0 %")'
                )
                back_by_itself(box, prometheus)
                await tab.until('document.getElementById("overrides").textContent.trim() === "none"')
                box.kvctl("drain", "--yes", "--reason", "new driver")
                await tab.until('document.getElementById("overrides").textContent.includes("new driver")')
                box.kvctl("undrain")
        else:
            back_by_itself(box, prometheus)


def explained(box: Box) -> None:
    """The first 429 says when to come back, and its id says why."""
    status, headers = box.first_refusal()
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    reason, needed = headers["x-kvctl-reason"], headers["x-kvctl-needed-tokens"]
    told = " ".join(box.kvctl("explain", headers["x-request-id"]).split())
    assert headers["x-request-id"] in told
    assert f"needed up to {int(needed):,}, " in told
    record = box.document("explain", headers["x-request-id"])
    assert record["reason"] == reason
    assert reason in box.page()["refused_last_minute"]


def moved_for_half_an_hour(box: Box, prometheus: Prometheus) -> None:
    """In force at once, for the time that was said, with its reason where anybody looks."""
    why = "neighbour on the card tonight"
    told = box.kvctl("set", "margin", "12%", "--for", "30m", "--reason", why)
    assert told == "margin: 5% -> 12% for 30 min (revision 1)\n"
    wait(prometheus, margin_ratio=0.12, override_active__margin=1, budget_tokens=4209)
    end = value(prometheus, 'kvctl_override_expiry_timestamp_seconds{knob="margin"}')
    assert end is not None
    assert 1800 - PATIENCE_S < end - time.time() <= 1800
    shown = box.page()["overrides"]["margin"]
    assert (shown["value"], shown["reason"]) == (0.12, why)
    assert why in box.kvctl("status")


def back_by_itself(box: Box, prometheus: Prometheus) -> None:
    """The same for a shorter time: nobody has to think of it."""
    box.kvctl("set", "margin", "12%", "--for", "3s", "--reason", "shorter")
    wait(prometheus, margin_ratio=0.05, override_active__margin=0, budget_tokens=4544)
    assert value(prometheus, 'kvctl_override_expiry_timestamp_seconds{knob="margin"}') is None
    assert box.page()["overrides"] == {}
    assert "no override is in force" in box.kvctl("overrides")
    lines = (box.folder / "state" / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["verb"] for line in lines] == ["set", "set", "expire"]
