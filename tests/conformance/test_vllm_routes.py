"""Every route of the engine's own /openapi.json is classified."""

import json
from pathlib import Path

import pytest

from kvctl.engines.base import Route, Treatment
from kvctl.engines.vllm import VLLM

ROUTES = json.loads((Path(__file__).parent / "pages" / "vllm-0.32-routes.json").read_text())


def classify(method: str, path: str) -> Route | None:
    """The first route that matches, exact paths before those with an open end."""
    concrete = path.replace("{response_id}", "resp_1")
    exact = [route for route in VLLM.routes if route.path == concrete]
    wide = [
        route
        for route in VLLM.routes
        if route.path.endswith("/*") and concrete.startswith(route.path.removesuffix("*"))
    ]
    return next((route for route in (*exact, *wide) if route.method in (method, "*")), None)


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=str)
def test_route_of_the_capture_is_classified(method: str, path: str) -> None:
    assert classify(method, path) is not None


GENERATES_OR_HOLDS_KV = [
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/cohere/v2/chat",
    "/invocations",
    "/inference/v1/generate",
    "/generative_scoring",
    "/v1/systemone",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
]


@pytest.mark.parametrize("path", GENERATES_OR_HOLDS_KV)
def test_what_cannot_be_counted_is_refused_with_a_hint(path: str) -> None:
    route = classify("POST", path)
    assert route is not None
    assert route.treatment is Treatment.REFUSE
    assert route.hint
    assert not route.admin


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/collective_rpc", "/start_profile",
     "/scale_elastic_ep", "/abort_requests", "/update_weights", "/v1/load_lora_adapter", "/server_info"],
)  # fmt: skip
def test_administration_is_refused_and_marked(path: str) -> None:
    for method in ("GET", "POST"):
        route = classify(method, path)
        assert route is not None
        assert (route.treatment, route.admin) == (Treatment.REFUSE, True)
        assert "admin_pass" in route.hint


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("GET", "/version"), ("GET", "/health"), ("GET", "/ping"), ("GET", "/metrics"),
     ("GET", "/load"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/v1/messages/count_tokens")],
)  # fmt: skip
def test_harmless_routes_pass(method: str, path: str) -> None:
    route = classify(method, path)
    assert route is not None
    assert route.treatment is Treatment.PASS


@pytest.mark.parametrize(
    ("path", "name", "tokens"),
    [("/v1/chat/completions", "chat", None), ("/v1/completions", "completions", 16)],
)
def test_generation_and_its_default_output(path: str, name: str, tokens: int | None) -> None:
    route = classify("POST", path)
    assert route is not None
    assert (route.treatment, route.name) == (Treatment.GENERATE, name)
    assert VLLM().default_output(route) == tokens
    assert classify("GET", path) is None
