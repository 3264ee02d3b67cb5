"""What processes beside this one see of the cards: the NVML process, and one in the unit's sandbox."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "systemd" / "kvctl.service"
BOOTED = Path("/run/systemd/system")
# of the unit: what takes devices, calls and rights away; not its user, folders and restarts
_TAKES = (
    *("DevicePolicy", "DeviceAllow", "NoNewPrivileges", "CapabilityBoundingSet", "ProtectSystem"),
    *("ProtectKernelTunables", "ProtectKernelModules", "ProtectControlGroups", "ProtectProc", "PrivateIPC"),
    *("LockPersonality", "MemoryDenyWriteExecute", "RestrictRealtime", "RestrictNamespaces"),
    *("RestrictAddressFamilies", "SystemCallArchitectures", "SystemCallFilter", "SystemCallErrorNumber"),
)
_READ = (
    "import asyncio; from tests.gpu.report import Isolation, source;"
    "r = asyncio.run(source(isolation=Isolation.PROCESS).read());"
    "print(r.fault or ' '.join(s.uuid for s in r.samples), r.detail)"
)


class Lines(Protocol):
    """A report."""

    def line(self, what: str, value: object, note: str = "") -> None:
        """One row."""

    def check(self, what: str, *, good: bool, value: object) -> None:
        """One row that can fail."""


def properties() -> list[str]:
    """The unit's sandbox as options of systemd-run."""
    lines = [line for line in UNIT.read_text().splitlines() if line.partition("=")[0] in _TAKES]
    return [option for line in lines for option in ("--property", line)]


def line(report: Lines, uuids: Sequence[str]) -> None:
    """Whether the cards can be read inside the unit's sandbox; told where it cannot be tried."""
    program = shutil.which("systemd-run")
    if program is None or not BOOTED.is_dir() or os.geteuid() != 0:
        report.line("in the unit's sandbox", "not tried", "needs systemd as init, and root")
        return
    command = [program, "--quiet", "--wait", "--pipe", "--collect", f"--working-directory={ROOT}"]
    command += [*properties(), sys.executable, "-c", _READ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    said = done.stdout.strip() or done.stderr.strip()
    good = done.returncode == 0 and said.split() == list(uuids)
    report.check("in the unit's sandbox the same cards are read", good=good, value=said[-300:])


def private_memory() -> str:
    """Of each NVML process of ours."""
    found = []
    for pid in children():
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found += [row.split()[1] for row in rows if row.startswith("Private_Dirty:")]
    return ", ".join(f"{int(each) / 1024:.1f} MiB" for each in found) or "no process"


def devices_held(pids: Sequence[str]) -> list[str]:
    """Device nodes of the driver that these processes hold."""
    links: set[str] = set()
    for pid in pids:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor that listed them
                links.add(str(each.readlink()))
    return sorted(links & {str(each) for each in Path("/dev").glob("nvidia*")})


def children() -> list[str]:
    """The NVML processes of this one."""
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in own if b"kvctl.gpu.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
