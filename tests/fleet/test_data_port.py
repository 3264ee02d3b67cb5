"""What load balancers read on the data port of a real kvctl."""

from collections.abc import Iterator

import pytest

from tests.fleet.boxes import BLOCK, BLOCKS, Box, ask, eventually, small

TAKEN = 16_000


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    settings = {"METRICS_VIEW": "gate", "LOAD_REPORT": "true"}
    with Box(tmp_path_factory.mktemp("boxes") / "box", TAKEN, settings) as made:
        yield made


def test_readiness_asks_for_headroom(box: Box) -> None:
    assert ask(box.url + "/readyz").status == 200
    assert ask(box.url + "/readyz?headroom=0.4").status == 200
    full = ask(box.url + "/readyz?headroom=0.6")
    assert full.status == 503
    assert b"less than 60%" in full.body
    assert b"no share" in ask(box.url + "/readyz?headroom=many").body


def test_the_page_is_the_gates(box: Box) -> None:
    page = ask(box.url + "/metrics").body.decode()
    (usage,) = (line for line in page.splitlines() if line.startswith("vllm:kv_cache_usage_perc{"))
    assert float(usage.split()[-1]) == pytest.approx(TAKEN / ((BLOCKS - 1) * BLOCK), abs=0.01)
    assert "vllm:generation_tokens_total{" in page, "the rest is the engine's"


def test_a_draining_box_says_so_on_every_answer(box: Box) -> None:
    assert "x-envoy-immediate-health-check-fail" not in ask(box.url + "/readyz").headers
    box.command("drain")
    try:
        eventually(lambda: "x-envoy-immediate-health-check-fail" in ask(box.url + "/healthz").headers, "told")
        refused = ask(box.url + "/v1/completions", small())
        assert (refused.status, refused.headers["x-envoy-immediate-health-check-fail"]) == (503, "true")
    finally:
        box.command("undrain")
    assert eventually(lambda: ask(box.url + "/v1/completions", small()).status == 200, "serves again")
