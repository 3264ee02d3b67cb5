"""kvctl's unit under a real systemd: a user manager with mounts, processes and cgroups of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ops.test_install import install

HERE = Path(__file__).parent
UNSHARE = ("unshare", "--mount", "--cgroup", "--pid", "--fork", "--propagation", "private")


def missing() -> str:
    """Why there can be no such manager here; empty: there can."""
    if os.getuid() != 0:
        return "a service manager of one's own needs root"
    if not any(Path(each).exists() for each in ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")):
        return "systemd is not installed"
    if unified() is None:
        return "no cgroup2 hierarchy is mounted"
    for needed in (HERE, Path(sys.prefix).resolve()):
        if needed.parts[:2] in {("/", "tmp"), ("/", "run")}:
            return f"the manager has a /{needed.parts[1]} of its own, and would not find {needed}"
    probe = "mount -t tmpfs tmpfs /tmp && mount -t cgroup2 none /sys/fs/cgroup"
    done = subprocess.run([*UNSHARE, "sh", "-c", probe], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no namespaces of one's own: {done.stderr.strip()}"


def unified() -> Path | None:
    """Where cgroup2 is mounted."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return next((Path(each[1]) for each in mounts if each[2] == "cgroup2"), None)


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup that holds nothing else."""
    if why := missing():
        pytest.skip(why)
    root = unified()
    assert root is not None
    made = root / f"kvctl-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    yield made
    for folder in [*sorted(made.rglob("*/"), key=lambda each: -len(each.parts)), made]:
        if folder.is_dir():
            folder.rmdir()


@pytest.mark.slow
def test_a_life_under_systemd(group: Path, tmp_path: Path) -> None:
    """Start, status, reload, a refused reload, a restart under callers, kill -9, a hang, and the stop."""
    program = tmp_path / "kvctl"
    program.write_text(f"#!{sys.executable}\nfrom kvctl.cli.main import main\nmain()\n")
    program.chmod(0o755)
    install(tmp_path / "root", "--program", "/mnt/kvctl")
    enter = f"echo $$ > {group}/cgroup.procs; exec {' '.join(UNSHARE)} sh {HERE}/live_systemd.sh {tmp_path} "
    beside = f"{sys.executable} {HERE}/live_systemd.py /mnt/root/etc/systemd/system/kvctl.service"
    done = subprocess.run(
        ["sh", "-c", enter + beside], capture_output=True, text=True, timeout=900, check=False
    )
    journal = tmp_path / "journal"
    said = (done.stdout, done.stderr, journal.read_text() if journal.exists() else "")
    assert done.returncode == 0, said
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["manager"], said
    assert seen["start"] == 0, said
    assert seen["up"] | {"StatusText": ""} == {
        "ActiveState": "active", "StatusText": "", "NFileDescriptorStore": "1", "Type": "notify",
    }, said  # fmt: skip
    assert "margin 5%" in seen["up"]["StatusText"]
    assert (seen["reload"], seen["margin"]) == (0, True), said
    assert seen["bad_reload"] != 0
    assert seen["after_bad_reload"] == {"ActiveState": "active"}
    assert seen["restart"], said
    assert set(seen["callers"]) == {"answered"}, seen["callers"]
    back = {"ActiveState": "active", "SubState": "running", "NFileDescriptorStore": "1"}
    assert seen["killed"] == back, said
    assert seen["hung"] == back, said  # nothing but the watchdog ends a process that is stopped
    assert seen["stop"] == 0
    assert seen["end"] == {"ActiveState": "inactive", "Result": "success"}, said
