"""What the openai client gets through kvctl is what it gets from the engine."""

import re
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.live.daemon import Daemon
from tests.live.engine import Engine, forced_length
from tests.live.model import NAME
from tests.live.wire import Answer, client_of, post

MESSAGES = [{"role": "user", "content": "Zähle bis drei, 数到三。"}]
OUTPUT = 24
TRIES = 5


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    with client_of(daemon.base_url) as opened:
        yield opened


def body(*, chat: bool, stream: bool) -> dict[str, object]:
    question: dict[str, object] = {"messages": MESSAGES} if chat else {"prompt": "Hello, "}
    usage: dict[str, object] = {"stream_options": {"include_usage": True}} if stream else {}
    fixed = {"model": NAME, "max_tokens": 64, "temperature": 0, "stream": stream}
    return question | fixed | usage | forced_length(OUTPUT)


def fixed(answer: Answer) -> bytes:
    """The body without what is new in every answer: ids and the second."""
    return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", answer.body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_bytes_are_the_engines(engine: Engine, daemon: Daemon, chat: bool, stream: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    question = body(chat=chat, stream=stream)
    assert any(same_bytes(engine.base_url + path, daemon.base_url + path, question) for _ in range(TRIES))


def same_bytes(direct_url: str, through_url: str, question: object) -> bool:
    """A busy engine now and then puts two tokens into one event: then the bytes differ by themselves."""
    direct, through = post(direct_url, question), post(through_url, question)
    assert (through.status, through.headers["content-type"]) == (200, direct.headers["content-type"])
    return fixed(through) == fixed(direct)


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=64,
        extra_body=forced_length(OUTPUT),
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == OUTPUT


def test_chat_stream(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=64,
        extra_body=forced_length(OUTPUT),
    )
    chunks = list(stream)
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == OUTPUT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_completion_is_capped(client: OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="hi", max_tokens=9, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9


def test_completion_stream(client: OpenAI) -> None:
    stream = client.completions.create(
        model=NAME, prompt="hi", max_tokens=64, stream=True, extra_body=forced_length(OUTPUT)
    )
    reasons = [choice.finish_reason for chunk in stream for choice in chunk.choices]
    assert reasons[-1] == "stop"


def test_two_prompts_twice(client: OpenAI) -> None:
    answer = client.completions.create(
        model=NAME, prompt=["one", "and two"], n=2, max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert len(answer.choices) == 4


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]


@pytest.mark.parametrize("path", ["/version", "/health", "/metrics"])
def test_passed_routes(engine: Engine, daemon: Daemon, path: str) -> None:
    status, text = daemon.get(path)
    assert status == 200
    if path == "/version":
        assert text.encode() == post(engine.base_url + path, None).body


def test_tokenize_is_passed(engine: Engine, daemon: Daemon) -> None:
    question = {"model": NAME, "messages": MESSAGES}
    direct, through = (
        post(engine.base_url + "/tokenize", question),
        post(daemon.base_url + "/tokenize", question),
    )
    assert through.body == direct.body
