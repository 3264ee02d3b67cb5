"""An engine that stands still, as a stopped process does: it accepts connections and answers nothing."""

from collections.abc import Iterator

import pytest

from tests.live.conftest import StartDaemon
from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine, forced_length
from tests.live.model import NAME
from tests.live.wire import Answer, open_request, post

STALL_TIMEOUT = 2
OUTPUT = 7000


@pytest.fixture(scope="module")
def impatient(engine: Engine, start_daemon: StartDaemon) -> Daemon:
    daemon = start_daemon(engine, STALL_TIMEOUT=f"{STALL_TIMEOUT}s")
    daemon.wait_ready()
    return daemon


@pytest.fixture
def paused(engine: Engine) -> Iterator[Engine]:
    yield engine
    engine.resume()


def refusal(daemon: Daemon, body: object) -> Answer | None:
    """None: it was let in, as one is in each stall timeout to try the engine, and got no answer."""
    try:
        answer = post(daemon.base_url + "/v1/completions", body, timeout=5)
    except TimeoutError:
        return None
    assert answer.status == 503, answer.body
    return answer


def test_paused_and_resumed(paused: Engine, impatient: Daemon) -> None:
    body = {"model": NAME, "prompt": "hi", "max_tokens": OUTPUT, "stream": True} | forced_length(OUTPUT)
    short = {"model": NAME, "prompt": "hi", "max_tokens": 1}
    with open_request(impatient.base_url, "/v1/completions", body) as stream:
        assert b"data: " in stream.recv(65536) + stream.recv(65536)
        paused.pause()
        assert impatient.metric("leases") == 1
        eventually(lambda: impatient.get("/readyz")[0] == 503, STALL_TIMEOUT + 3, "not ready")
        refused = eventually(lambda: refusal(impatient, short), 20, "what comes now is refused")
        assert refused is not None
        assert refused.headers["x-kvctl-reason"] in {"engine_wedged", "engine_unreachable"}
        assert int(refused.headers["retry-after"]) >= 1
        paused.resume()
        eventually(lambda: impatient.get("/readyz")[0] == 200, 5, "ready again")
        # The budget opens again step by step, so the first answers may still be a 429.
        eventually(lambda: post(impatient.base_url + "/v1/completions", short).status == 200, 10, "admits")
        eventually(lambda: impatient.metric("leases") == 1, 10, "the stream that was paused lives on")
    impatient.wait_empty()
