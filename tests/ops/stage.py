"""A loaded kvctl in processes of its own: simulated engine, simulated card, callers past capacity."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from kvctl.gpu.simulated import SimulatedCard
from tests.ops.prometheus import free_port

CALLERS = 12
GIB = 1 << 30
_ENGINE = "-m kvctl.sim --port 0 --with-stdin --blocks 300 --max-model-len 4000"
_SETTINGS = """
engine_url = "{engine}"
listen = "127.0.0.1:{port}"
admin_listen = "127.0.0.1:{admin_port}"
admin_socket = "{folder}/admin.sock"
state_dir = "{folder}"
tokenizer = "bound"
gpu_interval = "200ms"
"""


@contextlib.contextmanager
def loaded_kvctl(folder: Path) -> Iterator[str]:
    """The URL of the metrics page of a kvctl that refuses some of what it is asked."""
    SimulatedCard(24 * GIB, 20 * GIB, path=folder / "card.json")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(_child(folder, "engine", _ENGINE.split(), r"(http://\S+)"))
        ports = {"port": free_port(), "admin_port": free_port()}
        config = folder / "kvctl.toml"
        config.write_text(_SETTINGS.format(engine=engine, folder=folder, **ports))
        daemon = ["-m", "kvctl.cli.demo_daemon", f"--config={config}", f"--card={folder / 'card.json'}"]
        stack.enter_context(_child(folder, "kvctl", daemon, r"listens on"))
        stack.enter_context(_callers(f"http://127.0.0.1:{ports['port']}/v1/completions"))
        yield f"http://127.0.0.1:{ports['admin_port']}/metrics"


@contextlib.contextmanager
def _child(folder: Path, name: str, arguments: list[str], told: str) -> Iterator[str]:
    """A Python program that runs until its standard input ends; what it says when it is ready."""
    with (folder / f"{name}.log").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    found = next((match for line in process.stdout if (match := re.search(told, line))), None)
    drain = threading.Thread(target=process.stdout.read, daemon=True)
    drain.start()
    try:
        assert found, (folder / f"{name}.log").read_text()
        yield found[found.lastindex or 0]
    finally:
        process.terminate()
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        drain.join()
        process.stdout.close()


@contextlib.contextmanager
def _callers(url: str) -> Iterator[None]:
    """Callers that ask at once again, whatever they are answered."""
    stop = threading.Event()
    threads = [threading.Thread(target=_call, args=(url, stop), daemon=True) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _call(url: str, stop: threading.Event) -> None:
    body = json.dumps({"model": "sim", "prompt": "word " * 150, "max_tokens": 400, "stream": True}).encode()
    while not stop.wait(0.05):
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - loopback
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
            while answer.readline() and not stop.is_set():
                pass
