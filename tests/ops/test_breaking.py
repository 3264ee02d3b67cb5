"""What a bad night does to a running daemon: kills, full disks, storms of signals, floods, hostile words."""

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from kvctl.admin.client import AdminClient, ClientError, RefusedError
from tests.proxy.harness import CHAT_STREAM, LAST, event, get, post
from tests.test_reload import ask, kvctl
from tests.test_serve import MAIN, PATIENCE_S, Kvctl, daemon, engine, environment, until

NOBODY = "http://127.0.0.1:1"
HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e\ud800|[/red]\r\nHTTP/1.1 200 OK\u2028" + "x" * 5000
NIGHT = {"ttl_s": 600, "reason": "night"}


def audit(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


async def ready(it: Kvctl) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not (await it.ask(get("/readyz"))).startswith(b"HTTP/1.1 200 "):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


# --- crashes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_kill_9_at_any_moment_of_a_change(tmp_path: Path, seed: int) -> None:
    """What was acknowledged as kept holds after the crash; the audit log has whole lines only."""
    moments = random.Random(seed)
    settings = environment(tmp_path, NOBODY, LISTEN="127.0.0.1:0", ADMIN_LISTEN="127.0.0.1:0", GPUS="none")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MAIN, "serve"), stdout=asyncio.subprocess.DEVNULL, env=settings
    )
    await until((tmp_path / "kvctl.sock").exists)
    kept: dict[str, Any] = {}

    def changes() -> None:
        office = AdminClient(tmp_path / "kvctl.sock", PATIENCE_S)
        with contextlib.suppress(ClientError):
            office.post("/v1/drain", {"reason": "new driver"})
            for number in range(10_000):
                percent = 1 + number % 40
                made = office.put("/v1/overrides/margin", {"value": f"{percent}%", **NIGHT})
                assert made["kept"]
                kept["margin"], kept["revision"] = made["new"], made["revision"]

    changing = asyncio.create_task(asyncio.to_thread(changes))
    await until(lambda: bool(kept))
    await asyncio.sleep(moments.uniform(0, 0.3))
    process.kill()
    await process.wait()
    await changing
    async with daemon(tmp_path, NOBODY, GPUS="none"):
        shown = await ask(tmp_path, "get", "/v1/overrides")
        assert 0 <= shown["revision"] - kept["revision"] <= 1  # the last one may have been kept, unheard
        if shown["revision"] == kept["revision"]:
            assert shown["active"]["margin"]["value"] == kept["margin"]
        assert 0 < shown["active"]["margin"]["left_s"] <= 600
        assert (await ask(tmp_path, "get", "/v1/status"))["mode"] == "draining"
        assert shown["drains"]["*"]["reason"] == "new driver"
        assert (await ask(tmp_path, "put", "/v1/overrides/margin", {"value": "7%", **NIGHT}))["kept"]
    text = (tmp_path / "audit.jsonl").read_text()
    lines = [line for line in text.splitlines() if line.endswith("}")]
    assert len(text.splitlines()) - len(lines) <= 1  # what the kill tore is a line of its own
    assert json.loads(lines[0])["verb"] == "drain"
    assert json.loads(lines[-1])["new"] == 0.07


async def test_a_disk_that_fills_and_is_freed(tmp_path: Path) -> None:
    """Changes stay in force and are told as not kept; no half line is left, in audit or decision log."""
    log = tmp_path / "decisions.jsonl"
    async with daemon(tmp_path, NOBODY, GPUS="none", DECISION_LOG_FILE=str(log)) as it:
        resource.prlimit(it.process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        kept = []
        for number in range(30):
            body = {"value": f"{number + 1}%", **NIGHT}
            kept.append((await ask(tmp_path, "put", "/v1/overrides/margin", body))["kept"])
            assert (await it.post()).startswith(b"HTTP/1.1 503 ")
        assert kept[0]
        assert not kept[-1]
        assert (await ask(tmp_path, "get", "/v1/overrides"))["active"]["margin"]["value"] == 0.3
        assert len(audit(tmp_path)) == sum(kept)
        resource.prlimit(it.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert (await ask(tmp_path, "put", "/v1/overrides/margin", {"value": "31%", **NIGHT}))["kept"]
        assert audit(tmp_path)[-1]["new"] == 0.31
        for _ in range(40):
            await it.post()
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert {each["type"] for each in told} <= {"decision", "end", "dropped"}
    assert len(told) >= 40


# --- storms and floods --------------------------------------------------------------------------------


async def test_a_storm_of_sighups(tmp_path: Path) -> None:
    """F23: one reload is under way, one waits and reads for all the others; the last word is in force."""
    config = tmp_path / "kvctl.toml"
    config.write_text("margin = '6%'\n")
    async with daemon(tmp_path, NOBODY, CONFIG=str(config), GPUS="none") as it:
        for number in range(1000):
            it.process.send_signal(signal.SIGHUP)
            if number % 100 == 0:
                assert (await it.ask(get("/healthz"))).startswith(b"HTTP/1.1 200 ")
        config.write_text("margin = '9%'\n")
        it.process.send_signal(signal.SIGHUP)
        await until(lambda: "margin 6% -> 9%" in it.log.read_text())
        assert len(it.lines()) < 100


async def test_a_flood_of_refusals_at_the_loudest_level(tmp_path: Path) -> None:
    """F11: what thousands of refusals write is bounded, even while somebody looks at them."""
    async with daemon(tmp_path, NOBODY, GPUS="none", LOG_LEVEL="debug") as it:
        before = len(it.lines())

        async def caller() -> None:
            for _ in range(100):
                assert (await it.post()).startswith(b"HTTP/1.1 503 ")

        await asyncio.gather(*(caller() for _ in range(20)))
        assert len(it.lines()) - before < 150, it.lines()[-20:]


# --- reloads --------------------------------------------------------------------------------------------


async def test_a_reload_while_draining_and_with_streams(tmp_path: Path) -> None:
    """F23: a drain stays a drain; an engine taken out of the file keeps its streams until a restart."""
    release = asyncio.Event()
    config = tmp_path / "kvctl.toml"
    async with engine(release) as url:
        config.write_text(f'margin = "6%"\n[[engines]]\nname = "one"\nurl = "{url}"\n')
        async with daemon(tmp_path, "", CONFIG=str(config), GPUS="none") as it:
            await ready(it)
            wire = await it.client()
            await wire.send(post(CHAT_STREAM))
            await wire.reader.readuntil(event("a"))
            await ask(tmp_path, "post", "/v1/drain")
            config.write_text(f'margin = "8%"\n[[engines]]\nname = "two"\nurl = "{NOBODY}"\n')
            done = await ask(tmp_path, "post", "/v1/reload")
            assert [each["key"] for each in done["applied"]] == ["margin"]
            assert "engines" in {each["key"] for each in done["needs_restart"]}
            status = await ask(tmp_path, "get", "/v1/status")
            assert status["mode"] == "draining"
            assert status["engines"]["one"]["leases"] == 1
            release.set()
            await wire.reader.readuntil(LAST)
            wire.close()


# --- hostile words --------------------------------------------------------------------------------------


async def test_a_hostile_model_name_is_a_word_everywhere(tmp_path: Path) -> None:
    """Half a surrogate pair, escapes and bars in a name: every view still answers, no line is forged."""
    log = tmp_path / "decisions.jsonl"
    release = asyncio.Event()
    release.set()
    body = json.dumps(
        {"model": HOSTILE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    ).encode()
    async with (
        engine(release) as url,
        daemon(tmp_path, url, DECISION_LOG_FILE=str(log), LOG_LEVEL="debug", GPUS="none") as it,
    ):
        await ready(it)
        for _ in range(3):
            await it.post(body)
            await it.post()
        reason = {"value": "7%", "ttl_s": 600, "reason": "a\ud800b\x1b[31m\nc"}
        await ask(tmp_path, "put", "/v1/overrides/margin", reason)
        for route in ("status", "decisions", "queue", "engines", "overrides", "config", "budget"):
            assert await ask(tmp_path, "get", f"/v1/{route}"), route
        assert (await it.ask(get("/v1/page"), it.admin_port)).startswith(b"HTTP/1.1 200 ")
        for verb in ("status", "events", "overrides", "engines"):
            status, out, err = await kvctl(tmp_path, verb)
            assert (status, err) == (0, ""), verb
            assert all(line.isprintable() for line in out.split("\n")), verb
        assert all(line.isprintable() for line in it.log.read_text().split("\n"))
    for line in log.read_text().split("\n"):
        assert json.loads(line or "{}") is not None


async def test_no_prompt_and_no_key_is_written_anywhere(tmp_path: Path) -> None:
    """Bytes of prompts, answers and credentials are searched for in all that kvctl writes or shows."""
    log, prompt, key = tmp_path / "decisions.jsonl", "my-secret-prompt-7c1", "sk-caller-secret-9f2"
    release = asyncio.Event()
    release.set()
    body = json.dumps({
        "model": "tiny", "max_tokens": 9, "user": f"{prompt}-user", "stop": [f"{prompt}-stop"],
        "messages": [{"role": "system", "content": prompt}, {"role": "user", "content": prompt * 50}],
        "tools": [{"type": "function", "function": {"name": f"{prompt}-tool", "parameters": {}}}],
    }).encode()  # fmt: skip
    bad = body.replace(b'"max_tokens": 9', b'"max_tokens": "' + prompt.encode() + b'"')
    headers = f"Authorization: Bearer {key}\r\nCookie: {key}\r\nX-Api-Key: {key}\r\nConnection: close"
    heard: list[bytes] = []
    loud = {"LOG_LEVEL": "debug", "ACCESS_LOG": "true", "DECISION_LOG_FILE": str(log)}
    async with engine(release) as url, daemon(tmp_path, url, descriptors=None, GPUS="none", **loud) as it:
        await ready(it)
        listener = await asyncio.open_unix_connection(str(tmp_path / "kvctl.sock"))
        listener[1].write(b"GET /v1/events HTTP/1.1\r\nHost: k\r\n\r\n")
        await listener[0].readuntil(b"hello")
        for each in (body, bad, body[:-5], b"\xff" + body):
            await it.ask(post(each, "/v1/chat/completions", headers.encode()))
            await it.ask(post(each, f"/v1/{prompt}", headers.encode()))
        await ask(tmp_path, "post", "/v1/drain")
        await it.ask(post(body, "/v1/chat/completions", headers.encode()))
        async with asyncio.timeout(PATIENCE_S):
            while b'"traffic"' not in b"".join(heard):
                heard.append(await listener[0].read(1 << 16))
        listener[1].close()
        archive = tmp_path / "support.tar.gz"
        assert (await kvctl(tmp_path, "support", "--file", str(archive)))[0] == 0
        with tarfile.open(archive) as members:
            heard += [file.read() for each in members if (file := members.extractfile(each)) is not None]
        heard += [(await it.metrics()).encode(), await it.ask(get("/v1/page"), it.admin_port)]
        for route in ("status", "decisions", "queue"):
            heard.append(json.dumps(await ask(tmp_path, "get", f"/v1/{route}")).encode())
    heard += [path.read_bytes() for path in (it.log, log, tmp_path / "audit.jsonl")]
    everything = b"".join(heard)
    assert b"reject" in everything
    for secret in (key, prompt):
        assert secret.encode() not in everything.replace(f"/v1/{prompt}".encode(), b"")


# --- the admin socket -----------------------------------------------------------------------------------


async def test_garbage_on_the_admin_socket(tmp_path: Path) -> None:
    """Noise, huge reasons, half requests and requests in one breath: an answer or an end, nothing else."""
    noise = random.Random(7)
    async with daemon(tmp_path, NOBODY, GPUS="none") as it:
        path = str(tmp_path / "kvctl.sock")
        before = it.descriptors()
        huge = json.dumps({"value": "7%", "reason": "x" * 10_000_000}).encode()
        head = b"PUT /v1/overrides/margin HTTP/1.1\r\nHost: k\r\nContent-Length: %d\r\n\r\n"
        for sent in (
            noise.randbytes(100_000),
            b"\n" * 100_000,
            b"GET /" + b"a" * 1_000_000,
            b"GET /v1/status HTTP/1.1\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
            head % len(huge) + huge,
            head % 10**18 + b"{",
            b"GET /v1/status HTTP/1.1\r\nHost: k\r\n\r\n" * 200,
            b"GET /v1/%ff%00%1b[2J HTTP/1.1\r\nHost: k\r\nConnection: close\r\n\r\n",
        ):
            reader, writer = await asyncio.open_unix_connection(path)
            with contextlib.suppress(OSError):
                writer.write(sent)
                await asyncio.wait_for(writer.drain(), 5)
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(reader.read(1 << 16), 1)
            writer.transport.abort()
        await until(lambda: it.descriptors() <= before + 1)
        assert (await ask(tmp_path, "get", "/v1/overrides"))["revision"] == 0
        assert len(it.lines()) < 40, it.lines()
        assert "Traceback" not in it.log.read_text()


async def test_two_commands_race_for_one_revision(tmp_path: Path) -> None:
    """Of two who both saw revision 0, one wins and the other is told, with exit status 4."""
    async with daemon(tmp_path, NOBODY, GPUS="none"):
        common = ("--for", "10m", "--reason", "race", "--if-match", "0", "--yes")
        done = await asyncio.gather(
            *(kvctl(tmp_path, "set", "margin", f"{percent}%", *common) for percent in (6, 7, 8))
        )
        assert sorted(status for status, _, _ in done) == [0, 4, 4]
        assert all("revision 0 is stale" in err for status, _, err in done if status == 4)
        assert (await ask(tmp_path, "get", "/v1/overrides"))["revision"] == 1
        with pytest.raises(RefusedError):
            await ask(tmp_path, "delete", "/v1/overrides/margin", 0)


async def test_a_state_dir_that_is_read_only_or_of_another_kind(tmp_path: Path) -> None:
    """It starts, says what is lost and serves; what lies there instead of a state is left or set aside."""
    state = tmp_path / "state"
    state.mkdir()
    os.mkfifo(state / "overrides.json")
    (state / "audit.jsonl").mkdir()
    async with daemon(tmp_path, NOBODY, STATE_DIR=str(state), GPUS="none") as it:
        made = await ask(tmp_path, "put", "/v1/overrides/margin", {"value": "7%", **NIGHT})
        assert (made["new"], made["kept"]) == (0.07, False)
        assert "Overrides, drains and audit cannot be written" in it.log.read_text()
        assert "Traceback" not in it.log.read_text()
