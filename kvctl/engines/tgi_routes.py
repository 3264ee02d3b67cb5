"""Every route of TGI up to 3.3 and what the proxy does with it. All of them answer errors in TGI's shape."""

from kvctl.engines.base import Api, Form, Route, Treatment

_GENERATE = (
    ("/generate", "generate", Form.TGI_GENERATE),
    ("/generate_stream", "generate_stream", Form.TGI_GENERATE),
    ("/", "generate_compat", Form.TGI_GENERATE),
    ("/v1/chat/completions", "chat", Form.CHAT),
    ("/v1/completions", "completions", Form.COMPLETION),
)

_PASS = (
    ("GET", "/", "health"),
    ("GET", "/health", "health"),
    ("GET", "/ping", "ping"),
    ("GET", "/info", "info"),
    ("GET", "/metrics", "metrics"),
    ("GET", "/v1/models", "models"),
    ("POST", "/tokenize", "tokenize"),
    ("POST", "/chat_tokenize", "tokenize"),
)

_UNMETERED = "kvctl does not meter this route; use /generate or /v1/chat/completions"

# What cloud platforms call, each with a body of its own around the same generation.
_REFUSE = (
    ("/invocations", "invocations"),
    ("/vertex", "vertex"),
    ("/v2/models/*", "kserve"),
)

ROUTES: tuple[Route, ...] = (
    *(
        Route(method="POST", path=path, name=name, treatment=Treatment.GENERATE, api=Api.TGI, form=form)
        for path, name, form in _GENERATE
    ),
    *(
        Route(method=method, path=path, name=name, treatment=Treatment.PASS, api=Api.TGI)
        for method, path, name in _PASS
    ),
    *(
        Route(method="POST", path=path, name=name, treatment=Treatment.REFUSE, api=Api.TGI, hint=_UNMETERED)
        for path, name in _REFUSE
    ),
)
