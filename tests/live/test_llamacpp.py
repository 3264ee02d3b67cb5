"""The real llama.cpp server behind the real daemon: found out, known in size, gated, relayed."""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.engines.base import Treatment
from kvctl.engines.llamacpp_routes import ROUTES
from tests.live.daemon import Daemon, eventually
from tests.live.llamacpp import LlamaCpp
from tests.live.wire import Answer, client_of, open_request, post

CONTEXT, SLOTS = 8192, 8  # 1,024 tokens a slot
BUSY = {"prompt": "a b c", "n_predict": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LlamaCpp]:
    with LlamaCpp(context=CONTEXT, slots=SLOTS) as running:
        yield running


@pytest.fixture(scope="module")
def gated(server: LlamaCpp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with behind(server, tmp_path_factory.mktemp("kvctl")) as daemon:
        eventually(lambda: daemon.metric("capacity_tokens") == CONTEXT, 10, "the capacity is known")
        yield daemon


@contextlib.contextmanager
def behind(server: LlamaCpp, folder: Path, tokenizer: str = "engine") -> Iterator[Daemon]:
    """A daemon that is not told what it stands before. Its ledger must be empty at the end."""
    given = {"TOKENIZER": tokenizer, "GPUS": "none", "TTFT_TARGET": "none", "ITL_TARGET": "none"}
    daemon = Daemon(server.base_url, folder, given)
    daemon.start()
    try:
        daemon.wait_ready()
        yield daemon
        daemon.wait_empty()
    finally:
        ended = daemon.stop()
    assert not ended, daemon.log_tail()


def together(daemon: Daemon, path: str, body: dict[str, object], number: int) -> list[Answer]:
    """``number`` requests at once; all answers."""
    answers: list[Answer] = []

    def ask() -> None:
        answers.append(post(daemon.base_url + path, body))

    threads = [threading.Thread(target=ask) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_it_is_found_out(gated: Daemon) -> None:
    assert "llama.cpp" in gated.log_tail(20_000)
    assert gated.metric("telemetry_up", source="engine_metrics") == 1


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_its_own_completions_whole_and_streamed(gated: Daemon, path: str) -> None:
    body = {"prompt": "hello there", "n_predict": 12, "ignore_eos": True}
    whole = post(gated.base_url + path, body)
    assert (whole.status, whole.json["tokens_predicted"]) == (200, 12)
    streamed = post(gated.base_url + path, {**body, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.body.split(b"\n") if line.startswith(b"data: {")]
    assert events[-1]["tokens_predicted"] == 12
    assert streamed.headers["content-type"] == "text/event-stream"


def test_the_openai_client_whole_and_streamed(gated: Daemon) -> None:
    create = client_of(gated.base_url).completions.create
    whole = create(model="tiny", prompt="hello", max_tokens=5)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 5
    stream = create(model="tiny", prompt="hello", max_tokens=5, stream=True)
    assert list(stream)[-1].choices[0].finish_reason in ("length", "stop")
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    for path in ("/v1/chat/completions", "/chat/completions", "/v1/messages", "/v1/responses"):
        assert post(gated.base_url + path, {**chat, "input": "hello"}).status == 200


def test_more_than_it_has_slots_is_429_with_a_time_to_come_back(gated: Daemon) -> None:
    answers = together(gated, "/completion", BUSY, 2 * SLOTS)
    assert {answer.status for answer in answers} == {200, 429}
    for answer in answers:
        if answer.status == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.error["message"]
    gated.wait_empty()


def test_its_page_moves_while_answers_run(gated: Daemon) -> None:
    """Totals stand still until an answer ends, the calls of the model do not: neither late nor wedged."""
    answers = together(gated, "/completion", BUSY, 4)
    assert [answer.status for answer in answers] == [200] * 4
    assert gated.get("/readyz")[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "a " * 1500, "n_predict": 4}),
        ("/completion", {"prompt": [65] * 1500, "n_predict": 4}),
        ("/v1/completions", {"prompt": "a " * 1500, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 1500}], "max_tokens": 4}),
    ],
)
def test_a_prompt_beyond_the_slot_is_counted_by_the_engine_and_refused(
    gated: Daemon, path: str, body: dict[str, object]
) -> None:
    refused = post(gated.base_url + path, body)
    assert refused.status == 400
    assert refused.headers["x-kvctl-reason"] == "context"
    assert str(CONTEXT // SLOTS) in refused.error["message"]


def test_uncounted_it_is_forwarded_and_the_engines_own_400_comes_back(
    server: LlamaCpp, tmp_path: Path
) -> None:
    long = {"prompt": "a " * 3000, "n_predict": 4}
    with behind(server, tmp_path, tokenizer="bound") as daemon:
        relayed = post(daemon.base_url + "/completion", long)
    assert relayed.json == post(server.base_url + "/completion", long).json
    assert (relayed.status, relayed.error["type"]) == (400, "exceed_context_size_error")


def test_a_client_that_leaves_frees_its_slot(gated: Daemon, server: LlamaCpp) -> None:
    def busy() -> list[bool]:
        return [slot["is_processing"] for slot in json.loads(post(server.base_url + "/slots", None).body)]

    connection = open_request(gated.base_url, "/completion", {**BUSY, "stream": True})
    connection.recv(1)
    connection.close()
    gated.wait_empty()
    eventually(lambda: not any(busy()), 20, "no slot is busy")


def test_what_it_cannot_do_it_says_itself(gated: Daemon) -> None:
    refused = post(gated.base_url + "/embedding", {"content": "a"})
    assert (refused.status, refused.error["type"]) == (501, "not_supported_error")
    gated.wait_empty()


@pytest.mark.parametrize(
    "path",
    [route.path for route in ROUTES if route.treatment is Treatment.GENERATE and "*" not in route.path],
)
def test_every_metered_route_is_one_of_the_engine(server: LlamaCpp, path: str) -> None:
    assert post(server.base_url + path, {}).status != 404


def test_a_restart_with_other_slots_is_seen(tmp_path: Path) -> None:
    with LlamaCpp(context=4096, slots=2) as own, behind(own, tmp_path) as daemon:
        eventually(lambda: daemon.metric("capacity_tokens") == 4096, 10, "the first capacity")
        own.kill()
        own.context, own.slots = 6144, 3
        own.start()
        own.wait_ready()
        eventually(lambda: daemon.metric("capacity_tokens") == 6144, 20, "the second capacity")
        eventually(lambda: daemon.get("/readyz")[0] == 200, 20, "ready again")
        assert post(daemon.base_url + "/completion", {"prompt": "a", "n_predict": 3}).status == 200
