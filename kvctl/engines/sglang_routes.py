"""Every route of SGLang up to 0.5 and what the proxy does with it."""

from kvctl.engines.base import Form, Route
from kvctl.engines.route_table import administration, generating, passed, refused

_GENERATE = (
    ("/generate", "generate", Form.SGLANG_GENERATE),
    ("/v1/chat/completions", "chat", Form.CHAT),
    ("/v1/completions", "completions", Form.COMPLETION),
    ("/v1/responses", "responses", Form.RESPONSES),
    ("/v1/messages", "messages", Form.MESSAGES),
    ("/v1/embeddings", "embeddings", Form.EMBED),
    ("/encode", "embeddings", Form.EMBED),
    ("/classify", "classify", Form.EMBED),
    ("/v1/classify", "classify", Form.EMBED),
    ("/v1/score", "score", Form.SCORE),
    ("/v1/rerank", "rerank", Form.RERANK),
)

_PASS = (
    ("GET", "/", "root"),
    ("GET", "/health", "health"),
    ("GET", "/health_generate", "health"),  # makes one token of its own
    ("GET", "/ping", "ping"),
    ("GET", "/metrics", "metrics"),
    ("GET", "/v1/models", "models"),
    ("GET", "/v1/models/*", "models"),
    ("GET", "/get_model_info", "model_info"),
    ("GET", "/model_info", "model_info"),
    ("GET", "/get_load", "load"),
    ("GET", "/v1/loads", "load"),
    ("POST", "/tokenize", "tokenize"),
    ("POST", "/v1/tokenize", "tokenize"),
    ("POST", "/detokenize", "detokenize"),
    ("POST", "/v1/detokenize", "detokenize"),
    ("POST", "/v1/messages/count_tokens", "count_tokens"),
    ("POST", "/parse_function_call", "parse"),
    ("POST", "/separate_reasoning", "parse"),
    ("GET", "/v1/responses/*", "responses"),
    ("POST", "/v1/responses/*", "responses"),  # cancels one
)

_UNMETERED = "kvctl does not meter this route; use /generate or /v1/chat/completions"
_REFUSE = (
    ("*", "/generate_from_file", "generate_from_file"),
    ("PUT", "/generate", "generate"),
    ("*", "/invocations", "invocations"),
    ("*", "/vertex_generate", "vertex"),
    ("*", "/api/chat", "ollama"),
    ("*", "/api/generate", "ollama"),
    ("*", "/v1/audio/transcriptions", "transcriptions"),
    ("*", "/v1/realtime", "realtime"),
    ("*", "/open_session", "session"),  # holds KV from one request to the next
    ("*", "/close_session", "session"),
)

_ADMIN = (
    "/abort_request",
    "/check_weights",
    "/configure_logging",
    "/continue_generation",
    "/destroy_weights_update_group",
    "/dump_expert_distribution_record",
    "/flush_cache",
    "/get_internal_state",
    "/get_server_info",
    "/get_weights_by_name",
    "/hicache/*",
    "/init_weights_send_group_for_remote_instance",
    "/init_weights_update_group",
    "/load_lora_adapter",
    "/pause_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/send_weights_to_remote_instance",
    "/server_info",
    "/set_internal_state",
    "/set_trace_level",
    "/slow_down",
    "/start_expert_distribution_record",
    "/start_profile",
    "/stop_expert_distribution_record",
    "/stop_profile",
    "/unload_lora_adapter",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/update_weights_from_tensor",
)

ROUTES: tuple[Route, ...] = (
    *generating(_GENERATE),
    *passed(_PASS),
    *refused(_REFUSE, _UNMETERED),
    *administration(_ADMIN),
)
