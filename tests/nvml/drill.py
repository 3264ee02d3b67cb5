"""The fake libnvidia-ml in C, built here and ruled by a file: for real loads, real hangs and real crashes."""

import atexit
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
NAME = "libnvidia-ml.so.1"
SEARCH = "LD_LIBRARY_PATH"


@cache
def built() -> Path:
    """The library. Skips where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake NVML library with")
    folder = Path(mkdtemp(prefix="kvctl-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / NAME
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(SOURCE)], check=True
    )
    return library


class Drill:
    """A driver that does as it is told. ``environment`` makes a process find it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "driver"
        self._folder.mkdir()
        self._rules = folder / "rules"
        self._events = folder / "rules.events"
        self._events.touch()
        self.rule()
        self.install()

    @property
    def environment(self) -> dict[str, str]:
        """On top of a process's own."""
        path = os.pathsep.join(filter(None, (str(self._folder), os.environ.get(SEARCH))))
        return {SEARCH: path, "FAKE_NVML": str(self._rules)}

    def rule(self, *lines: str) -> None:
        """What holds from now on, instead of what was told before."""
        fresh = self._rules.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.replace(self._rules)

    def tell(self, index: int, *, xid: int | None = None, kind: int = 8) -> None:
        """An event of a card: an Xid, or one of another NVML type."""
        with self._events.open("a") as file:
            file.write(f"{index} {kind} {xid or 0}\n")

    @property
    def hung(self) -> bool:
        """Whether any call hung so far."""
        return self._rules.with_suffix(".hangs").exists()

    def install(self) -> None:
        """The library is there."""
        shutil.copy(built(), self._folder / NAME)

    def remove(self) -> None:
        """It is not."""
        (self._folder / NAME).unlink()
