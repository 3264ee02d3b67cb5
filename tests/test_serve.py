"""``kvctl serve`` as systemd starts it: a process of its own, before an engine that is there or is not."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import warm
from tests.ports import free_port
from tests.proxy.harness import (
    CHAT,
    CHAT_STREAM,
    LAST,
    STREAM_HEAD,
    FakeEngine,
    Wire,
    chunk,
    event,
    get,
    post,
)

MAIN = warm.MAIN
PATIENCE_S = 120.0
PAGE = (Path(__file__).parent / "conformance" / "pages" / "vllm-0.32-idle.prom").read_bytes()
MODELS = b'{"data":[{"id":"tiny","owned_by":"vllm","max_model_len":8192}]}'


@dataclass
class Kvctl:
    """A daemon, its ports, what it wrote, and what it told systemd."""

    process: asyncio.subprocess.Process
    port: int
    admin_port: int
    log: Path
    manager: socket.socket
    stopped: bool = False  # by the test

    async def client(self, port: int | None = None) -> Wire:
        return Wire(*await asyncio.open_connection("127.0.0.1", port or self.port, limit=1 << 22))

    async def ask(self, request: bytes, port: int | None = None) -> bytes:
        """The whole answer; the request must ask for the connection to be closed."""
        wire = await self.client(port)
        try:
            await wire.send(request)
            async with asyncio.timeout(PATIENCE_S):
                return await wire.reader.read()
        finally:
            wire.close()

    async def post(self, body: bytes = CHAT) -> bytes:
        return await self.ask(post(body, "/v1/chat/completions", b"Connection: close"))

    async def metrics(self) -> str:
        return (await self.ask(get("/metrics"), self.admin_port)).decode()

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def told(self) -> list[str]:
        """What systemd heard since the last time."""
        found: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.manager.recv(4096).decode())
        return found

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208 - a count of names


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.01)


def environment(folder: Path, engine: str, **settings: str) -> dict[str, str]:
    """The whole environment of a daemon that keeps its files in ``folder``."""
    clean = {key: text for key, text in os.environ.items() if not key.startswith("KVCTL_")}
    given = {
        **({"ENGINE_URL": engine} if engine else {}),  # else the settings name some
        "ADMIN_SOCKET": str(folder / "kvctl.sock"),
        "STATE_DIR": str(folder),
        "TOKENIZER": "bound",
        "HEADER_TIMEOUT": "60s",  # whoever is late here is a test on a machine that stands still
        "CONNECT_TIMEOUT": "60s",
        **settings,
    }
    return clean | {f"KVCTL_{key}": text for key, text in given.items()}


@contextlib.asynccontextmanager
async def daemon(
    folder: Path, engine: str, *, descriptors: int | None = None, **settings: str
) -> AsyncIterator[Kvctl]:
    """Started and answering; stopped by SIGTERM at the end."""
    ports = free_port(), free_port()
    listen = {"LISTEN": f"127.0.0.1:{ports[0]}", "ADMIN_LISTEN": f"127.0.0.1:{ports[1]}"}
    log, notify = folder / "log", folder / "notify"

    def limit() -> None:
        assert descriptors is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors // 4, descriptors))

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, log.open("wb") as written:
        manager.bind(str(notify))
        manager.setblocking(False)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MAIN, "serve"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            env=environment(folder, engine, **listen, **settings)
            | {"NOTIFY_SOCKET": str(notify), "WATCHDOG_USEC": "30000000"},
            preexec_fn=None if descriptors is None else limit,
        )
        it = Kvctl(process, *ports, log, manager)
        try:
            await until(lambda: process.returncode is not None or "listens on" in log.read_text())
            yield it
            if not it.stopped:
                assert process.returncode is None, log.read_text()
                process.terminate()
            async with asyncio.timeout(PATIENCE_S):
                assert await process.wait() == 0, log.read_text()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def engine(release: asyncio.Event) -> AsyncIterator[str]:
    """An engine that has metrics and a model, and whose streams stay open until ``release``."""

    def whole(body: bytes, kind: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            kind,
            len(body),
            body,
        )

    async def script(wire: Wire) -> None:
        while True:
            line = (await wire.request()).line
            if b"/metrics" in line:
                await wire.send(whole(PAGE, b"text/plain"))
            elif b"/v1/models" in line:
                await wire.send(whole(MODELS, b"application/json"))
            else:
                await wire.send(STREAM_HEAD + chunk(event("a")))
                await release.wait()
                await wire.send(chunk(event("", "stop")) + LAST)

    fake = FakeEngine(script)
    await fake.start()
    try:
        yield f"http://127.0.0.1:{fake.port}"
    finally:
        release.set()
        await fake.stop()


async def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    """F05, F11, C27: ready at once, says what it waits for, 503 with a time to come back, a quiet log."""
    async with daemon(tmp_path, f"http://127.0.0.1:{free_port()}") as it:
        heard = it.told()
        assert any(each.startswith("READY=1") for each in heard)
        assert (await it.ask(get("/healthz"))).startswith(b"HTTP/1.1 200 ")
        for _ in range(100):
            answer = await it.post()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: " in answer
        ready = await it.ask(get("/readyz"))
        assert ready.startswith(b"HTTP/1.1 503 ")
        assert b"engine" in ready

        def told_of_it() -> bool:
            heard.extend(it.told())
            return any("STATUS=" in each and "engine" in each for each in heard)

        await until(told_of_it)
        assert 'kvctl_telemetry_up{source="engine_metrics"} 0' in await it.metrics()
        assert len(it.lines()) <= 8, it.lines()


async def test_no_card_is_wanted(tmp_path: Path) -> None:
    """D22: gpus = none asks no NVML, and says nothing of it."""
    async with daemon(tmp_path, "http://127.0.0.1:1", GPUS="none") as it:
        assert 'source="nvml"' not in await it.metrics()
        assert not any("GPU" in line or "NVML" in line for line in it.lines())


async def test_sighup_changes_nothing_that_runs(tmp_path: Path) -> None:
    """F23, F11: the process stays, streams go on to their end, and hundreds of requests are no lines."""
    release = asyncio.Event()
    async with engine(release) as url, daemon(tmp_path, url) as it:
        async with asyncio.timeout(PATIENCE_S):
            while not (await it.ask(get("/readyz"))).startswith(b"HTTP/1.1 200 "):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        streams = [await it.client() for _ in range(20)]
        for wire in streams:
            await wire.send(post(CHAT_STREAM))
            await wire.reader.readuntil(event("a"))
        before = len(it.lines())
        it.process.send_signal(signal.SIGHUP)
        await until(lambda: any("settings reloaded" in line for line in it.lines()))
        assert (await it.ask(get("/healthz"))).startswith(b"HTTP/1.1 200 ")
        release.set()
        for wire in streams:
            await wire.reader.readuntil(LAST)
            wire.close()
        for _ in range(200):
            assert (await it.post()).startswith(b"HTTP/1.1 200 ")
        written = it.lines()[before:]  # a busy machine may add budget steps, of telemetry that comes late
        told = [line for line in written if "budget" not in line and "telemetry" not in line]
        assert len(told) <= 2, written
        assert it.process.returncode is None


async def test_signals_never_kill(tmp_path: Path) -> None:
    """However many come, and when: the last ones as the event loop is gone already."""
    async with engine(asyncio.Event()) as url, daemon(tmp_path, url, DRAIN_TIMEOUT="1h") as it:
        await until(lambda: any("engine starting -> up" in line for line in it.lines()))
        wire = await it.client()
        await wire.send(post(CHAT_STREAM))
        await wire.reader.readuntil(event("a"))
        rest = asyncio.create_task(wire.reader.readuntil(b"not complete"))
        it.stopped = True
        it.process.terminate()
        await until(lambda: any("stopping: 1 request" in line for line in it.lines()))
        while it.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # not by the process: that may look for its end
                os.kill(it.process.pid, signal.SIGTERM)
                os.kill(it.process.pid, signal.SIGHUP)
            await asyncio.sleep(0)
        assert b"shutting down" in await rest
        written = it.log.read_text()
        assert "a second signal cuts the drain short" in written
        assert "Traceback" not in written
        assert "never" not in written
        wire.close()


async def test_descriptors_run_out_and_come_back(tmp_path: Path) -> None:
    """F13: the soft limit is raised to the hard one, which is told to be small; past it kvctl recovers."""
    async with daemon(tmp_path, "http://127.0.0.1:1", descriptors=400) as it:
        assert any("400 at most" in line and "LimitNOFILE" in line for line in it.lines())
        wires = []
        for _ in range(300):
            with contextlib.suppress(OSError):
                wires.append(await it.client())
        await until(lambda: it.descriptors() > 110)  # beyond the soft limit of 100
        before = len(it.lines())
        for wire in wires:
            wire.close()
        await until(lambda: it.descriptors() < 60)
        assert (await it.ask(get("/healthz"))).startswith(b"HTTP/1.1 200 ")
        assert len(it.lines()) <= before + 4, it.lines()


@pytest.mark.parametrize("path", ["/nowhere/tokenizer", "/etc/passwd"])
async def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, path: str) -> None:
    """F10: one error that names the setting's value, at the start, and no traceback."""
    settings = {"LISTEN": "127.0.0.1:0", "ADMIN_LISTEN": "127.0.0.1:0", "TOKENIZER": path}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MAIN, "serve"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(tmp_path, "http://127.0.0.1:1", **settings),
    )
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode not in (0, None)
    assert path in err.decode()
    assert "Traceback" not in (out + err).decode()
