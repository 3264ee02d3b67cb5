"""What is kept of decisions on a real engine's requests, whose prompts are counted by ids."""

import json
from pathlib import Path

import pytest

from tests.live.conftest import StartDaemon
from tests.live.daemon import eventually
from tests.live.engine import Engine, forced_length
from tests.live.model import NAME
from tests.live.wire import Answer, post

PROMPT = "Count to three, slowly. " * 60  # beyond the first border of what prompts may share
CALLS = 6


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decisions") / "decisions.jsonl"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("tokenizer", ["engine", "model"])
def test_explained_and_replayed(
    engine: Engine, start_daemon: StartDaemon, log: Path, tokenizer: str, chat: bool
) -> None:
    """By the body's id too: vLLM puts a kind before the X-Request-Id. Then from the log's file alone."""
    counts = "engine" if tokenizer == "engine" else str(engine.model)
    file = log.with_name(f"{tokenizer}-{chat}.jsonl")
    daemon = start_daemon(engine, DECISION_LOG_FILE=str(file), TOKENIZER=counts)
    daemon.wait_ready()
    answers = [_ask(daemon.base_url, chat=chat) for _ in range(CALLS)]
    daemon.wait_empty()
    for answer in answers:
        own, asked = json.loads(answer.body)["id"], answer.headers["x-request-id"]
        assert own.endswith(asked)
        assert daemon.command("explain", own) == daemon.command("explain", asked)
        told = json.loads(daemon.command("explain", own, "-o", "json"))
        prompt = json.loads(answer.body)["usage"]["prompt_tokens"]
        assert (told["prompt_tokens"], told["id"]) == (prompt, asked)
    eventually(lambda: file.read_text().count('"type":"end"') == CALLS, 5, "all ends are written")
    asked_for = ("--policy", "forecast", "--engine-profile", "tiny-cpu", "-o", "json")
    replayed = json.loads(daemon.command("replay", "--log", str(file), *asked_for))
    assert replayed["recorded"]["completed"] == CALLS
    assert replayed["forecast"]["completed"] == CALLS


def _ask(url: str, *, chat: bool) -> Answer:
    asked: dict[str, object] = (
        {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    )
    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer = post(url + path, asked | {"model": NAME, "max_tokens": 64} | forced_length(24))
    assert answer.status == 200
    return answer
