"""Every route of vLLM up to 0.32 and what the proxy does with it.

A route that generates or holds KV and cannot be counted is refused with a hint: passing it would let it
run beside the ledger. Routes that are not here are refused by the proxy.
"""

from kvctl.engines.base import Api, Form, Route, Treatment

_GENERATE = {
    "/v1/chat/completions": ("chat", Form.CHAT),
    "/v1/completions": ("completions", Form.COMPLETION),
}

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
)

_CHAT = "kvctl does not meter this route; use /v1/chat/completions"
_COMPLETIONS = "kvctl does not meter this route; use /v1/completions"
_UNMETERED = "kvctl does not meter this route; the operator may list it in routes.pass"

_REFUSE = (
    ("*", "/v1/chat/completions/batch", "chat_batch", Api.OPENAI, _CHAT),
    ("*", "/v1/responses", "responses", Api.OPENAI, _CHAT),
    ("*", "/v1/responses/*", "responses", Api.OPENAI, _CHAT),
    ("*", "/v1/messages", "messages", Api.ANTHROPIC, _CHAT),
    ("*", "/cohere/v2/chat", "cohere_chat", Api.OPENAI, _CHAT),
    ("*", "/invocations", "invocations", Api.OPENAI, _COMPLETIONS),
    ("*", "/inference/v1/generate", "generate", Api.OPENAI, _COMPLETIONS),
    ("*", "/v1/audio/transcriptions", "transcriptions", Api.OPENAI, _UNMETERED),
    ("*", "/v1/audio/translations", "translations", Api.OPENAI, _UNMETERED),
    ("*", "/v1/realtime", "realtime", Api.OPENAI, _UNMETERED),
    ("*", "/v1/embeddings", "embeddings", Api.OPENAI, _UNMETERED),
    ("*", "/v2/embed", "embeddings", Api.OPENAI, _UNMETERED),
    ("*", "/pooling", "pooling", Api.OPENAI, _UNMETERED),
    ("*", "/classify", "classify", Api.OPENAI, _UNMETERED),
    ("*", "/score", "score", Api.OPENAI, _UNMETERED),
    ("*", "/v1/score", "score", Api.OPENAI, _UNMETERED),
    ("*", "/rerank", "rerank", Api.OPENAI, _UNMETERED),
    ("*", "/v1/rerank", "rerank", Api.OPENAI, _UNMETERED),
    ("*", "/v2/rerank", "rerank", Api.OPENAI, _UNMETERED),
    ("*", "/generative_scoring", "generative_scoring", Api.OPENAI, _UNMETERED),
    ("*", "/v1/systemone", "structured_decisions", Api.OPENAI, _UNMETERED),
)

_ADMIN_HINT = "engine administration; the operator may list it in routes.admin_pass"

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
    *(
        Route(method="POST", path=path, name=name, treatment=Treatment.GENERATE, form=form)
        for path, (name, form) in _GENERATE.items()
    ),
    *(Route(method=method, path=path, name=name, treatment=Treatment.PASS) for method, path, name in _PASS),
    *(
        Route(method=method, path=path, name=name, treatment=Treatment.REFUSE, api=api, hint=hint)
        for method, path, name, api, hint in _REFUSE
    ),
    *(
        Route(method="*", path=path, name="admin", treatment=Treatment.REFUSE, admin=True, hint=_ADMIN_HINT)
        for path in _ADMIN
    ),
)
