"""Every route of llama.cpp's server (builds of 2026) and what the proxy does with it.

Many have a short name beside the one with ``/v1``. Errors have OpenAI's shape, with a number as code.
"""

from kvctl.engines.base import Form, Route
from kvctl.engines.route_table import administration, generating, passed, refused

_GENERATE = (
    ("/v1/chat/completions", "chat", Form.CHAT),
    ("/chat/completions", "chat", Form.CHAT),
    ("/v1/completions", "completions", Form.COMPLETION),
    ("/completions", "completion", Form.LLAMACPP_COMPLETION),
    ("/completion", "completion", Form.LLAMACPP_COMPLETION),
    ("/infill", "infill", Form.LLAMACPP_COMPLETION),
    ("/v1/responses", "responses", Form.RESPONSES),
    ("/responses", "responses", Form.RESPONSES),
    ("/v1/messages", "messages", Form.MESSAGES),
    ("/v1/embeddings", "embeddings", Form.EMBED),
    ("/embeddings", "embeddings", Form.EMBED),
    ("/embedding", "embeddings", Form.EMBED),
    ("/v1/rerank", "rerank", Form.RERANK),
    ("/v1/reranking", "rerank", Form.RERANK),
    ("/rerank", "rerank", Form.RERANK),
    ("/reranking", "rerank", Form.RERANK),
)

_PASS = (
    ("GET", "/health", "health"),
    ("GET", "/v1/health", "health"),
    ("GET", "/metrics", "metrics"),
    ("GET", "/models", "models"),
    ("GET", "/v1/models", "models"),
    ("POST", "/tokenize", "tokenize"),
    ("POST", "/detokenize", "detokenize"),
    ("POST", "/apply-template", "render"),
    ("POST", "/chat/completions/input_tokens", "count_tokens"),
    ("POST", "/v1/chat/completions/input_tokens", "count_tokens"),
    ("POST", "/responses/input_tokens", "count_tokens"),
    ("POST", "/v1/responses/input_tokens", "count_tokens"),
    ("POST", "/v1/messages/count_tokens", "count_tokens"),
)

_REFUSE = (
    ("*", "/v1/audio/transcriptions", "transcriptions"),
    ("*", "/audio/transcriptions", "transcriptions"),
    ("*", "/v1/chat/completions/control", "control"),
    ("*", "/v1/stream", "stream"),
    ("*", "/v1/streams/lookup", "stream"),
    ("*", "/cors-proxy", "cors_proxy"),
    ("*", "/tools", "tools"),
    ("*", "/predict", "predict"),
)

# /slots and /props show callers' prompts and the model's path; as POST they change the engine.
_ADMIN = ("/slots", "/slots/*", "/props", "/lora-adapters", "/models/load", "/models/unload", "/models/sse")

ROUTES: tuple[Route, ...] = (
    *generating(_GENERATE),
    *passed(_PASS),
    *refused(_REFUSE),
    *administration(_ADMIN),
)
