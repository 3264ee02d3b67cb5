"""Prompt-only routes: an engine that embeds, classifies and scores, and generates nothing."""

from collections.abc import Iterator

import pytest

from tests.live.conftest import StartDaemon
from tests.live.counted import Body
from tests.live.daemon import Daemon
from tests.live.engine import Engine
from tests.live.model import NAME
from tests.live.wire import post

TEXT = "Tous les êtres humains naissent libres. " * 10


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("embedder") / "log"
    with Engine(num_gpu_blocks=1000, flags=("--runner", "pooling"), log=log) as running:
        yield running


@pytest.fixture(scope="module")
def gated(embedder: Engine, start_daemon: StartDaemon) -> Daemon:
    daemon = start_daemon(embedder)
    daemon.wait_ready()
    return daemon


EMBED: list[Body] = [
    {"input": TEXT},
    {"input": [TEXT, "hi", ""]},
    {"input": [5, 6, 7]},
    {"input": [[5, 6], [7]]},
    {"input": TEXT, "truncate_prompt_tokens": 5},
    {"messages": [{"role": "user", "content": TEXT}]},
]


@pytest.mark.parametrize("body", EMBED)
def test_an_embedding_is_counted_and_its_lease_ends_with_the_answer(
    embedder: Engine, start_daemon: StartDaemon, body: Body
) -> None:
    """The prompts' tokens are what the engine's usage then tells; nothing is generated."""
    true = post(embedder.base_url + "/v1/embeddings", {"model": NAME} | body)
    assert true.status == 200
    tokens = true.json["usage"]["prompt_tokens"]
    for cap, status in ((tokens, 200), (tokens - 1, 400)):
        if isinstance(body.get("input"), list) and len(body["input"]) > 1 and cap < tokens:
            continue  # the cap is of one prompt
        daemon = start_daemon(embedder, MAX_CONTEXT=str(cap))
        daemon.wait_ready()
        assert post(daemon.base_url + "/v1/embeddings", {"model": NAME} | body).status == status
        daemon.wait_empty()


PROMPTS_ONLY: list[tuple[str, Body]] = [
    ("/pooling", {"input": TEXT}),
    ("/classify", {"input": TEXT}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/v1/score", {"queries": "a", "documents": ["b", "c"]}),
    ("/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/v2/rerank", {"query": "a", "documents": [{"text": "b"}]}),
    ("/v1/embeddings", {"input": -7}),
    ("/score", {"text_1": "a"}),
]


@pytest.mark.parametrize(("path", "body"), PROMPTS_ONLY)
def test_the_engines_verdict_is_the_answer(embedder: Engine, gated: Daemon, path: str, body: Body) -> None:
    """Whatever this model can do of them: the same status, and an empty ledger after it."""
    own, true = (post(url + path, {"model": NAME} | body) for url in (gated.base_url, embedder.base_url))
    assert own.status == true.status
    gated.wait_empty()
