"""kvctl's own answers, in the error format of the API that was spoken.

Law 9: every number has its reason. A refusal carries the gate's word in ``x-kvctl-reason`` and the counts
beside it. Every message says what happened, what it means, and what the caller can do.

Formats: OpenAI ``{"error": {message, type, param, code}}``; Anthropic ``{"type": "error", "error": {type,
message}, "request_id"}``; TGI ``{"error", "error_type"}``.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvctl.core.events import Reject
from kvctl.core.outcomes import TENANT_LIMITS, Decision, RejectReason
from kvctl.engines.base import Api, Form
from kvctl.proxy.limits import BadRequest

_JSON = ("Content-Type", "application/json")
_NO_RETRY = ("x-should-retry", "false")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, ready to be written. ``headers`` has no Content-Length and no Date."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """An error before it takes the form of an API."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None
    request_id: str | None = None


# --- the three formats ------------------------------------------------------------------------------

_ANTHROPIC_TYPE = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_TGI_TYPE = {400: "validation", 413: "validation", 422: "validation", 429: "overloaded", 529: "overloaded"}


def _openai(fault: _Fault) -> dict[str, Any]:
    code = fault.status if fault.code is None else fault.code
    return {"error": {"message": fault.message, "type": fault.type, "param": fault.param, "code": code}}


def _anthropic(fault: _Fault) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPE.get(fault.status, "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": fault.message},
        "request_id": fault.request_id,
    }


def _tgi(fault: _Fault) -> dict[str, Any]:
    return {"error": fault.message, "error_type": _TGI_TYPE.get(fault.status, "generation")}


_FORMATS: dict[Api, Callable[[_Fault], dict[str, Any]]] = {
    Api.OPENAI: _openai,
    Api.ANTHROPIC: _anthropic,
    Api.TGI: _tgi,
}


def _encode(api: Api, fault: _Fault) -> bytes:
    return json.dumps(_FORMATS[api](fault), separators=(",", ":")).encode()


def _answer(api: Api, fault: _Fault, *headers: tuple[str, str]) -> Answer:
    return Answer(fault.status, (_JSON, *headers), _encode(api, fault))


# --- refusals of the gate ---------------------------------------------------------------------------

_UNAVAILABLE = {
    RejectReason.ENGINE_STARTING: "the engine has not answered since kvctl started; it may still be loading",
    RejectReason.ENGINE_UNREACHABLE: "the engine does not accept connections; it is down or restarting",
    RejectReason.ENGINE_ASLEEP: "the engine was put to sleep and holds no weights or KV cache now",
    RejectReason.ENGINE_WEDGED: "the engine has requests in flight but produces no tokens",
    RejectReason.GPU_FAULT: "a GPU of this engine is lost or reports a fatal error",
    RejectReason.DRAINING: "this server is being drained and takes no new requests",
}
_ROOM = "The engine has room for this request's KV cache, but "
_OTHER_LIMITS = {
    RejectReason.PREFILL_BACKLOG: f"{_ROOM}prompts that came before it would keep it waiting too long.",
    RejectReason.DECODE_CONCURRENCY: f"{_ROOM}with one more request all answers would come too slowly.",
    RejectReason.SEQUENCE_SLOTS: f"{_ROOM}it runs as many requests at once as it can.",
    RejectReason.QUEUE_AHEAD: f"{_ROOM}others wait that came before it, and it would delay them.",
    RejectReason.QUEUE_DEADLINE: "This request waited for its turn, and the turn did not come in time.",
    RejectReason.TENANT_SHARE: f"{_ROOM}that room is owed to callers who had less than their share.",
    RejectReason.TENANT_TOKENS_IN_FLIGHT: (
        "The requests that you have running hold as many KV tokens as you may hold at once."
    ),
    RejectReason.TENANT_REQUESTS_PER_MINUTE: "You have sent as many requests this minute as you may.",
    RejectReason.TENANT_TOKENS_PER_MINUTE: "You have asked for as many tokens this minute as you may.",
    RejectReason.BACKGROUND_RESPONSES: (
        "As many responses as this server keeps an eye on are being generated in the background; the same "
        "request without background may be served now."
    ),
}
_LIMIT_NAME = {
    RejectReason.CONTEXT: "the model's context length",
    RejectReason.MAX_CONTEXT: "the context cap that this server's operator set",
    RejectReason.CAPACITY: "the whole KV cache of this server",
}
_OUTPUT_FIELD = {
    Form.RESPONSES: "max_output_tokens",
    Form.VLLM_GENERATE: "sampling_params.max_tokens",
    Form.SGLANG_GENERATE: "sampling_params.max_new_tokens",
    Form.PLAIN_GENERATE: "max_new_tokens",
    Form.LLAMACPP_COMPLETION: "n_predict",
}
"""What the caller's limit is called, where not ``max_tokens`` (``max_new_tokens`` in TGI's format)."""


def refusal(
    api: Api,
    reject: Reject,
    overload_status: int = 429,
    *,
    retry_after_max_s: float = 60.0,
    form: Form = Form.OTHER,
) -> Answer:
    """The answer to a request that the gate did not admit. ``form``: the form of its body.

    ``overload_status`` replaces 429 where a load balancer retries only on another status (503, 529). A limit
    of the caller's own always gets 429: another replica would say the same.
    """
    headers = _reason_headers(reject)
    if reject.decision is Decision.REJECT_NEVER:
        return _answer(api, _never(api, form, reject), *headers, _NO_RETRY)
    own_limit = reject.reason in TENANT_LIMITS
    later_status = 429 if own_limit else overload_status
    status = later_status if reject.decision is Decision.REJECT_LATER else 503
    wait_s = _bounded_wait(reject.retry_after_s, retry_after_max_s)
    message = (
        _busy(reject, wait_s) if reject.decision is Decision.REJECT_LATER else _unavailable(reject, wait_s)
    )
    fault = _Fault(
        status=status,
        message=message,
        type="rate_limit_error" if status == 429 else "service_unavailable_error",
        param="background" if reject.reason is RejectReason.BACKGROUND_RESPONSES else None,
        code="tenant_budget_exceeded" if own_limit else reject.reason.value,
        request_id=reject.request_id,
    )
    return _answer(api, fault, *headers, *retry_headers(wait_s))


def _reason_headers(reject: Reject) -> tuple[tuple[str, str], ...]:
    headers = (("x-kvctl-reason", reject.reason.value), ("x-kvctl-needed-tokens", str(reject.needed_tokens)))
    if reject.headroom_tokens is None:
        return headers
    return (*headers, ("x-kvctl-headroom-tokens", str(reject.headroom_tokens)))


def retry_headers(wait_s: float) -> tuple[tuple[str, str], tuple[str, str]]:
    """When to come back, for every client: in whole seconds, and in milliseconds, both rounded up."""
    return ("Retry-After", str(math.ceil(wait_s))), ("retry-after-ms", str(math.ceil(wait_s * 1000)))


def _bounded_wait(seconds: float | None, most: float) -> float:
    """Seconds to wait, at least a millisecond (Retry-After: at least 1) and at most ``most``."""
    if seconds is None or math.isnan(seconds):
        return 1.0
    return min(max(seconds, 0.001), most)


def _never(api: Api, form: Form, reject: Reject) -> _Fault:
    field = _OUTPUT_FIELD.get(form, "max_new_tokens" if api is Api.TGI else "max_tokens")
    limit = "its limit" if reject.limit_tokens is None else f"{reject.limit_tokens} tokens"
    what = (
        f"This request can never be served: it needs {reject.needed_tokens} tokens "
        f"(prompt: {reject.prompt_tokens}), and {_LIMIT_NAME[reject.reason]} is {limit}. "
    )
    if reject.largest_output:
        remedy = f"Ask for at most {field}={reject.largest_output} with this prompt, or shorten the prompt."
    else:
        remedy = f"The prompt leaves no room for any output: shorten it; a smaller {field} does not help."
    return _Fault(
        status=422 if api is Api.TGI else 400,
        message=what + remedy,
        type="invalid_request_error",
        param=field if reject.largest_output else None,
        code="context_length_exceeded",
        request_id=reject.request_id,
    )


def _busy(reject: Reject, wait_s: float) -> str:
    room = "unknown" if reject.headroom_tokens is None else str(max(reject.headroom_tokens, 0))
    counts = f"it needs up to {reject.needed_tokens} KV tokens and {room} are free now"
    if reject.reason in _OTHER_LIMITS:
        return f"{_OTHER_LIMITS[reject.reason]} Nothing was generated. Retry in {wait_s:.1f} s."
    if reject.reason is RejectReason.TOO_LARGE_NOW:
        happened = (
            f"This request is larger than the KV budget and runs only when nothing else does: {counts}."
        )
    else:
        happened = f"The KV cache has no room for this request: {counts}."
    return f"{happened} Nothing was generated. Retry in {wait_s:.1f} s, or ask for less output."


def _unavailable(reject: Reject, wait_s: float) -> str:
    if reject.reason is RejectReason.RANK_GONE:
        return (
            "The part of the engine that this request waited for is gone; the others serve. Nothing was "
            f"generated. Retry in {wait_s:.1f} s."
        )
    why = _UNAVAILABLE[reject.reason]
    return (
        f"No request is served now: {why}. Nothing was generated. "
        f"Retry in {wait_s:.1f} s, or use another replica."
    )


# --- other answers ----------------------------------------------------------------------------------


def bad_request(api: Api, bad: BadRequest) -> Answer:
    """A body that the engine would refuse too."""
    fault = _Fault(status=bad.status, message=bad.message, type=bad.type, param=bad.param, code=bad.code)
    return _answer(api, fault, _NO_RETRY)


def too_large(api: Api, limit_bytes: int) -> Answer:
    """A body above ``max_body_bytes``. The rest of it is unread, so the connection must close."""
    message = (
        f"The request body is larger than {limit_bytes} bytes, the most that this server takes "
        "(max_body_bytes). Nothing was sent to the engine. Send less, or refer to media by URL."
    )
    fault = _Fault(status=413, message=message, type="request_too_large", code="request_too_large")
    return _answer(api, fault, _NO_RETRY, ("Connection", "close"))


def bad_gateway(api: Api, detail: str) -> Answer:
    """The engine could not be reached, or broke off before its answer began."""
    message = (
        f"The engine could not be reached: {detail}. The request may not have been run. "
        "Retry; if it persists, the engine's own log says more."
    )
    return _answer(api, _Fault(status=502, message=message, type="bad_gateway", code="engine_unreachable"))


def cut_short(api: Api) -> Answer:
    """A drain ended before the answer did, and nothing of it had been sent yet."""
    message = (
        "This server is shutting down and had to break off the request before its answer was whole. "
        "What was generated is lost. Retry, elsewhere if you can."
    )
    fault = _Fault(
        status=503, message=message, type="service_unavailable_error", code=RejectReason.DRAINING.value
    )
    return _answer(api, fault, ("x-kvctl-reason", RejectReason.DRAINING.value), ("Retry-After", "1"))


def gateway_timeout(api: Api, detail: str) -> Answer:
    """The engine did not answer within a configured time."""
    message = (
        f"The engine did not answer in time: {detail}. The request was cancelled. "
        "Retry, ask for less output, or use stream=true."
    )
    return _answer(api, _Fault(status=504, message=message, type="gateway_timeout", code="timeout"))


def malformed_http(message: str, status: int = 400) -> Answer:
    """Bytes that are no HTTP request (or headers too large: status 431). The connection must close."""
    text = f"This is no HTTP request that can be served: {message}. Nothing was sent to the engine."
    return _answer(
        Api.OPENAI, _Fault(status=status, message=text, type="BadRequestError"), ("Connection", "close")
    )


def too_many_connections() -> Answer:
    """No descriptors are left for another client. The connection must close."""
    message = (
        "Too many clients are connected to this server. Nothing was sent to the engine. "
        "Retry in a second, or use another replica."
    )
    fault = _Fault(status=503, message=message, type="service_unavailable_error", code="too_many_connections")
    return _answer(Api.OPENAI, fault, *retry_headers(1.0), ("Connection", "close"))


_EVENT_HEAD = {Api.OPENAI: b"data: ", Api.ANTHROPIC: b"event: error\ndata: ", Api.TGI: b"data: "}


def stream_error_event(api: Api, message: str) -> bytes:
    """An SSE event that tells that the stream broke; ``[DONE]`` never follows it.

    It begins with a blank line, which closes an event cut in its middle and means nothing otherwise.
    """
    fault = _Fault(status=502, message=message, type="engine_error", code="engine_error")
    return b"\n\n" + _EVENT_HEAD[api] + _encode(api, fault) + b"\n\n"
