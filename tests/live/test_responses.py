"""/v1/responses is counted, claimed and read as the engine does it."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from openai import BadRequestError

from tests.live.conftest import StartDaemon
from tests.live.counted import LIMIT, Body, differences, kvctls_count
from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine
from tests.live.model import NAME, corpus_lines
from tests.live.shapes import ODD_TEXTS
from tests.live.wire import client_of, open_request, post

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "d",
    "parameters": {"type": "object", "properties": {}},
}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"ort": "Köln"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "21 °C"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}


def _said(text: str, **more: object) -> Body:
    part = {"type": "output_text", "text": text}
    return {"type": "message", "role": "assistant", "content": [part]} | more


def bodies() -> list[Body]:
    """Inputs in every shape of item that is text."""
    user: Body = {"role": "user", "content": "Wie warm ist es?"}
    parts: Body = {
        "role": "user",
        "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
    }
    singles: list[Body] = [{"input": text} for text in ODD_TEXTS]
    turns: list[Body] = [
        {"instructions": first, "input": [user, {"role": "assistant", "content": second}, user]}
        for first, second in list(pairwise(corpus_lines()))[:40]
    ]
    shapes: list[Body] = [
        {"input": [user], "tools": [TOOL]},
        {"input": [user], "tools": [TOOL | {"strict": True}]},
        {"input": [user], "tools": [TOOL], "tool_choice": "none"},
        {"input": [user, CALL, OUTPUT]},
        {
            "input": [user, CALL, CALL | {"call_id": "c2"}, OUTPUT, OUTPUT | {"call_id": "c2"}],
            "tools": [TOOL],
        },
        {"input": [user, THOUGHT, _said("text"), CALL, OUTPUT]},
        {"input": [user, THOUGHT, CALL, OUTPUT]},
        {"input": [user, _said("a"), _said("b"), user]},
        {"input": [user, {"role": "assistant", "content": "a"}, CALL, OUTPUT]},
        {"input": [parts]},
        {"input": [{"type": "message", **user}, {"role": "system", "content": "s"}, user]},
        {"input": [{"role": "developer", "content": "be brief"}, user]},
        {"input": [user, _said("It is", status="in_progress", id="msg_1")]},
        {"input": [user, _said("It is", status="completed", id="msg_1")]},
        {"input": [user], "reasoning": {"effort": "low"}},
        {"input": [user], "reasoning": {"effort": "none"}},
        {"input": [user], "chat_template_kwargs": {"enable_thinking": False}},
        {"input": [user], "text": {"format": {"type": "json_object"}}},
    ]
    return singles + turns + shapes


@pytest.fixture(scope="module")
def capped(engine: Engine, start_daemon: StartDaemon) -> Daemon:
    daemon = start_daemon(engine, MAX_CONTEXT=str(LIMIT))
    daemon.wait_ready()
    return daemon


def test_counts_are_the_engines(engine: Engine, capped: Daemon) -> None:
    """Text, items, tools and reasoning are counted to the token that the engine's usage then tells."""

    def both(body: Body) -> tuple[Body, int | str, int | str]:
        own = kvctls_count(capped, PATH, {"model": NAME, "max_output_tokens": LIMIT} | body)
        answer = post(engine.base_url + PATH, {"model": NAME, "max_output_tokens": 1} | body)
        return body, own, answer.json["usage"]["input_tokens"] if answer.status == 200 else str(answer.body)

    with ThreadPoolExecutor(4) as pool:
        wrong = differences(list(pool.map(both, bodies())))
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


def test_the_engine_can_count_them_too(engine: Engine, start_daemon: StartDaemon) -> None:
    """Without a local tokenizer the engine's /tokenize gets the converted conversation."""
    daemon = start_daemon(engine, MAX_CONTEXT=str(LIMIT), TOKENIZER="engine")
    daemon.wait_ready()
    for body in bodies()[-18::4]:
        own = kvctls_count(daemon, PATH, {"model": NAME, "max_output_tokens": LIMIT} | body)
        true = post(engine.base_url + PATH, {"model": NAME, "max_output_tokens": 1} | body)
        assert true.json["usage"]["input_tokens"] == own


def test_a_stream_ends_its_lease_with_what_it_used(daemon: Daemon) -> None:
    body = {"model": NAME, "max_output_tokens": 40, "stream": True, "input": "hi"}
    before = daemon.metric("output_tokens_sum")
    answer = post(daemon.base_url + PATH, body)
    assert answer.status == 200
    events = [
        json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")
    ]
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    used = events[-1]["response"]["usage"]["output_tokens"]
    daemon.wait_empty()
    assert eventually(lambda: daemon.metric("output_tokens_sum") - before, 5, "tokens counted") == used


def test_a_running_request_holds_its_claim(daemon: Daemon) -> None:
    body = {"model": NAME, "max_output_tokens": 6000, "stream": True, "input": "hi " * 200}
    with open_request(daemon.base_url, PATH, body):
        claim = eventually(lambda: daemon.metric("claimed_tokens"), 5, "the request has a claim")
        assert 6000 + 200 <= claim <= 6000 + 500
    daemon.wait_empty()


@pytest.mark.parametrize("limit", ["7", 7.5, -1, 0, "x"])
def test_limits_are_read_as_the_engine_reads_them(engine: Engine, daemon: Daemon, limit: object) -> None:
    body = {"model": NAME, "input": "hi", "max_output_tokens": limit}
    own, true = post(daemon.base_url + PATH, body), post(engine.base_url + PATH, body)
    assert own.status == true.status
    if own.status == 400:
        assert own.error["message"] == true.error["message"]


@pytest.mark.parametrize("more", [{"max_output_tokens": 9000}, {"max_output_tokens": 8192}])
def test_limits_beyond_the_context(engine: Engine, daemon: Daemon, more: Body) -> None:
    body = {"model": NAME, "input": "hi", "stop_token_ids": list(range(4096))} | more
    own, true = (post(url + PATH, body) for url in (daemon.base_url, engine.base_url))
    assert own.status == true.status


def test_what_cannot_be_accounted_for(engine: Engine, daemon: Daemon) -> None:
    """Without a store the engine itself refuses what would go on in the background; what is stored passes."""
    for wish in ({"background": True}, {"background": True, "store": False}):
        body = {"model": NAME, "input": "hi"} | wish
        own, true = (post(url + PATH, body) for url in (daemon.base_url, engine.base_url))
        assert own.status == true.status == 400
        assert own.error == true.error
    for path, sent in (("/resp_x", None), ("/resp_x/cancel", {})):
        own, true = (post(url + PATH + path, sent) for url in (daemon.base_url, engine.base_url))
        assert (own.status, own.error) == (true.status, true.error)
    unknown = {"model": NAME, "input": "hi", "max_output_tokens": 4, "previous_response_id": "resp_x"}
    assert post(daemon.base_url + PATH, unknown).status == 404
    assert daemon.is_empty()


def test_the_openai_client(daemon: Daemon) -> None:
    """Plain and streamed, as its users call it."""
    api = client_of(daemon.base_url).responses
    plain = api.create(model=NAME, input="hi", max_output_tokens=8, extra_body={"ignore_eos": True})
    assert plain.usage is not None
    assert plain.usage.output_tokens == 8
    kinds = [event.type for event in api.create(model=NAME, input="hi", max_output_tokens=8, stream=True)]
    assert (kinds[0], kinds[-1].split(".")[0]) == ("response.created", "response")
    with pytest.raises(BadRequestError, match="max_output_tokens="):
        api.create(model=NAME, input="hi", max_output_tokens=9000)
