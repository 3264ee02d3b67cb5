"""Settings, overrides and state directory of a daemon as a process: reload, SIGHUP, kill -9, two at once."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from kvctl.admin.client import AdminClient, RefusedError
from tests.test_serve import MAIN, PATIENCE_S, daemon, environment, until

URL = "http://127.0.0.1:1"


def client(folder: Path) -> AdminClient:
    return AdminClient(folder / "kvctl.sock", PATIENCE_S)


async def ask(folder: Path, method: str, *arguments: Any) -> dict[str, Any]:
    answer: dict[str, Any] = await asyncio.to_thread(getattr(client(folder), method), *arguments)
    return answer


async def kvctl(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """A command of its own, against the daemon of ``folder``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MAIN, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(folder, URL),
    )
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_reload_by_command_and_by_signal(tmp_path: Path) -> None:
    """F23: good, bad and unchanged settings; the process stays, the manager hears the handshake."""
    config = tmp_path / "kvctl.toml"
    config.write_text("margin = '6%'\n")
    async with daemon(tmp_path, URL, CONFIG=str(config)) as it:
        pid = it.process.pid
        it.told()
        config.write_text("margin = '8%'\n")
        status, out, err = await kvctl(tmp_path, "reload")
        assert (status, err) == (0, "")
        assert "margin: 6% -> 8%" in out
        told = "\n".join(it.told())
        assert "RELOADING=1\nMONOTONIC_USEC=" in told
        assert told.index("RELOADING=1") < told.index("READY=1")
        assert "kvctl_config_reload_success 1" in await it.metrics()
        assert "kvctl_config_revision 2" in await it.metrics()

        config.write_text("margin = '9%'\n\nmargn = 1\n")
        status, _, err = await kvctl(tmp_path, "reload")
        assert status == 1
        assert f"{config}:3: margn is not a setting; did you mean margin?" in err
        assert "kvctl_config_reload_success 0" in await it.metrics()
        assert (await ask(tmp_path, "get", "/v1/config"))["settings"]["margin"]["text"] == "8%"

        it.told()
        it.process.send_signal(signal.SIGHUP)
        await until(lambda: "READY=1" in "".join(it.told()))  # a refused reload ends its handshake too
        config.write_text("margin = '9%'\n")
        it.process.send_signal(signal.SIGHUP)
        await until(lambda: "margin 8% -> 9%" in it.log.read_text())
        assert it.process.pid == pid


async def test_a_bypass_outlives_kill_9(tmp_path: Path) -> None:
    """What on-call put in force holds over a crash, with its expiry, and the audit log is whole."""
    listen = {"LISTEN": "127.0.0.1:0", "ADMIN_LISTEN": "127.0.0.1:0"}
    first = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MAIN, "serve"),
        stdout=asyncio.subprocess.DEVNULL,
        env=environment(tmp_path, URL, **listen),
    )
    await until((tmp_path / "kvctl.sock").exists)
    body = {"ttl_s": 600, "reason": "refusals on an idle engine"}
    assert (await ask(tmp_path, "post", "/v1/bypass", body))["mode"] == "bypass"
    first.kill()
    await first.wait()
    async with daemon(tmp_path, URL) as again:
        assert (await ask(tmp_path, "get", "/v1/status"))["mode"] == "bypass"
        left = (await ask(tmp_path, "get", "/v1/overrides"))["active"]["enforce"]["left_s"]
        assert 0 < left <= 600
        assert 'mode="bypass"} 1' in await again.metrics()
        assert (await ask(tmp_path, "post", "/v1/resume"))["mode"] == "active"
    verbs = [json.loads(line)["verb"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert verbs == ["set", "unset"]


async def test_two_daemons_on_one_state_dir(tmp_path: Path) -> None:
    """The second would overwrite the first one's overrides: it does not start, and says what to do."""
    other = {"ADMIN_SOCKET": str(tmp_path / "other.sock"), "LISTEN": "127.0.0.1:0"}
    async with daemon(tmp_path, URL):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MAIN, "serve"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(tmp_path, URL, ADMIN_LISTEN="127.0.0.1:0", **other),
        )
        async with asyncio.timeout(PATIENCE_S):
            _, err = await process.communicate()
    assert process.returncode == 1
    assert f"kvctl: state_dir {tmp_path}: another kvctl runs with it; stop that one" in err.decode()


async def test_an_engine_that_wants_a_key(tmp_path: Path) -> None:
    """The key goes to the engine, from a credential, and is shown nowhere."""
    heard: list[str] = []

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heard.append(head)
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "engine_api_key").write_text("sk-of-the-engine\n")
    async with await asyncio.start_server(engine, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        folder = tmp_path / "run"
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
            async with daemon(folder, f"http://127.0.0.1:{port}") as it:
                await until(lambda: any("GET /metrics" in head for head in heard))
                shown = json.dumps(await ask(folder, "get", "/v1/config"))
                page, log = await it.metrics(), it.log.read_text()
    assert all("Authorization: Bearer sk-of-the-engine" in head for head in heard)
    assert "sk-of-the-engine" not in shown + page + log
    assert json.loads(shown)["settings"]["engine_api_key"]["origin"] == "secret"


async def test_a_stale_reload_is_refused_not_guessed_at(tmp_path: Path) -> None:
    """An unreadable file is a refusal with the path in it."""
    config = tmp_path / "kvctl.toml"
    config.write_text("margin = '6%'\n")
    async with daemon(tmp_path, URL, CONFIG=str(config)):
        config.unlink()
        with pytest.raises(RefusedError, match=r"kvctl\.toml: cannot be read"):
            await ask(tmp_path, "post", "/v1/reload")
