import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.events import Reject
from kvctl.core.outcomes import DECISION_OF, TENANT_LIMITS, Decision, RejectReason
from kvctl.engines.base import Api, Form
from kvctl.proxy.errors import (
    Answer,
    bad_gateway,
    bad_request,
    gateway_timeout,
    malformed_http,
    refusal,
    stream_error_event,
    too_large,
)
from kvctl.proxy.limits import BadRequest


def reject(reason: RejectReason, **more: Any) -> Reject:
    known: dict[str, Any] = {"needed_tokens": 9000, "prompt_tokens": 5000} | more
    return Reject("req-1", reason, **known)


def header(answer: Answer, name: str) -> str | None:
    found = [value for key, value in answer.headers if key.lower() == name.lower()]
    assert len(found) <= 1
    return found[0] if found else None


def message(api: Api, answer: Answer) -> str:
    data = json.loads(answer.body)
    text = data["error"] if api is Api.TGI else data["error"]["message"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    ("api", "form", "field"),
    [
        (Api.OPENAI, Form.CHAT, "max_tokens"),
        (Api.ANTHROPIC, Form.MESSAGES, "max_tokens"),
        (Api.OPENAI, Form.RESPONSES, "max_output_tokens"),
        (Api.OPENAI, Form.VLLM_GENERATE, "sampling_params.max_tokens"),
        (Api.OPENAI, Form.SGLANG_GENERATE, "sampling_params.max_new_tokens"),
        (Api.OPENAI, Form.LLAMACPP_COMPLETION, "n_predict"),
        (Api.TGI, Form.TGI_GENERATE, "max_new_tokens"),
    ],
)
def test_the_remedy_is_named_as_the_body_names_it(api: Api, form: Form, field: str) -> None:
    answer = refusal(api, reject(RejectReason.CONTEXT, limit_tokens=8192, largest_output=3192), form=form)
    assert f" {field}=3192 " in message(api, answer)


BY_DECISION = {
    decision: [reason for reason in RejectReason if DECISION_OF[reason] is decision] for decision in Decision
}


@pytest.mark.parametrize("reason", BY_DECISION[Decision.REJECT_NEVER])
def test_never_names_the_counts_the_limit_and_what_would_fit(reason: RejectReason) -> None:
    answer = refusal(Api.OPENAI, reject(reason, limit_tokens=8192, largest_output=3192))
    error = json.loads(answer.body)["error"]
    assert answer.status == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["type"] == "invalid_request_error"
    for number in ("9000", "5000", "8192", "max_tokens=3192"):
        assert number in error["message"]
    assert header(answer, "x-should-retry") == "false"
    assert header(answer, "x-kvctl-reason") == reason
    assert header(answer, "x-kvctl-needed-tokens") == "9000"
    assert header(answer, "Retry-After") is None


def test_a_prompt_that_is_too_long_by_itself_names_no_smaller_output() -> None:
    answer = refusal(Api.OPENAI, reject(RejectReason.CONTEXT, limit_tokens=4096, largest_output=0))
    error = json.loads(answer.body)["error"]
    assert error["param"] is None
    assert "max_tokens=" not in error["message"]
    assert "shorten" in error["message"]


@pytest.mark.parametrize("reason", BY_DECISION[Decision.REJECT_LATER])
@pytest.mark.parametrize("status", [429, 503, 529])
def test_later_has_the_operators_status_and_a_time(reason: RejectReason, status: int) -> None:
    """E11: not now is 429 by default, never a 5xx that ejects the host, unless the operator says so."""
    answer = refusal(
        Api.OPENAI, reject(reason, headroom_tokens=120, retry_after_s=1.2), overload_status=status
    )
    own_limit = reason in TENANT_LIMITS
    assert answer.status == (429 if own_limit else status)
    assert header(answer, "Retry-After") == "2"
    assert header(answer, "retry-after-ms") == "1200"
    assert header(answer, "x-kvctl-headroom-tokens") == "120"
    assert header(answer, "x-should-retry") is None
    assert json.loads(answer.body)["error"]["code"] == ("tenant_budget_exceeded" if own_limit else reason)
    assert header(answer, "x-kvctl-reason") == reason
    of_tokens = reason in {RejectReason.KV_BUDGET, RejectReason.TOO_LARGE_NOW}
    assert ("9000" in message(Api.OPENAI, answer)) is of_tokens


def test_every_reason_for_later_has_its_own_words() -> None:
    texts = {message(Api.OPENAI, refusal(Api.OPENAI, reject(r))) for r in BY_DECISION[Decision.REJECT_LATER]}
    assert len(texts) == len(BY_DECISION[Decision.REJECT_LATER])


@pytest.mark.parametrize("reason", BY_DECISION[Decision.UNAVAILABLE])
def test_unavailable_is_503_whatever_overload_is(reason: RejectReason) -> None:
    """E11: 5xx is for an engine that cannot answer at all."""
    answer = refusal(Api.OPENAI, reject(reason, retry_after_s=5.0), overload_status=429)
    assert answer.status == 503
    assert header(answer, "Retry-After") == "5"
    assert header(answer, "x-kvctl-reason") == reason
    assert header(answer, "x-kvctl-headroom-tokens") is None


def test_who_waited_for_a_rank_that_is_gone_hears_that_others_serve() -> None:
    told = message(Api.OPENAI, refusal(Api.OPENAI, reject(RejectReason.RANK_GONE)))
    assert "the others serve" in told
    assert "drained" not in told
    assert "No request is served" not in told


def test_every_unavailable_reason_has_its_own_words() -> None:
    texts = {
        message(Api.OPENAI, refusal(Api.OPENAI, reject(reason)))
        for reason in BY_DECISION[Decision.UNAVAILABLE]
    }
    assert len(texts) == len(BY_DECISION[Decision.UNAVAILABLE])


@pytest.mark.parametrize(
    ("seconds", "whole", "milliseconds"),
    [
        (None, "1", "1000"),
        (0.0, "1", "1"),
        (-3.0, "1", "1"),
        (0.25, "1", "250"),
        (1.0, "1", "1000"),
        (1.0001, "2", "1001"),
        (59.2, "60", "59200"),
        (1e9, "60", "60000"),
        (float("inf"), "60", "60000"),
        (float("nan"), "1", "1000"),
    ],
)
def test_retry_after_is_whole_and_within_bounds(seconds: float | None, whole: str, milliseconds: str) -> None:
    """E07: whole seconds in 1..60 whatever the gate thought of."""
    answer = refusal(Api.OPENAI, reject(RejectReason.KV_BUDGET, retry_after_s=seconds))
    assert (header(answer, "Retry-After"), header(answer, "retry-after-ms")) == (whole, milliseconds)


@given(st.floats())
def test_no_time_breaks_the_header(seconds: float) -> None:
    """E07: no number breaks the header, NaN and infinity included."""
    answer = refusal(Api.OPENAI, reject(RejectReason.KV_BUDGET, retry_after_s=seconds))
    assert 1 <= int(header(answer, "Retry-After") or 0) <= 60
    assert 1 <= int(header(answer, "retry-after-ms") or 0) <= 60_000


BAD = BadRequest(message="no", type="Bad Request", param="body.n")


@pytest.mark.parametrize(
    ("answer", "status", "kind"),
    [
        (bad_request(Api.ANTHROPIC, BAD), 400, "invalid_request_error"),
        (refusal(Api.ANTHROPIC, reject(RejectReason.CONTEXT)), 400, "invalid_request_error"),
        (refusal(Api.ANTHROPIC, reject(RejectReason.KV_BUDGET)), 429, "rate_limit_error"),
        (refusal(Api.ANTHROPIC, reject(RejectReason.KV_BUDGET), 529), 529, "overloaded_error"),
        (refusal(Api.ANTHROPIC, reject(RejectReason.DRAINING)), 503, "api_error"),
        (too_large(Api.ANTHROPIC, 10), 413, "request_too_large"),
        (bad_gateway(Api.ANTHROPIC, "x"), 502, "api_error"),
        (gateway_timeout(Api.ANTHROPIC, "x"), 504, "timeout_error"),
    ],
)
def test_anthropic_format(answer: Answer, status: int, kind: str) -> None:
    data = json.loads(answer.body)
    assert answer.status == status
    assert data.keys() == {"type", "error", "request_id"}
    assert (data["type"], data["error"]["type"]) == ("error", kind)
    assert data["error"].keys() == {"type", "message"}


def test_anthropic_refusals_carry_the_request_id() -> None:
    assert json.loads(refusal(Api.ANTHROPIC, reject(RejectReason.CONTEXT)).body)["request_id"] == "req-1"


@pytest.mark.parametrize(
    ("answer", "status", "kind"),
    [
        (refusal(Api.TGI, reject(RejectReason.CONTEXT, largest_output=7)), 422, "validation"),
        (refusal(Api.TGI, reject(RejectReason.KV_BUDGET)), 429, "overloaded"),
        (bad_gateway(Api.TGI, "x"), 502, "generation"),
    ],
)
def test_tgi_format(answer: Answer, status: int, kind: str) -> None:
    data = json.loads(answer.body)
    assert answer.status == status
    assert data.keys() == {"error", "error_type"}
    assert data["error_type"] == kind


def test_tgi_has_its_own_name_for_the_limit() -> None:
    answer = refusal(Api.TGI, reject(RejectReason.CONTEXT, limit_tokens=8192, largest_output=7))
    assert "max_new_tokens=7" in message(Api.TGI, answer)


def test_the_engines_refusal_keeps_its_shape() -> None:
    answer = bad_request(Api.OPENAI, BAD)
    assert json.loads(answer.body) == {
        "error": {"message": "no", "type": "Bad Request", "param": "body.n", "code": 400}
    }
    assert header(answer, "Content-Type") == "application/json"


def test_other_answers() -> None:
    large = too_large(Api.OPENAI, 64)
    assert (large.status, header(large, "Connection")) == (413, "close")
    assert "64 bytes" in message(Api.OPENAI, large)
    broken = malformed_http("bad header")
    assert (broken.status, header(broken, "Connection")) == (400, "close")
    assert malformed_http("headers too large", 431).status == 431
    assert bad_gateway(Api.OPENAI, "refused").status == 502
    assert gateway_timeout(Api.OPENAI, "60 s").status == 504


@pytest.mark.parametrize("api", list(Api))
def test_the_error_event_ends_a_cut_event_and_never_says_done(api: Api) -> None:
    event = stream_error_event(api, "the engine\nbroke off")
    assert event.startswith(b"\n\n")
    assert event.endswith(b"\n\n")
    assert b"[DONE]" not in event
    *head, data = event.strip().split(b"\n")
    assert head == ([b"event: error"] if api is Api.ANTHROPIC else [])
    text = json.loads(data.removeprefix(b"data: "))["error"]
    assert (text if isinstance(text, str) else text["message"]) == "the engine\nbroke off"
