"""The live suite: the real vLLM on the CPU behind the real daemon.

It is collected only when its folder is named (``pytest tests/live``): the first run installs gigabytes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.live.daemon import Daemon
from tests.live.engine import Engine

HERE = Path(__file__).parent
StartDaemon = Callable[..., Daemon]


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    named = [config.invocation_params.dir / argument.split("::")[0] for argument in config.args]
    return None if any(path.resolve().is_relative_to(HERE) for path in named) else True


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """32,000 KV tokens, one engine for all who do not kill it."""
    with Engine(num_gpu_blocks=1000, log=tmp_path_factory.mktemp("engine") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that stores responses, and so can generate them in the background."""
    log = tmp_path_factory.mktemp("engine") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        with Engine(num_gpu_blocks=1000, log=log) as running:
            yield running


@pytest.fixture(scope="module")
def start_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartDaemon]:
    """Starts daemons. After the module each ledger must be empty, and SIGTERM must end it with 0."""
    running: list[Daemon] = []

    def start(engine: Engine, **settings: str) -> Daemon:
        given = {"TOKENIZER": str(engine.model)} | settings
        daemon = Daemon(engine.base_url, tmp_path_factory.mktemp("kvctl"), given)
        daemon.start()
        running.append(daemon)
        return daemon

    yield start
    try:
        for daemon in running:
            daemon.wait_empty()
    finally:
        ended = [daemon.stop() for daemon in running]
    assert not any(ended), [daemon.log_tail() for daemon in running]


@pytest.fixture(scope="module")
def daemon(engine: Engine, start_daemon: StartDaemon) -> Daemon:
    """The default settings, ready."""
    started = start_daemon(engine)
    started.wait_ready()
    return started
