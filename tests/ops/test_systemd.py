"""The units as systemd reads them, the sample files as systemd and docker do, and the notify protocol."""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from kvctl.control.gatekeeper import Gatekeeper
from kvctl.control.ticker import Ticker
from kvctl.core.gate import Gate
from kvctl.core.supply import GateConfig
from kvctl.settings.loading import load
from kvctl.systemd_notify import Notifier

FOLDER = Path(__file__).parents[2] / "systemd"
ANALYZE = shutil.which("systemd-analyze")
needs_analyze = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


UNITS = ("kvctl.service", "kvctl@.service")
each_unit = pytest.mark.parametrize("name", UNITS)


def usable(name: str, folder: Path) -> Path:
    """The unit with a program that exists here; verify looks for it."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    copy = folder / name.replace("@.", "@a.")
    copy.write_text(text.replace("/opt/kvctl/bin/kvctl", shutil.which("true") or "/bin/true"))
    return copy


def settings_of_unit(name: str = UNITS[0]) -> dict[str, str]:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@needs_analyze
@each_unit
def test_verify(name: str, tmp_path: Path) -> None:
    unit = usable(name, tmp_path)
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_analyze
@each_unit
def test_exposure(name: str, tmp_path: Path) -> None:
    """F01: hardened, by systemd's own score: 2.0 at most."""
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager"]
    done = subprocess.run([*command, usable(name, tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_an_instance_is_as_hardened_as_the_single_one() -> None:
    single, instance = (set((FOLDER / name).read_text().splitlines()) for name in UNITS)
    own = {"Description", "EnvironmentFile", "ExecStart", "StateDirectory", "RuntimeDirectory"}
    differs = {line.partition("=")[0] for line in single - instance if "=" in line and line[0] != "#"}
    assert differs == own | {"RuntimeDirectoryPreserve"}


def test_instances_share_nothing() -> None:
    unit = settings_of_unit("kvctl@.service")
    assert (unit["StateDirectory"], unit["RuntimeDirectory"]) == ("kvctl/%i", "kvctl/%i")
    assert "KVCTL_ADMIN_SOCKET=%t/kvctl/%i/kvctl.sock" in unit["Environment"]
    assert "KVCTL_STATE_DIR=%S/kvctl/%i" in unit["Environment"]
    assert "/etc/kvctl/%i.toml" in unit["ExecStart"]


def test_the_descriptor_store_takes_every_listening_socket() -> None:
    assert int(settings_of_unit()["FileDescriptorStoreMax"]) >= 2


def test_the_drop_in_is_for_a_systemd_that_knows_it() -> None:
    text = (FOLDER / "notify-reload.conf").read_text(encoding="utf-8")
    assert "Type=notify-reload\nExecReload=\n" in text
    assert "notify-reload" not in settings_of_unit()["Type"]


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd-tmpfiles is not installed")
def test_the_folders_are_made(tmp_path: Path) -> None:
    """Below a root of its own, from this one file."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("kvctl:x:990:990::/:/bin/false\nroot:x:0:0::/:/bin/sh\n")
    (tmp_path / "etc/group").write_text("kvctl:x:990:\nroot:x:0:\n")
    done = subprocess.run(
        ["systemd-tmpfiles", f"--root={tmp_path}", "--create", FOLDER / "kvctl.tmpfiles"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "Failed to" in done.stderr and os.getuid() != 0:
        pytest.skip("folders of other users are made by root alone")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "etc/kvctl").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "run/kvctl").stat().st_uid == 990


def all_of(key: str) -> list[str]:
    """Every value that the unit gives to ``key``."""
    lines = (FOLDER / "kvctl.service").read_text(encoding="utf-8").splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


def test_the_cards_device_classes_are_let_in() -> None:
    """F01: closed but for exactly what NVML opens, MIG's capabilities included."""
    assert all_of("DevicePolicy") == ["closed"]
    assert "PrivateDevices" not in settings_of_unit()
    assert set(all_of("DeviceAllow")) == {
        "char-nvidia rw",
        "char-nvidia-frontend rw",
        "char-nvidiactl rw",
        "char-nvidia-caps r",
    }


def test_the_cards_are_waited_for_and_not_required() -> None:
    """D24: after the persistence service, but a machine without it starts kvctl all the same."""
    assert "nvidia-persistenced.service" in settings_of_unit()["After"].split()
    assert not {"Requires", "BindsTo", "Requisite"} & settings_of_unit().keys()


def test_the_unit_says_what_the_program_does() -> None:
    """F05, F13, F23: notify, with a reload that is answered; descriptors; no limit on restarts."""
    unit = settings_of_unit()
    assert (unit["Type"], unit["NotifyAccess"]) == ("notify", "main")
    assert unit["ExecReload"].split()[1:] == ["reload"]
    assert int(unit["LimitNOFILE"]) >= 65536
    assert (unit["Restart"], unit["StartLimitIntervalSec"]) == ("always", "0")


def test_only_declared_folders_are_written() -> None:
    """F10: the defaults lie in the unit's own State and Runtime directories; all else is read-only."""
    unit, settings = settings_of_unit(), load(None, {"KVCTL_ENGINE_URL": "http://h:1"})
    assert unit["ProtectSystem"] == "strict"
    assert "ReadWritePaths" not in unit
    fields = type(settings).model_fields
    assert fields["state_dir"].default == Path("/var/lib") / unit["StateDirectory"]
    assert fields["admin_socket"].default.parent == Path("/run") / unit["RuntimeDirectory"]


def test_the_stop_outlasts_the_drain() -> None:
    minutes = re.fullmatch(r"(\d+)min", settings_of_unit()["TimeoutStopSec"])
    assert minutes is not None
    assert int(minutes.group(1)) * 60 > load(None, {"KVCTL_ENGINE_URL": "http://h:1"}).drain_timeout


def test_memory_is_above_the_body_bound() -> None:
    gib = re.fullmatch(r"(\d+)G", settings_of_unit()["MemoryMax"])
    assert gib is not None
    assert int(gib.group(1)) << 30 > 2 * load(None, {"KVCTL_ENGINE_URL": "http://h:1"}).max_body_bytes_total


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_the_user_is_made(tmp_path: Path) -> None:
    """F02: the unit's user and group are those that the package makes."""
    (tmp_path / "etc").mkdir()
    subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", FOLDER / "kvctl.sysusers"], capture_output=True, check=True
    )
    assert (tmp_path / "etc/passwd").read_text().startswith(f"{settings_of_unit()['User']}:")
    assert (tmp_path / "etc/group").read_text().startswith(f"{settings_of_unit()['Group']}:")


def env_lines(*, with_examples: bool) -> dict[str, str]:
    """kvctl.env as docker reads it: everything after the first = is the value."""
    lines = (FOLDER / "kvctl.env").read_text(encoding="utf-8").splitlines()
    if with_examples:
        lines = [re.sub(r"^#(?=KVCTL_)", "", line) for line in lines]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_sample_environment_is_the_same_for_systemd_docker_and_a_shell() -> None:
    """F08: the sample file means the same to systemd, docker and sh."""
    shell = subprocess.run(
        ["sh", "-c", f"set -a; . {FOLDER / 'kvctl.env'}; env"],
        capture_output=True,
        text=True,
        check=True,
        env={},
    )
    sourced = dict(line.split("=", 1) for line in shell.stdout.splitlines() if line.startswith("KVCTL_"))
    assert sourced == env_lines(with_examples=False)
    load(None, env_lines(with_examples=False))
    assert len(env_lines(with_examples=True)) > len(sourced)
    load(None, env_lines(with_examples=True))


def test_the_sample_file_and_its_examples(tmp_path: Path) -> None:
    text = (FOLDER / "kvctl.toml").read_text(encoding="utf-8")
    load(FOLDER / "kvctl.toml", {})
    opened = tmp_path / "kvctl.toml"
    opened.write_text(re.sub(r"(?m)^#(?=\w+ = )", "", text))
    assert len(load(opened, {}).model_fields_set) > 5


# --- notify -----------------------------------------------------------------------------------------


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """A stand-in for systemd's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.setblocking(False)
        yield made


def env_of(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.getsockname(), **more}


def heard(manager: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


def test_a_life(manager: socket.socket) -> None:
    notifier = Notifier(env_of(manager))
    notifier.ready("budget 1")
    notifier.status("budget 1")
    notifier.status("budget\n2")
    notifier.stopping("draining")
    notifier.extend_timeout(1.5)
    notifier.close()
    notifier.status("after the end")
    assert heard(manager) == [
        "READY=1\nSTATUS=budget 1",
        "STATUS=budget 2",
        "STOPPING=1\nSTATUS=draining",
        "EXTEND_TIMEOUT_USEC=1500000",
    ]


@pytest.mark.parametrize("usec", [500_000, 10_000_000])
def test_the_watchdog_is_fed_in_time_and_not_too_often(manager: socket.socket, usec: int) -> None:
    """F03: ticks at 20 ms: no gap is longer than half the deadline, and most ticks send nothing."""
    notifier = Notifier(env_of(manager, WATCHDOG_USEC=str(usec), WATCHDOG_PID=str(os.getpid())))
    sent, now = [0.0], 0.0
    while now < 4 * usec / 1e6:
        notifier.alive(now)
        if heard(manager) == ["WATCHDOG=1"]:
            sent.append(now)
        now += 0.02
    notifier.close()
    gaps = [later - earlier for earlier, later in pairwise(sent)]
    assert max(gaps) <= usec / 2e6
    assert 10 < len(sent) < 30


async def test_a_loop_that_hangs_is_not_alive(manager: socket.socket) -> None:
    """F03: pings come from finished ticks: a loop blocked for three deadlines sends none."""
    notifier = Notifier(env_of(manager, WATCHDOG_USEC="60000"))
    keeper = Gatekeeper(Gate(GateConfig()), time.monotonic)
    ticker = Ticker(lambda: [keeper], 0.005, lambda _: notifier.alive(time.monotonic()))
    ticker.start()
    async with asyncio.timeout(60):
        while "WATCHDOG=1" not in heard(manager):  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.005)
    heard(manager)
    time.sleep(0.18)  # noqa: ASYNC251 - the hang that is to be seen
    assert heard(manager) == []
    await ticker.close()
    notifier.close()


@pytest.mark.parametrize(
    "more",
    [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}],
)
def test_no_watchdog_that_is_not_ours(manager: socket.socket, more: dict[str, str]) -> None:
    """F03, F04: another process's watchdog is not fed."""
    notifier = Notifier(env_of(manager, **more))
    notifier.alive(1.0)
    assert heard(manager) == []
    notifier.close()


def test_helpers_do_not_inherit_it(manager: socket.socket) -> None:
    """F04: the notify socket is taken out of the environment before any helper starts."""
    script = (
        "import os\nfrom kvctl.systemd_notify import Notifier\nn = Notifier()\nn.ready()\n"
        "print([k for k in os.environ if k.startswith(('NOTIFY', 'WATCHDOG'))])"
    )
    env = os.environ | env_of(manager, WATCHDOG_USEC="1000000")
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert heard(manager) == ["READY=1"]


def test_an_abstract_name() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(f"\0kvctl-test-{os.getpid()}")
        made.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": f"@kvctl-test-{os.getpid()}"})
        notifier.ready()
        assert heard(made) == ["READY=1"]
        notifier.close()


def test_nobody_listens(tmp_path: Path) -> None:
    for env in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        notifier = Notifier(env)
        notifier.ready("x")
        notifier.alive(1.0)
        notifier.stopping()
        notifier.close()
        notifier.close()


def test_a_status_that_was_not_heard_is_said_again(tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "late")})
    notifier.status("one")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "late"))
        made.setblocking(False)
        notifier.status("one")
        notifier.status("one")
        assert heard(made) == ["STATUS=one"]
    notifier.close()
