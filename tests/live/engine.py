"""The real vLLM on the CPU, as a child process that tests start, stop, kill and start again.

By hand: ``python -m tests.live.engine --build-only`` makes the environment,
``python -m tests.live.engine --port 8100 --blocks 1000`` serves until Ctrl-C.
"""

import argparse
import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.live.model import EOS_ID, NAME, ensure_model
from tests.live.venv import cache_folder, ensure_venv, say
from tests.ports import free_port

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

DIE_WITH_PARENT = """\
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGTERM = 1, 15
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Starts a program that gets SIGTERM when we die, even by a signal that leaves us no last word."""


NICE = (shutil.which("nice") or "/usr/bin/nice", "-n")


class SilentError(AssertionError):
    """A listener did not answer in time: a machine that stands still, unless it goes on."""


def forced_length(tokens: int) -> dict[str, Any]:
    """Sampling fields that make the engine stop after exactly so many output tokens (the last is EOS)."""
    return {"min_tokens": tokens - 1, "logit_bias": {str(EOS_ID): 100}}


def http_get(url: str, timeout: float = 20) -> tuple[int, str]:
    """Status and text; 0 when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:  # noqa: S310 - loopback only
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError:
        return 0, ""


@dataclass(slots=True)
class Engine:
    """One engine; its pool holds ``num_gpu_blocks`` blocks of ``block_size`` KV tokens.

    The port stays the same over a restart. Use it as a context manager: leaving it kills the whole
    process group, whatever state it is in.
    """

    num_gpu_blocks: int = 1000
    block_size: int = 32
    max_model_len: int = 8192
    max_num_seqs: int = 256
    port: int = field(default_factory=free_port)
    flags: tuple[str, ...] = ()
    niceness: int = 10  # its processes spin while they wait: callers and gate, on the same cores, go first
    log: Path | None = None
    folder: Path | None = None  # of another model than the tiny one
    process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """Without a trailing slash and without /v1."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> Path:
        """The model folder, which holds the tokenizer too."""
        return self.folder or ensure_model(cache_folder())

    @property
    def log_file(self) -> Path:
        return self.log or cache_folder() / f"engine-{self.port}.log"

    def _command(self) -> list[str]:
        program = ensure_venv(cache_folder()) / "bin" / "vllm"
        options = {
            "--served-model-name": NAME,
            "--load-format": "dummy",
            "--dtype": "bfloat16",
            "--host": "127.0.0.1",
            "--port": self.port,
            "--max-model-len": self.max_model_len,
            "--num-gpu-blocks-override": self.num_gpu_blocks,
            "--block-size": self.block_size,
            "--gpu-memory-utilization": 0.2,
            "--max-num-seqs": self.max_num_seqs,
        }
        pairs = [str(part) for option in options.items() for part in option]
        launcher = [sys.executable, "-c", DIE_WITH_PARENT, *NICE, str(self.niceness)]
        return [*launcher, str(program), "serve", str(self.model), *pairs, "--enforce-eager", *self.flags]

    def start(self) -> None:
        """Starts the process and returns at once; wait_ready() waits."""
        command = self._command()
        environment = {key: text for key, text in os.environ.items() if not key.startswith("KVCTL_")}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment | ENVIRONMENT,
                process_group=0,  # not a session: the kernel may share the CPU by sessions first
            )
        atexit.register(self.kill)

    def log_tail(self, size: int = 4000) -> str:
        """The end of what the engine wrote."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")[-size:]

    def wait_ready(self, timeout: float = 600) -> None:
        """Until /health answers 200; raises with the log's tail when the process ends or time runs out."""
        deadline = time.monotonic() + timeout
        while http_get(f"{self.base_url}/health")[0] != 200:
            ended = self.process is None or self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"engine {'ended' if ended else 'is not ready'}:\n{self.log_tail()}")
            time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        """The sum over labels of each vllm: series."""
        page = http_get(f"{self.base_url}/metrics")[1]
        if not page:
            raise SilentError("the engine does not answer")
        sums: dict[str, float] = {}
        for line in page.splitlines():
            if line.startswith("vllm:"):
                name, value = line.split("{", 1)[0].split(" ", 1)[0], line.rsplit(" ", 1)[1]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def _signal(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def stop(self, timeout: float = 15) -> None:
        """SIGTERM to the group, then, to be sure, SIGKILL."""
        if self.process is not None and self.process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.process = None
        atexit.unregister(self.kill)

    def pause(self) -> None:
        """SIGSTOP to the whole group."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to the whole group."""
        self._signal(signal.SIGCONT)

    def restart(self, num_gpu_blocks: int | None = None) -> None:
        """Killed and started on the same port, with another pool when one is given; returns at once."""
        self.kill()
        self.num_gpu_blocks = num_gpu_blocks or self.num_gpu_blocks
        self.start()

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.live.engine", description=__doc__)
    parser.add_argument("--build-only", action="store_true", help="make what is needed, start nothing")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--blocks", type=int, default=1000, help="blocks of the KV pool")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("flags", nargs="*", help="further flags of vllm serve, after --")
    return parser.parse_args()


def _serve(options: argparse.Namespace) -> None:
    engine = Engine(
        num_gpu_blocks=options.blocks,
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        port=options.port or free_port(),
        flags=tuple(options.flags),
    )
    with engine:
        say(f"URL {engine.base_url} model {engine.model} log {engine.log_file}")
        while engine.process is not None and engine.process.poll() is None:
            time.sleep(0.5)


def main() -> None:
    """The command line."""
    options = _arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    ensure_venv(cache_folder())
    say(f"model {ensure_model(cache_folder())}")
    if not options.build_only:
        with contextlib.suppress(KeyboardInterrupt):
            _serve(options)


if __name__ == "__main__":
    main()
