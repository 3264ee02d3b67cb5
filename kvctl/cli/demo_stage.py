"""The demo's stage: for each policy a simulated engine and the real daemon in front of it, and one card.

Engines and daemons are processes of their own, reached over HTTP on loopback, as in real life. The card is a
file that all three daemons read in place of NVML. Everything lives in one temporary folder and ends with it.
"""

import asyncio
import contextlib
import os
import random
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvctl.core.outcomes import EngineState, Policy
from kvctl.gpu.simulated import SimulatedCard

MODEL = "sim-1.5b"
PROFILE = "1.5b-shared"
BLOCKS, BLOCK_SIZE, CONTEXT = 2000, 16, 8192
GIB = 1 << 30
CARD_BYTES, CARD_USED = 24 * GIB, 18 * GIB
NEIGHBOUR_BYTES = int(5.4 * GIB)
"""Leaves 0.6 GiB free, well under the guard of 1 GiB."""

LISTEN_PORTS = range(20000, 32000)
"""Below the ports that Linux gives to outgoing connections, which could take one between choice and use."""

GPU_POLL_S = 1.0
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0


class StageError(RuntimeError):
    """A part of the stage did not come up; the message has the end of its log."""


@dataclass(slots=True)
class Lane:
    """One policy's engine and daemon."""

    policy: Policy
    folder: Path
    engine_url: str = ""
    url: str = ""
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def socket_path(self) -> Path:
        """The daemon's admin socket."""
        return self.folder / "admin.sock"

    def log_tail(self) -> str:
        """The last lines that the lane's processes wrote."""
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log"))]
        return "\n".join("".join(texts).splitlines()[-12:])


@dataclass(slots=True)
class Stage:
    """Everything that runs."""

    lanes: list[Lane]
    card: SimulatedCard


@contextlib.asynccontextmanager
async def open_stage(policies: Iterable[Policy]) -> AsyncIterator[Stage]:
    """Start engines and daemons, wait until all serve; stop them at the end. Raises StageError."""
    with tempfile.TemporaryDirectory(prefix="kvctl-demo-") as folder:
        root = Path(folder)
        card_file = root / "card.json"
        card = SimulatedCard(CARD_BYTES, CARD_USED, path=card_file)
        lanes = [Lane(policy, root / policy) for policy in policies]
        try:
            await _start_all(lanes, card_file)
            yield Stage(lanes, card)
        finally:
            await asyncio.gather(*(_stop(process) for lane in lanes for process in lane.processes))


async def _start_all(lanes: Iterable[Lane], card_file: Path) -> None:
    """All lanes at once; the first that fails stops the others' start. Raises StageError."""
    try:
        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(_start(lane, card_file))
    except* StageError as failed:
        raise failed.exceptions[0] from None


async def _start(lane: Lane, card_file: Path) -> None:
    lane.folder.mkdir()
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await _start_engine(lane)
            await _start_daemon(lane, card_file)
            await _wait_until_up(lane)
    except (TimeoutError, OSError) as error:
        raise StageError(f"{lane.policy}: did not start: {error}\n{lane.log_tail()}") from error


async def _start_engine(lane: Lane) -> None:
    engine = await _spawn(
        lane, "engine.log", "-m", "kvctl.sim", "--port", "0", "--model", MODEL, "--profile", PROFILE,
        "--blocks", str(BLOCKS), "--block-size", str(BLOCK_SIZE), "--max-model-len", str(CONTEXT),
        "--with-stdin", piped=True,
    )  # fmt: skip
    assert engine.stdout is not None  # noqa: S101 - asked for above
    said = (await engine.stdout.readline()).decode()
    if not said:
        raise StageError(f"{lane.policy}: the simulated engine ended at once\n{lane.log_tail()}")
    lane.engine_url = said.split()[-1]


async def _start_daemon(lane: Lane, card_file: Path) -> None:
    listen, admin = (f"127.0.0.1:{port}" for port in free_ports(2))
    lane.url = f"http://{listen}"
    config = lane.folder / "kvctl.toml"
    config.write_text(_toml(_settings(lane, listen, admin)))
    await _spawn(
        lane, "daemon.log", "-m", "kvctl.cli.demo_daemon", "--config", str(config), "--card", str(card_file)
    )


def _settings(lane: Lane, listen: str, admin: str) -> dict[str, object]:
    return {
        "engine_url": lane.engine_url,
        "listen": listen,
        "admin_listen": admin,
        "admin_socket": lane.socket_path,
        "state_dir": lane.folder,
        "policy": lane.policy,
        "tokenizer": "engine",
        "gpu_interval": f"{GPU_POLL_S}s",
        "drain_timeout": "1s",
        "log_level": "warning",
    }


def _toml(settings: dict[str, object]) -> str:
    return "".join(f'{key} = "{value}"\n' for key, value in settings.items())


async def _spawn(lane: Lane, log: str, *arguments: str, piped: bool = False) -> asyncio.subprocess.Process:
    """A Python process with its errors in the lane's folder and none of our KVCTL_* in its environment.

    It ends when its standard input does, so that it cannot outlive this process.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVCTL_")}
    with (lane.folder / log).open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=env, stdin=asyncio.subprocess.PIPE, stderr=errors,
            stdout=asyncio.subprocess.PIPE if piped else errors, start_new_session=True,
        )  # fmt: skip
    lane.processes.append(process)
    return process


async def _wait_until_up(lane: Lane) -> None:
    async with admin_session(lane) as session:
        while True:
            ended = [process for process in lane.processes if process.returncode is not None]
            if ended:
                raise StageError(f"{lane.policy}: a process ended at once\n{lane.log_tail()}")
            gate = await read_gate(session)
            if gate is not None and gate["state"] == EngineState.UP and gate["context_tokens"]:
                return
            await asyncio.sleep(0.1)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Send TERM, and KILL if it does not end."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def admin_session(lane: Lane) -> aiohttp.ClientSession:
    """A session on the daemon's admin socket."""
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(lane.socket_path)))


async def read_gate(session: aiohttp.ClientSession) -> dict[str, Any] | None:
    """The gate's status, as ``kvctl status`` reads it; None while the daemon does not answer."""
    try:
        async with session.get("http://kvctl/v1/status") as response:
            engines: dict[str, dict[str, Any]] = (await response.json())["engines"]
            return next(iter(engines.values()), None)
    except (aiohttp.ClientError, OSError):
        return None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment, out of reach of outgoing connections."""
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        for port in random.sample(LISTEN_PORTS, len(LISTEN_PORTS)):
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                sockets.append(one)
            if len(sockets) == count:
                return [each.getsockname()[1] for each in sockets]
    raise StageError(f"no {count} free ports between {LISTEN_PORTS.start} and {LISTEN_PORTS.stop}")
