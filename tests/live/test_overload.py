"""More load than the pool holds: the engine alone preempts, behind kvctl it does not."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from kvctl.core.outcomes import DECISION_OF, Decision
from tests.live.conftest import StartDaemon
from tests.live.daemon import eventually
from tests.live.engine import Engine
from tests.live.load import Outcome, arrivals, drive
from tests.live.venv import say

RATE = 24.0
SECONDS = 16.0
SEED = 2
PER_THOUSAND = 1000
NOT_NOW = {word for word, decision in DECISION_OF.items() if decision is Decision.REJECT_LATER}


@dataclass(frozen=True, slots=True)
class Run:
    """A run and the preemptions that it cost."""

    outcome: Outcome
    preemptions: float

    def line(self) -> str:
        return f"{self.preemptions:.0f} preemptions, {self.outcome.line()}"


def idle(engine: Engine) -> bool:
    metrics = engine.metrics()
    return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"] == 0


async def run(engine: Engine, base_url: str, salt: str, patience: float) -> Run:
    eventually(lambda: idle(engine), 20, "the engine is idle")
    before = engine.metrics()["vllm:num_preemptions_total"]
    outcome = await drive(base_url, arrivals(engine, RATE, SECONDS, SEED, salt), patience)
    return Run(outcome, engine.metrics()["vllm:num_preemptions_total"] - before)


# the client library may leave the sockets of requests that were cut to the collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_overload(
    engine: Engine, start_daemon: StartDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    direct = await run(engine, engine.base_url, "direct", patience=5)
    gate = start_daemon(engine)  # only now: it would learn from the preemptions that it cannot help
    gate.wait_ready()
    through = await run(engine, gate.base_url, "through", patience=60)
    turned_away = gate.metric("rejections_total")
    with capsys.disabled():
        say(f"direct: {direct.line()}")
        say(f"through kvctl: {through.line()}, {turned_away:.0f} answers 429")
    assert direct.preemptions >= 10
    assert through.preemptions <= through.outcome.completed / PER_THOUSAND
    assert through.outcome.cut == 0
    assert turned_away > 0
    assert all(is_honest(headers) for headers in through.outcome.refused)
    gate.wait_empty()


def is_honest(headers: Mapping[str, str]) -> bool:
    """The headers that a client obeys, and the reason."""
    seconds, exact = int(headers["retry-after"]), float(headers["retry-after-ms"])
    return seconds >= 1 and 0 < exact <= seconds * 1000 and headers["x-kvctl-reason"] in NOT_NOW
