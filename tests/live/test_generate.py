"""/inference/v1/generate: ids in, ids out. The engine serves it only with a flag of its own."""

from collections.abc import Iterator

import pytest

from tests.live.conftest import StartDaemon
from tests.live.counted import Body
from tests.live.daemon import Daemon, eventually
from tests.live.engine import Engine
from tests.live.model import NAME
from tests.live.wire import open_request, post

BLOCK = 32
GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("scaled") / "log"
    with Engine(num_gpu_blocks=1000, flags=("--enable-scale-out",), log=log) as running:
        yield running


@pytest.fixture(scope="module")
def gated(scaled: Engine, start_daemon: StartDaemon) -> Daemon:
    daemon = start_daemon(scaled)
    daemon.wait_ready()
    return daemon


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


@pytest.mark.parametrize("extra", [{}, {"stream": True}])
def test_ids_in_and_out(scaled: Engine, gated: Daemon, extra: Body) -> None:
    """Counted by their number; claimed to the context without a limit, and to the limit with one."""
    ids = list(range(10, 110))
    for params, claimed in (({}, 8192), ({"max_tokens": 500}, 600)):
        body = {"model": NAME, "token_ids": ids, "sampling_params": {"ignore_eos": True} | params} | extra
        with open_request(gated.base_url, GENERATE, body):
            claim = eventually(lambda: gated.metric("claimed_tokens"), 5, "the request has a claim")
        assert claim == blocks(claimed)
        gated.wait_empty()
    short = {
        "model": NAME,
        "token_ids": ids,
        "sampling_params": {"max_tokens": 5, "ignore_eos": True},
    } | extra
    before = gated.metric("output_tokens_sum")
    assert post(gated.base_url + GENERATE, short).status == 200
    assert eventually(lambda: gated.metric("output_tokens_sum") - before, 5, "tokens counted") == 5
    assert gated.is_empty()
    assert post(scaled.base_url + GENERATE, short).status == 200


@pytest.mark.parametrize(
    "params", [{"max_tokens": "7"}, {"max_tokens": 7.5}, {"max_tokens": -1}, {"n": 0}, {"max_tokens": None}]
)
def test_sampling_params_are_read_as_the_engine_reads_them(
    scaled: Engine, gated: Daemon, params: Body
) -> None:
    body = {
        "model": NAME,
        "token_ids": [5, 6, 7],
        "sampling_params": {"stop_token_ids": list(range(4096))} | params,
    }
    own, true = (post(url + GENERATE, body) for url in (gated.base_url, scaled.base_url))
    assert own.status == true.status


@pytest.mark.parametrize("length", [8100, 8191, 8192, 8193])
def test_at_the_end_of_the_context(scaled: Engine, gated: Daemon, length: int) -> None:
    """A limit beyond the context is served; a prompt that leaves no room is not: as the engine has it."""
    params = {"max_tokens": 9000, "stop_token_ids": list(range(4096))}
    body = {"model": NAME, "token_ids": [5] * length, "sampling_params": params}
    own, true = (post(url + GENERATE, body) for url in (gated.base_url, scaled.base_url))
    assert own.status == true.status
