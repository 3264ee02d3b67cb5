"""The commands as processes of their own, against a real admin server."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvctl.admin.desk import Desk
from kvctl.admin.listeners import OwnedSocket
from kvctl.admin.pace import Pace
from kvctl.admin.server import AdminApi, AdminServer
from kvctl.control.journal import Journal
from kvctl.core.overrides import bounds
from tests import warm
from tests.admin.conftest import DEFAULTS, Stand

MAIN = warm.MAIN


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


Kvctl = Callable[..., Coroutine[Any, Any, Done]]


@dataclass
class Daemon:
    socket: Path
    stand: Stand
    desk: Desk
    journal: Journal


async def kvctl_process(arguments: tuple[str, ...], env: dict[str, str]) -> Done:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVCTL_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        MAIN,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=clean | {"NO_COLOR": "1"} | env,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return Done(process.returncode or 0, out.decode(), err.decode())


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    desk = Desk(
        limits=bounds(0, 0.5),
        ttl_max_s=86400,
        defaults=DEFAULTS,
        state_dir=tmp_path / "state",
        clock=lambda: 100.0,
        wall=lambda: 1000.0,
        apply=lambda _: None,
    )
    stand, path = Stand(), tmp_path / "kvctl.sock"
    desk.open()
    journal = Journal(100, lambda: 100.0, lambda: 1000.0)
    server = AdminServer(AdminApi(stand, desk, journal, Pace()), OwnedSocket(path))
    await server.start()
    yield Daemon(path, stand, desk, journal)
    await server.close()
    await desk.close()


@pytest.fixture
def kvctl(tmp_path: Path) -> Kvctl:
    """``kvctl ARGUMENTS``; the socket of ``daemon`` is in the environment."""

    async def run(*arguments: str, **env: str) -> Done:
        return await kvctl_process(arguments, {"KVCTL_ADMIN_SOCKET": str(tmp_path / "kvctl.sock")} | env)

    return run
