"""Every route of the engine's own /openapi.json is classified."""

import json
from pathlib import Path

import pytest

from kvctl.engines.base import Api, Form, Route, Treatment
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


METERED = {
    "/v1/chat/completions": Form.CHAT,
    "/v1/chat/completions/batch": Form.CHAT_BATCH,
    "/v1/completions": Form.COMPLETION,
    "/v1/responses": Form.RESPONSES,
    "/v1/messages": Form.MESSAGES,
    "/inference/v1/generate": Form.VLLM_GENERATE,
    "/invocations": Form.INVOCATIONS,
    "/v1/audio/transcriptions": Form.AUDIO,
    "/v1/audio/translations": Form.AUDIO,
    "/v1/embeddings": Form.EMBED,
    "/v2/embed": Form.EMBED,
    "/pooling": Form.EMBED,
    "/classify": Form.EMBED,
    "/score": Form.SCORE,
    "/v1/score": Form.SCORE,
    "/generative_scoring": Form.SCORE,
    "/rerank": Form.RERANK,
    "/v1/rerank": Form.RERANK,
    "/v2/rerank": Form.RERANK,
}


@pytest.mark.parametrize(("path", "form"), METERED.items())
def test_what_holds_kv_is_metered_by_its_form(path: str, form: Form) -> None:
    route = classify("POST", path)
    assert route is not None
    assert (route.treatment, route.form) == (Treatment.GENERATE, form)
    assert route.api is (Api.ANTHROPIC if path == "/v1/messages" else Api.OPENAI)


@pytest.mark.parametrize(
    "path", ["/cohere/v2/chat", "/v1/systemone", "/v1/realtime", "/v1/responses/compact"]
)
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
     ("GET", "/load"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/v1/messages/count_tokens"),
     ("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel"),
     ("POST", "/v1/responses/render")],
)  # fmt: skip
def test_harmless_routes_pass(method: str, path: str) -> None:
    route = classify(method, path)
    assert route is not None
    assert route.treatment is Treatment.PASS


@pytest.mark.parametrize(
    ("path", "name", "tokens"),
    [
        ("/v1/chat/completions", "chat", None),
        ("/v1/completions", "completions", 16),
        ("/v1/responses", "responses", None),
        ("/inference/v1/generate", "generate", None),
    ],
)
def test_generation_and_its_default_output(path: str, name: str, tokens: int | None) -> None:
    route = classify("POST", path)
    assert route is not None
    assert (route.treatment, route.name) == (Treatment.GENERATE, name)
    assert VLLM().default_output(route) == tokens
    assert classify("GET", path) is None
