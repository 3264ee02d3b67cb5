"""Responses in the background of an engine that stores them: every lease has an end, and the true usage."""

import json
import time
import urllib.request

import pytest

from tests.live.conftest import StartDaemon
from tests.live.counted import Body
from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine
from tests.live.model import EOS_ID, NAME
from tests.live.wire import post

PATH = "/v1/responses"
OUTSIDE: Body = {"logit_bias": {"99999999": 1.0}}
"""A token that is in no vocabulary: found out when the engine takes the request, after the answer."""


@pytest.fixture(scope="module")
def gated(keeping: Engine, start_daemon: StartDaemon) -> Daemon:
    daemon = start_daemon(keeping)
    daemon.wait_ready()
    return daemon


def begin(daemon: Daemon, **more: object) -> str:
    answer = post(daemon.base_url + PATH, {"model": NAME, "input": "hi", "background": True} | more)
    assert answer.status == 200, answer.body
    assert answer.json["status"] == "queued"
    return str(answer.json["id"])


def ended(daemon: Daemon, reason: str) -> float:
    return daemon.metric("leases_ended_total", reason=reason)


def page_read(daemon: Daemon) -> float:
    """When the engine's page was read last, Unix seconds."""
    return daemon.metric("telemetry_timestamp_seconds", source="engine_metrics")


def told(daemon: Daemon, name: str) -> Body:
    answer: Body = json.loads(daemon.get(f"{PATH}/{name}")[1])
    return answer


@pytest.mark.parametrize(
    ("more", "status", "reason", "tokens"),
    [
        ({"max_output_tokens": 400, "ignore_eos": True}, "incomplete", "capped", 400),
        ({"max_output_tokens": 6000, "logit_bias": {str(EOS_ID): 100}}, "completed", "finished", 1),
    ],
)
def test_the_lease_is_kept_to_the_end(
    gated: Daemon, more: Body, status: str, reason: str, tokens: int
) -> None:
    before, made = ended(gated, reason), gated.metric("output_tokens_sum")
    name = begin(gated, **more)
    eventually(lambda: ended(gated, reason) - before == 1, 30, "its lease ended")
    gated.wait_empty()
    answer = told(gated, name)
    assert (answer["status"], answer["usage"]["output_tokens"]) == (status, tokens)
    assert gated.metric("output_tokens_sum") - made == tokens


def test_a_stream_that_is_left_can_be_read_on(gated: Daemon) -> None:
    before, gone = ended(gated, "capped"), ended(gated, "client_gone")
    body = {"model": NAME, "input": "hi", "background": True, "max_output_tokens": 300, "ignore_eos": True}
    request = urllib.request.Request(  # noqa: S310 - loopback
        gated.base_url + PATH,
        data=json.dumps(body | {"stream": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - loopback
        lines = [answer.readline() for _ in range(30)]
    seen = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
    name = seen[0]["response"]["id"]
    rest = gated.get(f"{PATH}/{name}?stream=true&starting_after={seen[-1]['sequence_number']}")[1]
    numbers = [
        json.loads(line[6:])["sequence_number"] for line in rest.splitlines() if line.startswith("data:")
    ]
    assert numbers[0] == seen[-1]["sequence_number"] + 1
    eventually(lambda: ended(gated, "capped") - before == 1, 30, "its lease ended")
    gated.wait_empty()
    assert ended(gated, "client_gone") == gone, "its lease was kept to the end of the answer"
    assert told(gated, name)["usage"]["output_tokens"] == 300


def test_one_that_is_cancelled(keeping: Engine, gated: Daemon) -> None:
    before = ended(gated, "caller_cancelled")
    name = begin(gated, max_output_tokens=6000, ignore_eos=True)
    eventually(lambda: keeping.metrics()["vllm:num_requests_running"] == 1, 20, "it runs")
    assert gated.metric("leases") == 1
    assert gated.metric("claimed_tokens") >= 6000
    answer = post(f"{gated.base_url}{PATH}/{name}/cancel", {})
    assert (answer.status, answer.json["status"]) == (200, "cancelled")
    eventually(lambda: ended(gated, "caller_cancelled") - before == 1, 20, "its lease ended")
    gated.wait_empty()
    eventually(lambda: keeping.metrics()["vllm:num_requests_running"] == 0, 20, "the engine let it go")


def test_one_that_failed_stays_queued_and_its_lease_ends(keeping: Engine, start_daemon: StartDaemon) -> None:
    """What ends it is that the engine's page shows nothing; then the engine serves as before."""
    daemon = start_daemon(keeping, STALL_TIMEOUT="30s")
    daemon.wait_ready()
    name = begin(daemon, max_output_tokens=100, **OUTSIDE)
    assert daemon.metric("leases") == 1
    time.sleep(2)
    assert told(daemon, name)["status"] == "queued"
    eventually(lambda: ended(daemon, "engine_idle") == 1, 30, "its lease ended")
    daemon.wait_empty()
    assert told(daemon, name)["status"] == "queued"
    assert daemon.get("/readyz")[0] == 200
    assert post(daemon.base_url + PATH, {"model": NAME, "input": "hi", "max_output_tokens": 4}).status == 200


def test_an_engine_that_is_killed_forgot_it(keeping: Engine, start_daemon: StartDaemon) -> None:
    """Last of all: the engine starts anew."""
    daemon = start_daemon(keeping)
    daemon.wait_ready()
    begin(daemon, max_output_tokens=7000, ignore_eos=True)
    eventually(lambda: keeping.metrics()["vllm:num_requests_running"] == 1, 20, "it runs")
    seen = time.time()
    eventually(lambda: page_read(daemon) > seen + 2, 20, "kvctl has seen the engine that works on it")
    keeping.restart()
    assert daemon.metric("leases") == 1
    keeping.wait_ready()
    eventually(lambda: ended(daemon, "engine_forgot") == 1, 30, "its lease ended")
    daemon.wait_empty()
