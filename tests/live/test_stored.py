"""An engine that keeps its responses: what goes on from one is counted as the engine counts it."""

import json

import pytest

from tests.live.conftest import StartDaemon
from tests.live.counted import LIMIT, Body, kvctls_count
from tests.live.daemon import Daemon
from tests.live.engine import Engine
from tests.live.model import NAME
from tests.live.wire import post

PATH = "/v1/responses"
PARTS = [{"type": "input_text", "text": "Köln"}, {"type": "input_text", "text": "or Bonn?"}]
CALL: Body = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT: Body = {"type": "function_call_output", "call_id": "c1", "output": "21 °C"}
TURNS: list[Body] = [
    {"instructions": "Be brief.", "input": "Wie warm ist es in Köln?"},
    {"input": "And tomorrow?", "max_output_tokens": 40},
    {"instructions": "Answer in German.", "input": [{"role": "user", "content": PARTS}]},
    {"input": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}, CALL, RESULT]},
    {"input": "Why?", "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {}}]},
    {"input": "last"},
]


def _ask(daemon: Daemon, body: Body, *, stream: bool) -> Body:
    answer = post(daemon.base_url + PATH, body | {"stream": stream})
    assert answer.status == 200, answer.body
    if not stream:
        plain: Body = answer.json
        return plain
    events = [
        json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")
    ]
    last: Body = events[-1]["response"]
    return last


@pytest.mark.parametrize("stream", [False, True])
def test_each_turn_is_counted(keeping: Engine, start_daemon: StartDaemon, stream: bool) -> None:
    """Random text, system messages and calls in between: to the token."""
    daemon = start_daemon(keeping, MAX_CONTEXT=str(LIMIT))
    daemon.wait_ready()
    name = _ask(daemon, {"model": NAME, "max_output_tokens": 20} | TURNS[0], stream=stream)["id"]
    for turn in TURNS[1:]:
        asked = {"model": NAME, "max_output_tokens": 20} | turn | {"previous_response_id": name}
        own = kvctls_count(daemon, PATH, asked | {"max_output_tokens": LIMIT})
        answer = _ask(daemon, asked, stream=stream)
        assert own == answer["usage"]["input_tokens"], turn
        name = answer["id"]
    daemon.wait_empty()
