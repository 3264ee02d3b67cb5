"""Every route of TGI up to 3.3 and what the proxy does with it. All of them answer errors in TGI's shape."""

from kvctl.engines.base import Api, Form, Route
from kvctl.engines.route_table import generating, passed, refused

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
    ("POST", "/invocations", "invocations"),
    ("POST", "/vertex", "vertex"),
    ("POST", "/v2/models/*", "kserve"),
)

ROUTES: tuple[Route, ...] = (
    *generating(_GENERATE, api=Api.TGI),
    *passed(_PASS, api=Api.TGI),
    *refused(_REFUSE, _UNMETERED, api=Api.TGI),
)
