"""The real llama.cpp server, in a small environment and with a tiny model of its own.

It comes as a wheel that holds the server; that, ``gguf`` and numpy (about 250 MB installed) lie beside the
other engine's environment, in the folder named by LIVE_ENGINE_CACHE, made once by whoever comes first.
"""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.live.engine import DIE_WITH_PARENT, http_get
from tests.live.venv import STAMP, _only_one, _pip, cache_folder, say
from tests.ports import free_port

PACKAGES = ("xllamacpp==2026.10.11549", "gguf==0.19.0")
HERE = Path(__file__).parent


def ensure_home(cache: Path) -> Path:
    """The finished environment's folder, with the model in it."""
    home = cache / f"llamacpp-2026.10-py{sys.version_info.major}.{sys.version_info.minor}"
    if (home / STAMP).exists():
        return home
    with _only_one(cache):
        if not (home / STAMP).exists():
            _build(home)
    return home


def _build(home: Path) -> None:
    say(f"building {home} (once)")
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    _pip(home, "install", "-q", "--only-binary", ":all:", *PACKAGES)
    python = str(home / "bin" / "python")
    subprocess.run([python, str(HERE / "llamacpp_model.py"), str(home / "tiny.gguf")], check=True)
    (home / STAMP).touch()


@dataclass(slots=True)
class LlamaCpp:
    """One server: ``context`` KV tokens over ``slots`` slots. A context manager: leaving it kills it."""

    context: int = 4096
    slots: int = 8
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_file(self) -> Path:
        return cache_folder() / f"llamacpp-{self.port}.log"

    def start(self) -> None:
        """Starts the process and returns at once."""
        home = ensure_home(cache_folder())
        serve = [str(home / "bin" / "python"), str(HERE / "llamacpp_serve.py"), str(home / "tiny.gguf")]
        numbers = [str(number) for number in (self.port, self.context, self.slots)]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DIE_WITH_PARENT, *serve, *numbers],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        atexit.register(self.kill)

    def wait_ready(self, timeout: float = 120) -> None:
        """Until /health answers 200."""
        deadline = time.monotonic() + timeout
        while http_get(f"{self.base_url}/health")[0] != 200:
            ended = self.process is None or self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"llama.cpp is not ready:\n{self.log_file.read_text(errors='replace')}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        atexit.unregister(self.kill)

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.log_file.unlink(missing_ok=True)
