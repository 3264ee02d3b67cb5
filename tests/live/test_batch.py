"""Batches of chats, and SageMaker's one route for all."""

import pytest

from tests.live.conftest import StartDaemon
from tests.live.counted import LIMIT, Body, kvctls_count
from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine, forced_length
from tests.live.model import NAME
from tests.live.wire import open_request, post

BLOCK = 32
BATCH, ANY = "/v1/chat/completions/batch", "/invocations"
CHAT: Body = {"messages": [{"role": "user", "content": "Wie warm ist es?"}]}


@pytest.fixture(scope="module")
def capped(engine: Engine, start_daemon: StartDaemon) -> Daemon:
    daemon = start_daemon(engine, MAX_CONTEXT=str(LIMIT))
    daemon.wait_ready()
    return daemon


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


def test_a_batch_claims_each_conversation(engine: Engine, daemon: Daemon) -> None:
    """Two conversations are two sequences; the answer has a choice for each."""
    chats = [CHAT["messages"], [*CHAT["messages"], {"role": "assistant", "content": "hm"}, *CHAT["messages"]]]
    counts = [
        post(engine.base_url + "/tokenize", {"model": NAME, "messages": chat}).json["count"] for chat in chats
    ]
    cap = 3000
    body = {"model": NAME, "messages": chats, "max_tokens": cap} | forced_length(cap)
    with open_request(daemon.base_url, BATCH, body):
        claim = eventually(lambda: daemon.metric("claimed_tokens"), 5, "the request has a claim")
    assert claim == sum(blocks(count + cap) for count in counts)
    daemon.wait_empty()
    answer = post(daemon.base_url + BATCH, {"model": NAME, "messages": chats, "max_tokens": 3})
    assert len(answer.json["choices"]) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [[]]},
        {"messages": [CHAT["messages"]], "n": 2},
        {"messages": [CHAT["messages"]], "max_tokens": 7.5},
    ],
)
def test_batches_that_the_engine_refuses(engine: Engine, daemon: Daemon, body: Body) -> None:
    own, true = (post(url + BATCH, {"model": NAME} | body) for url in (daemon.base_url, engine.base_url))
    assert own.status == true.status == 400


def test_invocations_are_what_they_hold(engine: Engine, capped: Daemon) -> None:
    """A chat or a completion by the fields of its body, to the token."""
    count = post(engine.base_url + "/tokenize", {"model": NAME} | CHAT).json["count"]
    body = {"model": NAME, "max_tokens": LIMIT}
    assert kvctls_count(capped, ANY, body | CHAT) == count
    count = post(engine.base_url + "/tokenize", {"model": NAME, "prompt": "hi there"}).json["count"]
    assert kvctls_count(capped, ANY, body | {"prompt": "hi there"}) == count
    assert post(capped.base_url + ANY, {"model": NAME, "prompt": "hi there"}).status == 200
    assert post(capped.base_url + ANY, {"model": NAME, "neither": 1}).status == 400
    capped.wait_empty()


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/systemone", "/cohere/v2/chat"])
def test_what_cannot_be_metered_is_refused(daemon: Daemon, path: str) -> None:
    answer = post(daemon.base_url + path, {"model": NAME})
    assert answer.status == 404
    assert "kvctl" in answer.error["message"]
