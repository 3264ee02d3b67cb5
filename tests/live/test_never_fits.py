"""A request that can never fit gets 400 at once, with the largest limit that would."""

import re

import pytest
from openai import BadRequestError

from tests.live.conftest import StartDaemon
from tests.live.daemon import Daemon
from tests.live.engine import Engine, forced_length
from tests.live.model import NAME
from tests.live.wire import Answer, client_of, post

OPERATORS_CAP = 4096
PROMPT = "How many tokens may I have?"


@pytest.fixture(scope="module", params=[None, OPERATORS_CAP])
def limited(request: pytest.FixtureRequest, engine: Engine, start_daemon: StartDaemon) -> tuple[Daemon, int]:
    """A daemon and the limit that binds: the engine's context or the operator's cap."""
    settings = {"MAX_CONTEXT": str(request.param)} if request.param else {}
    daemon = start_daemon(engine, **settings)
    daemon.wait_ready()
    return daemon, request.param or engine.max_model_len


def ask(daemon: Daemon, prompt: str, max_tokens: int) -> Answer:
    body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens}
    return post(daemon.base_url + "/v1/completions", body | forced_length(1))


def assert_never(answer: Answer) -> None:
    assert answer.status == 400, answer.body
    assert answer.error["code"] == "context_length_exceeded"
    assert answer.error["type"] == "invalid_request_error"
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


def test_the_largest_that_fits_is_named_and_fits(engine: Engine, limited: tuple[Daemon, int]) -> None:
    daemon, limit = limited
    count = post(engine.base_url + "/tokenize", {"model": NAME, "prompt": PROMPT}).json["count"]
    refused = ask(daemon, PROMPT, limit + 1)
    assert_never(refused)
    assert str(limit - count) in re.findall(r"\d+", refused.error["message"])
    assert ask(daemon, PROMPT, limit - count).status == 200
    daemon.wait_empty()


def test_one_more_than_the_operator_allows(engine: Engine, limited: tuple[Daemon, int]) -> None:
    daemon, limit = limited
    count = post(engine.base_url + "/tokenize", {"model": NAME, "prompt": PROMPT}).json["count"]
    answer = ask(daemon, PROMPT, limit - count + 1)
    if limit == OPERATORS_CAP:
        assert_never(answer)
    else:
        assert answer.status == 200, "the engine cuts the output to its context"


TOKENS_OF_A_WORD = 3


def test_prompt_beyond_the_limit(limited: tuple[Daemon, int]) -> None:
    daemon, limit = limited
    with client_of(daemon.base_url, retries=2) as client, pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "word " * (limit // TOKENS_OF_A_WORD + 50)}],
            max_tokens=16,
        )
    assert caught.value.code == "context_length_exceeded"
    assert str(limit) in re.findall(r"\d+", caught.value.message)
    assert daemon.is_empty()
