"""Alerts fire and clear in a real Prometheus that scrapes a loaded kvctl: those that are provoked in seconds.

The rules are those that are shipped, with their windows and holds shortened; promtool plays the rest.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from grafana import generate
from tests.ops.prometheus import MISSING, PROGRAM, Prometheus, scraping
from tests.ops.stage import GIB, Stage, open_stage

FOLDER = Path(generate.__file__).parent / "prometheus"
PATIENCE_S = 180.0
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]
World = tuple[Stage, Prometheus]


def shortened(name: str, folder: Path) -> Path:
    """The rule file with every window of some seconds and no holds."""
    text = (FOLDER / name).read_text()
    text = re.sub(r"\[\d+[mhd]\]", "[8s]", text)
    text = re.sub(r"(?m)^( +for:) .*$", r"\1 0s", text)
    short = folder / name
    short.write_text(text)
    return short


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        stage = stack.enter_context(open_stage(tmp_path_factory.mktemp("kvctl")))
        folder = tmp_path_factory.mktemp("prometheus")
        rules = [shortened(name, folder) for name in ("kvctl.rules.yml", "kvctl.alerts.yml")]
        yield stage, stack.enter_context(scraping({"kvctl": stage.metrics_url}, folder, rules))


@contextlib.contextmanager
def fires_and_clears(prometheus: Prometheus, *names: str) -> Iterator[None]:
    """Inside, the trouble is on."""
    prometheus.wait(lambda: not set(names) & prometheus.firing().keys(), PATIENCE_S)  # of what was before
    yield
    prometheus.wait(lambda: not set(names) & prometheus.firing().keys(), PATIENCE_S)


def wait_for(prometheus: Prometheus, *names: str) -> None:
    """The alerts fire, and what they say has no hole in it."""
    prometheus.wait(lambda: set(names) <= prometheus.firing().keys(), PATIENCE_S)
    for name in names:
        told = prometheus.firing().get(name)
        if told is not None:
            text = json.dumps(told["annotations"])
            assert "no value" not in text
            assert "{{" not in text
            assert f"/{name}.md" in text


def override(stage: Stage, knob: str, value: object) -> Callable[[], object]:
    """On-call sets a knob; what takes it back."""
    stage.admin.put(f"/v1/overrides/{knob}", {"value": value, "reason": "test", "ttl_s": 600})
    return lambda: stage.admin.delete(f"/v1/overrides/{knob}")


def test_more_callers_than_it_can_serve(world: World) -> None:
    stage, prometheus = world
    names = "KvctlRejectRatioHigh", "KvctlRefusalBudgetBurnsFast", "KvctlRefusalBudgetBurns"
    wait_for(prometheus, *names)
    stage.stop("callers")
    prometheus.wait(lambda: prometheus.firing() == {}, PATIENCE_S)
    stage.start("callers")
    wait_for(prometheus, *names)


def test_a_neighbour_takes_the_cards_memory(world: World) -> None:
    stage, prometheus = world
    with fires_and_clears(prometheus, "KvctlGpuMemoryLow", "KvctlBudgetAtFloor"):
        stage.card.take(4 * GIB - GIB // 4)
        wait_for(prometheus, "KvctlGpuMemoryLow", "KvctlBudgetAtFloor")
        stage.card.release(4 * GIB - GIB // 4)


def test_the_card_is_lost(world: World) -> None:
    stage, prometheus = world
    with fires_and_clears(prometheus, "KvctlGpuFault", "KvctlEngineUnreachable"):
        stage.card.lose()
        wait_for(prometheus, "KvctlGpuFault", "KvctlEngineUnreachable")
        stage.card.lose(lost=False)


def test_an_override(world: World) -> None:
    stage, prometheus = world
    with fires_and_clears(prometheus, "KvctlOverrideLongLived"):
        take_back = override(stage, "margin", 0.2)
        wait_for(prometheus, "KvctlOverrideLongLived")
        take_back()


def test_a_bypass(world: World) -> None:
    stage, prometheus = world
    with fires_and_clears(prometheus, "KvctlBypassOn"):
        take_back = override(stage, "enforce", 0.0)
        wait_for(prometheus, "KvctlBypassOn")
        take_back()


def test_a_reload_that_is_refused(world: World) -> None:
    stage, prometheus = world
    good = stage.config.read_text()
    with fires_and_clears(prometheus, "KvctlReloadFailed"):
        stage.config.write_text(good + "margn = 3\n")
        with pytest.raises(Exception, match="margin"):
            stage.admin.post("/v1/reload")
        wait_for(prometheus, "KvctlReloadFailed")
        stage.config.write_text(good)
        stage.admin.post("/v1/reload")


def test_the_engine_is_gone(world: World) -> None:
    stage, prometheus = world
    with fires_and_clears(prometheus, "KvctlEngineUnreachable"):
        stage.stop("engine")
        wait_for(prometheus, "KvctlEngineUnreachable")
        stage.start("engine")


def test_kvctl_is_gone(world: World) -> None:
    stage, prometheus = world
    with fires_and_clears(prometheus, "KvctlDown"):
        stage.stop("kvctl")
        wait_for(prometheus, "KvctlDown")
        stage.start("kvctl")
