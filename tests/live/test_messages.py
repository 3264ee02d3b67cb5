"""/v1/messages is counted, claimed and read as the engine does it: Anthropic's API before the real engine."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from tests.live.conftest import StartDaemon
from tests.live.counted import LIMIT, Body, differences, kvctls_count
from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine
from tests.live.model import NAME, corpus_lines
from tests.live.shapes import ODD_TEXTS
from tests.live.wire import open_request, post

SCHEMA = {"properties": {"ort": {"type": "string"}}, "required": ["ort"]}
TOOLS = [
    {"name": "weather", "description": "Température", "input_schema": SCHEMA},
    {"name": "t", "input_schema": {}},
]
NO_TOOLS = {"type": "none"}  # the engine runs without a tool parser
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"ort": "Köln", "n": [1, 2.5, None]}}


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


def _result(content: Any) -> Body:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}


def _turn(role: str, *blocks: Body) -> Body:
    return {"role": role, "content": list(blocks)}


def bodies() -> list[Body]:
    """Conversations in every shape of block that is text."""
    lines = corpus_lines()
    user: Body = {"role": "user", "content": "Wie warm ist es?"}
    thought = {"type": "thinking", "thinking": "hm, hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "xxxx"}
    used = [user, _turn("assistant", _text("I look"), USE)]
    singles: list[Body] = [{"messages": [{"role": "user", "content": text}]} for text in ODD_TEXTS]
    turns: list[Body] = [
        {
            "system": first,
            "messages": [user, {"role": "assistant", "content": second}, {"role": "user", "content": first}],
        }
        for first, second in pairwise(lines)
    ]
    shapes: list[Body] = [
        {
            "system": [_text("one"), _text("x-anthropic-billing-header: 1"), _text(""), _text("two")],
            "messages": [user],
        },
        {"system": "x-anthropic-billing-header: a\nrest", "messages": [user]},
        {"messages": [user], "tools": TOOLS, "tool_choice": NO_TOOLS},
        {"messages": [*used, _turn("user", _result("21 °C"))], "tools": TOOLS, "tool_choice": NO_TOOLS},
        {
            "messages": [*used, _turn("user", _result([_text("21"), _text("°C")]), _text("and?"))],
            "tools": TOOLS,
            "tool_choice": NO_TOOLS,
        },
        {"messages": [*used, _turn("user", _result(None))]},
        {"messages": [*used, _turn("user", _result("a"), _result("b"))]},
        {"messages": [user, _turn("assistant", thought, hidden, USE), _turn("user", _result("ok"))]},
        {
            "messages": [
                user,
                _turn("assistant", _text("a"), _text("b")),
                _turn("user", _text("c"), _text("d")),
            ]
        },
        {"messages": [user, _turn("assistant", _result("told"))]},
        {"messages": [user, {"role": "assistant", "content": "It is"}]},
        {"messages": [user, _turn("assistant", _text(""))]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [user], "thinking": {"type": "disabled"}},
        {"messages": [user], "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [user], "output_config": {"effort": "low"}},
        {"messages": [user], "chat_template_kwargs": {"enable_thinking": False}},
    ]
    return singles + turns + shapes


@pytest.fixture(scope="module")
def capped(engine: Engine, start_daemon: StartDaemon) -> Daemon:
    daemon = start_daemon(engine, MAX_CONTEXT=str(LIMIT))
    daemon.wait_ready()
    return daemon


def test_counts_are_the_engines(engine: Engine, capped: Daemon) -> None:
    """A28: system, blocks, tools and thinking are counted as the engine's own count_tokens counts them."""

    def both(body: Body) -> tuple[Body, int | str, int | str]:
        own = kvctls_count(capped, "/v1/messages", {"model": NAME, "max_tokens": LIMIT} | body)
        answer = post(engine.base_url + "/v1/messages/count_tokens", {"model": NAME} | body)
        return body, own, answer.json["input_tokens"] if answer.status == 200 else str(answer.body)

    with ThreadPoolExecutor(4) as pool:
        wrong = differences(list(pool.map(both, bodies())))
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


def test_the_engine_can_count_them_too(engine: Engine, start_daemon: StartDaemon) -> None:
    """Without a local tokenizer the engine's /tokenize gets the converted conversation."""
    daemon = start_daemon(engine, MAX_CONTEXT=str(LIMIT), TOKENIZER="engine")
    daemon.wait_ready()
    for body in bodies()[-16::3]:
        own = kvctls_count(daemon, "/v1/messages", {"model": NAME, "max_tokens": LIMIT} | body)
        true = post(engine.base_url + "/v1/messages/count_tokens", {"model": NAME} | body)
        assert true.json["input_tokens"] == own


def test_the_answers_usage_is_the_count(engine: Engine, capped: Daemon) -> None:
    """What was counted is what the engine then prefills."""
    for body in bodies()[::25]:
        own = kvctls_count(capped, "/v1/messages", {"model": NAME, "max_tokens": LIMIT} | body)
        answer = post(engine.base_url + "/v1/messages", {"model": NAME, "max_tokens": 1} | body)
        assert answer.json["usage"]["input_tokens"] == own


def test_a_stream_ends_its_lease_with_what_it_used(daemon: Daemon) -> None:
    """Events come through as sent; the claim is there while it runs and gone with its end."""
    body = {"model": NAME, "max_tokens": 40, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    before = daemon.metric("output_tokens_sum")
    answer = post(daemon.base_url + "/v1/messages", body)
    assert answer.status == 200
    kinds = [line[7:] for line in answer.body.decode().splitlines() if line.startswith("event: ")]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    deltas = [
        json.loads(line[6:])
        for line in answer.body.decode().splitlines()
        if "message_delta" in line and line.startswith("data")
    ]
    used = deltas[-1]["usage"]["output_tokens"]
    daemon.wait_empty()
    assert eventually(lambda: daemon.metric("output_tokens_sum") - before, 5, "tokens counted") == used


def test_refusals_are_anthropics(engine: Engine, daemon: Daemon) -> None:
    """A28: 400 and 404 in Anthropic's shape; count_tokens is passed and holds nothing."""
    body: Body = {"model": NAME, "max_tokens": 9000, "messages": [{"role": "user", "content": "hi"}]}
    never = post(daemon.base_url + "/v1/messages", body)
    assert (never.status, never.json["type"]) == (400, "error")
    assert never.json["error"]["type"] == "invalid_request_error"
    without = post(daemon.base_url + "/v1/messages", {key: body[key] for key in ("model", "messages")})
    theirs = post(engine.base_url + "/v1/messages", {key: body[key] for key in ("model", "messages")})
    assert without.json["error"]["message"] == theirs.json["error"]["message"]
    negative = body | {"max_tokens": -1}
    own, true = (post(url + "/v1/messages", negative) for url in (daemon.base_url, engine.base_url))
    assert own.status == true.status == 400
    counted = post(
        daemon.base_url + "/v1/messages/count_tokens", {"model": NAME, "messages": body["messages"]}
    )
    assert counted.json["input_tokens"] > 0
    assert daemon.is_empty()


def test_a_running_request_holds_its_claim(daemon: Daemon) -> None:
    """The claim is the prompt and all of max_tokens."""
    body = {
        "model": NAME,
        "max_tokens": 6000,
        "stream": True,
        "messages": [{"role": "user", "content": "hi " * 200}],
    }
    with open_request(daemon.base_url, "/v1/messages", body):
        claim = eventually(lambda: daemon.metric("claimed_tokens"), 5, "the request has a claim")
        assert 6000 + 200 <= claim <= 6000 + 700
    daemon.wait_empty()
