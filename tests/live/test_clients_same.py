"""Clients through kvctl and straight to the engine: the same answer and the same outcome."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.live.clients_venv import ensure_clients
from tests.live.daemon import Daemon
from tests.live.engine import Engine
from tests.live.model import NAME
from tests.live.venv import cache_folder, ensure_venv

ASK = Path(__file__).with_name("clients_ask.py")
NEW_EACH_TIME = re.compile(
    rb'"(?:id|request_id|item_id)":\s*"[^"]*"|"(?:created|created_at)":\s*[\d.]+', re.ASCII
)
TRIES = 4


@pytest.fixture(scope="module")
def libraries() -> Path:
    return ensure_clients(cache_folder())


def asked(python: Path, base_url: str) -> dict[str, Any]:
    result = subprocess.run(
        [str(python), "-P", str(ASK), base_url, NAME],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    outcomes: dict[str, Any] = json.loads(result.stdout)
    return outcomes


def test_openai_anthropic_and_langchain(engine: Engine, daemon: Daemon, libraries: Path) -> None:
    direct, through = asked(libraries, engine.base_url), asked(libraries, daemon.base_url)
    assert through == direct
    assert through["openai, too long"]["status"] == 400
    assert through["openai, no such model"]["status"] == 404
    assert through["langchain"]["text"]
    daemon.wait_empty()


def curl(url: str, *flags: str) -> tuple[bytes, bytes]:
    """(status line and what decides how the body is read, body)."""
    result = subprocess.run(
        ["curl", "-sS", "-N", "-i", "--max-time", "60", "-H", "Content-Type: application/json", *flags, url],
        capture_output=True,
        check=True,
    )
    answer = result.stdout
    invited = answer.startswith(b"HTTP/1.1 100 ")  # and then comes the answer
    if invited:
        answer = answer.partition(b"\r\n\r\n")[2]
    head, _, body = answer.partition(b"\r\n\r\n")
    kind = re.search(rb"(?im)^content-type: (\S+)", head)
    told = b"100, " * invited + head.split(b"\r\n")[0].split(b" ", 1)[1] + (kind[1] if kind else b"")
    return told, NEW_EACH_TIME.sub(b"", body)


BODY: dict[str, Any] = {"model": NAME, "max_tokens": 16, "temperature": 0}
CHAT = BODY | {"messages": [{"role": "user", "content": "hi"}]}
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "chat": ("/v1/chat/completions", ("-d", json.dumps(CHAT))),
    "chat, streamed": ("/v1/chat/completions", ("-d", json.dumps(CHAT | {"stream": True}))),
    "text, streamed": ("/v1/completions", ("-d", json.dumps(BODY | {"prompt": "Hi", "stream": True}))),
    "chat by HTTP/1.0": ("/v1/chat/completions", ("--http1.0", "-d", json.dumps(CHAT))),
    "chat, streamed by HTTP/1.0": (
        "/v1/chat/completions",
        ("--http1.0", "-d", json.dumps(CHAT | {"stream": True})),
    ),
    "chat in chunks": (
        "/v1/chat/completions",
        ("-H", "Transfer-Encoding: chunked", "-d", json.dumps(CHAT)),
    ),
    "chat with an expectation": (
        "/v1/chat/completions",
        ("-H", "Expect: 100-continue", "-d", json.dumps(CHAT)),
    ),
    "messages": ("/v1/messages", ("-d", json.dumps(CHAT))),
    "models": ("/v1/models", ()),
    "models, the head alone": ("/v1/models", ("-I",)),
    "no JSON": ("/v1/chat/completions", ("-d", "{")),
    "a limit of nothing": ("/v1/chat/completions", ("-d", json.dumps(CHAT | {"max_tokens": 0}))),
    "tokenize": ("/tokenize", ("-d", json.dumps({"model": NAME, "prompt": "Hello"}))),
}


@pytest.mark.parametrize("case", CASES)
def test_curl(engine: Engine, daemon: Daemon, case: str) -> None:
    """A busy engine now and then puts two tokens into one event: then the bytes differ by themselves."""
    path, flags = CASES[case]
    for _ in range(TRIES):
        direct, through = curl(engine.base_url + path, *flags), curl(daemon.base_url + path, *flags)
        if direct == through:
            return
    assert through == direct


def bench(base_url: str, folder: Path) -> dict[str, Any]:
    command = [ensure_venv(cache_folder()) / "bin" / "vllm", "bench", "serve", "--backend", "openai"]
    flags = {
        "--base-url": base_url,
        "--endpoint": "/v1/completions",
        "--model": NAME,
        "--tokenizer": Engine().model,
        "--dataset-name": "random",
        "--random-input-len": 32,
        "--random-output-len": 16,
        "--num-prompts": 12,
        "--max-concurrency": 4,
        "--seed": 3,
        "--temperature": 0,
        "--result-dir": folder,
        "--result-filename": "result.json",
    }
    pairs = [str(part) for flag in flags.items() for part in flag]
    ended = subprocess.run(
        [*map(str, command), *pairs, "--ignore-eos", "--save-result", "--save-detailed"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_vllm_bench_serve(engine: Engine, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "direct").mkdir()
    (tmp_path / "through").mkdir()
    direct = bench(engine.base_url, tmp_path / "direct")
    through = bench(daemon.base_url, tmp_path / "through")
    for key in ("completed", "total_input_tokens", "total_output_tokens", "generated_texts", "output_lens"):
        assert through[key] == direct[key], key
    assert through["completed"] == 12
    daemon.wait_empty()
