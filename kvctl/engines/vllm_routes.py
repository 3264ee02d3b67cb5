"""Every route of vLLM up to 0.32 and what the proxy does with it.

A route that generates or holds KV and cannot be counted is refused with a hint: passing it would let it
run beside the ledger. Routes that are not here are refused by the proxy.
"""

from kvctl.engines.base import Form, Route
from kvctl.engines.route_table import UNMETERED, administration, generating, passed, refused

_GENERATE = (
    ("/v1/chat/completions", "chat", Form.CHAT),
    ("/v1/chat/completions/batch", "chat_batch", Form.CHAT_BATCH),
    ("/v1/completions", "completions", Form.COMPLETION),
    ("/v1/responses", "responses", Form.RESPONSES),
    ("/v1/messages", "messages", Form.MESSAGES),
    ("/inference/v1/generate", "generate", Form.VLLM_GENERATE),
    ("/invocations", "invocations", Form.INVOCATIONS),
    ("/v1/audio/transcriptions", "transcriptions", Form.AUDIO),
    ("/v1/audio/translations", "translations", Form.AUDIO),
    # prompts only: nothing is generated, or one token that labels them
    ("/v1/embeddings", "embeddings", Form.EMBED),
    ("/v2/embed", "embeddings", Form.EMBED),
    ("/pooling", "pooling", Form.EMBED),
    ("/classify", "classify", Form.EMBED),
    ("/score", "score", Form.SCORE),
    ("/v1/score", "score", Form.SCORE),
    ("/generative_scoring", "generative_scoring", Form.SCORE),
    ("/rerank", "rerank", Form.RERANK),
    ("/v1/rerank", "rerank", Form.RERANK),
    ("/v2/rerank", "rerank", Form.RERANK),
)

_PASS = (
    ("GET", "/v1/models", "models"),
    ("GET", "/v1/models/*", "models"),
    ("GET", "/version", "version"),
    ("GET", "/health", "health"),
    ("GET", "/ping", "ping"),
    ("POST", "/ping", "ping"),
    ("GET", "/metrics", "metrics"),
    ("GET", "/load", "load"),
    ("POST", "/tokenize", "tokenize"),
    ("POST", "/detokenize", "detokenize"),
    ("POST", "/v1/messages/count_tokens", "count_tokens"),
    ("POST", "/v1/chat/completions/render", "render"),
    ("POST", "/v1/completions/render", "render"),
    ("POST", "/v1/messages/render", "render"),
    ("POST", "/v1/responses/render", "render"),
    ("GET", "/v1/responses/*", "responses_stored"),
    ("POST", "/v1/responses/*", "responses_stored"),  # /cancel
)

_CHAT = "kvctl does not meter this route; use /v1/chat/completions"
_SOCKET = "kvctl relays no WebSocket: a session's use of the KV cache has no bound; use the HTTP routes"

_REFUSE = (
    ("/cohere/v2/chat", "cohere_chat", _CHAT),
    ("/v1/responses/compact", "responses", _CHAT),  # generates, though it is under a passed prefix
    ("/v1/realtime", "realtime", _SOCKET),
    ("/v1/systemone", "structured_decisions", UNMETERED),
)

_ADMIN = (
    "/abort_requests",
    "/collective_rpc",
    "/fault_tolerance/*",
    "/finish_weight_update",
    "/get_world_size",
    "/inference/v1/abort_requests",
    "/init_weight_transfer_engine",
    "/is_paused",
    "/is_scaling_elastic_ep",
    "/is_sleeping",
    "/kv_event_sources",
    "/pause",
    "/release_kv_cache_memory",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/server_info",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/tokenizer_info",
    "/update_weight_version",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
    "/weight_checker",
    "/weight_info",
)

ROUTES: tuple[Route, ...] = (
    *generating(_GENERATE),
    *passed(_PASS),
    *(route for path, name, hint in _REFUSE for route in refused([("*", path, name)], hint)),
    *administration(_ADMIN),
)
