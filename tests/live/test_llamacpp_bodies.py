"""Bodies of llama.cpp's own routes are counted, claimed and read as its server does it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.daemon import Daemon, eventually
from tests.live.llamacpp import LlamaCpp
from tests.live.wire import post

CAP = 500
Body = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[LlamaCpp]:
    with LlamaCpp(context=8192, slots=8) as running:
        yield running


@pytest.fixture(scope="module")
def capped(server: LlamaCpp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Counts by the server's /tokenize, and refuses what may pass CAP tokens."""
    given = {"TOKENIZER": "engine", "GPUS": "none", "TTFT_TARGET": "none", "ITL_TARGET": "none"}
    daemon = Daemon(server.base_url, tmp_path_factory.mktemp("kvctl"), given | {"MAX_CONTEXT": str(CAP)})
    daemon.start()
    try:
        daemon.wait_ready()
        eventually(lambda: daemon.metric("capacity_tokens") == 8192, 10, "the capacity is known")
        yield daemon
        daemon.wait_empty()
    finally:
        ended = daemon.stop()
    assert not ended, daemon.log_tail()


PROMPTS: list[Any] = ["a b c", "Köln 東京 \U0001f600\n\n  x", [5, 6, 7], "w" * 300]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_counts_are_the_servers(server: LlamaCpp, capped: Daemon, prompt: Any) -> None:
    refused = post(capped.base_url + "/completion", {"prompt": prompt, "n_predict": CAP})
    found = re.search(rb"n_predict=(\d+) with this prompt", refused.body)
    assert refused.status == 400
    assert found is not None
    true = post(server.base_url + "/completion", {"prompt": prompt, "n_predict": 1})
    assert CAP - int(found[1]) == true.json["tokens_evaluated"]


@pytest.mark.parametrize(
    "more",
    [{}, {"stream": True}, {"return_tokens": True, "stream": True}, {"n_predict": 7.0}, {"max_tokens": 3}],
)
def test_what_was_generated_is_what_the_server_says(capped: Daemon, more: Body) -> None:
    body = {"prompt": "a b c", "n_predict": 7, "ignore_eos": True} | more
    before = capped.metric("output_tokens_sum")
    answer = post(capped.base_url + "/completion", body)
    assert answer.status == 200
    told = [int(number) for number in re.findall(rb'"tokens_predicted":(\d+)', answer.body)]
    assert eventually(lambda: capped.metric("output_tokens_sum") - before, 5, "counted") == told[-1]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "n_predict": -2},
        {"prompt": "a", "n_predict": "x"},
        {"prompt": ["a", [5, 6]], "n_predict": 3},
        {"prompt": [5, "a", 6], "n_predict": 3},
        {"prompt": [], "n_predict": 3},
        {"n_predict": 3},
        {"prompt": 7, "n_predict": 3},
    ],
)
def test_what_is_odd_is_the_servers_to_judge(server: LlamaCpp, capped: Daemon, body: Body) -> None:
    """No limit is refused by the cap, which allows none; the rest gets the server's own verdict."""
    own, true = (post(url + "/completion", body) for url in (capped.base_url, server.base_url))
    assert own.status == (400 if body.get("n_predict") in (-2, "x") else true.status)
