"""kvctl counts a prompt as the engine does, to the token.

With an operator's cap of ``LIMIT`` tokens and ``max_tokens`` of as many, every prompt is refused and the
refusal names the largest ``max_tokens`` that would fit: the cap less the prompt. So it shows the count.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.live.conftest import StartDaemon
from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine, forced_length
from tests.live.model import NAME
from tests.live.shapes import Body, chats, texts
from tests.live.wire import open_request, post

LIMIT = 4096
BLOCK = 32


@pytest.fixture(scope="module")
def capped(engine: Engine, start_daemon: StartDaemon) -> Daemon:
    daemon = start_daemon(engine, MAX_CONTEXT=str(LIMIT))
    daemon.wait_ready()
    return daemon


def engines_count(engine: Engine, body: Body) -> int:
    return int(post(engine.base_url + "/tokenize", {"model": NAME} | body).json["count"])


def mismatch(engine: Engine, daemon: Daemon, body: Body) -> str | None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = post(daemon.base_url + path, {"model": NAME, "max_tokens": LIMIT} | body)
    count = engines_count(engine, body)
    if answer.status == 400 and str(LIMIT - count) in re.findall(r"\d+", answer.error["message"]):
        return None
    return f"{count} tokens: {str(body)[:200]} -> {answer.status} {answer.body[:300]!r}"


@pytest.mark.parametrize("shapes", [texts, chats])
def test_counts_are_the_engines(engine: Engine, capped: Daemon, shapes: type[list[Body]]) -> None:
    bodies = shapes()
    assert len(bodies) >= 75
    with ThreadPoolExecutor(4) as pool:
        wrong = [text for text in pool.map(lambda body: mismatch(engine, capped, body), bodies) if text]
    assert not wrong, f"{len(wrong)} of {len(bodies)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "body", [texts()[30], chats()[40], {"prompt": ["one", "and two"]}, {"prompt": [5, 6, 7]}]
)
def test_the_claim_is_prompt_and_cap_in_blocks(engine: Engine, daemon: Daemon, body: Body) -> None:
    cap = 6000
    prompts = (
        [{"prompt": text} for text in body["prompt"]] if body.get("prompt") == ["one", "and two"] else [body]
    )
    counts = [3] if body.get("prompt") == [5, 6, 7] else [engines_count(engine, prompt) for prompt in prompts]
    claim = sum(-(-(count + cap) // BLOCK) * BLOCK for count in counts)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    running = {"model": NAME, "max_tokens": cap, "stream": True} | forced_length(cap)
    with open_request(daemon.base_url, path, running | body):
        assert eventually(lambda: daemon.metric("claimed_tokens"), 5, "the request has a claim") == claim
    daemon.wait_empty()
