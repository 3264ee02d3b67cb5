"""Builds, once, the virtual environment of the client libraries that the live suite asks with."""

import fcntl
import subprocess
import sys
import venv
from pathlib import Path

from tests.live.venv import STAMP, say

PACKAGES = ("openai>=1.60", "anthropic>=0.40", "langchain-openai>=0.3")


def ensure_clients(cache: Path) -> Path:
    """The Python of the finished environment; the stamp is written last, so a broken build starts anew."""
    home = cache / f"clients-py{sys.version_info.major}.{sys.version_info.minor}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "clients.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / STAMP).exists():
            _build(home)
    return home / "bin" / "python"


def _build(home: Path) -> None:
    say(f"client libraries in {home} (once)")
    venv.create(home, with_pip=True, clear=True)
    command = [
        str(home / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
    ]
    result = subprocess.run([*command, "-q", *PACKAGES], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"pip install of client libraries failed:\n{result.stderr[-4000:]}")
    (home / STAMP).touch()


if __name__ == "__main__":
    from tests.live.venv import cache_folder

    say(f"python {ensure_clients(cache_folder())}")
