"""Routes of the simulated engine: some of vLLM's, and the plain form of lengths alone."""

from kvctl.engines.base import Form, Route, Treatment

_GENERATE = (
    ("/generate", "generate", Form.PLAIN_GENERATE),
    ("/v1/chat/completions", "chat", Form.CHAT),
    ("/v1/completions", "completions", Form.COMPLETION),
    ("/v1/responses", "responses", Form.RESPONSES),
)
_PASS = (
    ("GET", "/v1/models", "models"),
    ("GET", "/version", "version"),
    ("GET", "/health", "health"),
    ("GET", "/ping", "ping"),
    ("GET", "/metrics", "metrics"),
    ("POST", "/tokenize", "tokenize"),
    ("POST", "/detokenize", "detokenize"),
    ("GET", "/v1/responses/*", "responses_stored"),
    ("POST", "/v1/responses/*", "responses_stored"),  # /cancel
)

ROUTES: tuple[Route, ...] = (
    *(
        Route(method="POST", path=path, name=name, treatment=Treatment.GENERATE, form=form)
        for path, name, form in _GENERATE
    ),
    *(Route(method=method, path=path, name=name, treatment=Treatment.PASS) for method, path, name in _PASS),
)
