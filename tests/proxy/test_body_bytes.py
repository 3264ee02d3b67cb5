"""Bytes that may be no request, and bodies at random. The engine's words are vLLM 0.32.0's."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.engines.base import Engine, Form, Route
from kvctl.engines.llamacpp import LlamaCpp
from kvctl.engines.sglang import SGLang
from kvctl.engines.tgi import TGI
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Parsed, Reader
from kvctl.proxy.limits import BadRequest
from kvctl.tokens.chain import ChainCounter
from tests.effort import examples
from tests.proxy.reading import BATCH, CHAT, JSON, OTHER, TEXT, Json, parsed, refused, route

USER = {"role": "user", "content": "hi"}


# --- bytes ------------------------------------------------------------------------------------------

PLAIN = '{"model": "m", "prompt": "hé", "max_tokens": 3}'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
async def test_encodings_that_the_engine_reads(tiny_reader: Reader, encoding: str) -> None:
    read = await parsed(tiny_reader, TEXT, PLAIN.encode(encoding))
    assert (read.shape.asked_output, read.shape.exact) == (3, True)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'", "body"),
        (b"null", "'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'", "body"),
        (b"[]", "'type': 'model_attributes_type', 'loc': 'body'", "body"),
        (b'"x"', "'input': 'x'", "body"),
        (
            b'{"model":"tiny","prompt":"hi"',
            "'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {'error': \"Expecting ',' ",
            "body.29",
        ),
        (b'{"a": "\xff"}', "There was an error parsing the body", None),
        (b"[" * 200_000, "There was an error parsing the body", None),
        (
            b'{"prompt": "hi", "max_tokens": ' + b"9" * 5000 + b"}",
            "There was an error parsing the body",
            None,
        ),
        (b'{"prompt": "hi", "max_tokens": NaN}', "'type': 'finite_number'", "body.max_tokens"),
        (b'{"prompt": "hi", "max_tokens": 1e400}', "'type': 'finite_number'", "body.max_tokens"),
    ],
)
async def test_bytes_that_are_no_request(
    tiny_reader: Reader, body: bytes, message: str, param: str | None
) -> None:
    error = await refused(tiny_reader, TEXT, body)
    assert message in error["message"]
    assert (error["param"], error["code"]) == (param, 400)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "max_tokens": 1, "max_tokens": 4000}',
        b'{"prompt": "a", "max_tokens": 1, "max\\u005ftokens": 4000}',
        b'{"prompt": "a", "\\u006e": 1, "n": 4}',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "prompt" \n: "b"}',
        '{"prompt": "a", "n": 1, "n": 9}'.encode("utf-16"),
        '{"prompt": "a", "n": 1, "n": 9}'.encode("utf-16-be"),
    ],
)
async def test_a_limit_given_twice_is_refused(tiny_reader: Reader, body: bytes) -> None:
    assert "more than once" in (await refused(tiny_reader, TEXT, body))["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\\"n\\": 1, \\"n\\": 2", "n": 1}',
        b'{"prompt": "a", "n": 1, "logit_bias": {"n": 1, "n": 2}}',
        b'{"prompt": "a", "user": "x", "user": "y", "n": 1}',
        b'{"prompt": "sn\\u006fw", "n": 1}',
    ],
)
async def test_what_decides_nothing_may_be_there_twice(tiny_reader: Reader, body: bytes) -> None:
    assert (await parsed(tiny_reader, TEXT, body)).shape.n == 1


@pytest.mark.parametrize(
    "sent", ["", "text/plain", "application/vnd.api+json", "application/json ;x", "multipart/form-data"]
)
async def test_other_content_types_are_refused_as_the_engine_does(tiny_reader: Reader, sent: str) -> None:
    read = await tiny_reader.read(TEXT, {"Content-Type": sent}, PLAIN.encode())
    assert isinstance(read, BadRequest)
    assert "Only 'application/json' is allowed" in read.message


@pytest.mark.parametrize("sent", ["application/json; charset=utf-8", "APPLICATION/JSON"])
async def test_json_by_any_other_spelling(tiny_reader: Reader, sent: str) -> None:
    assert isinstance(await tiny_reader.read(TEXT, {"Content-Type": sent}, PLAIN.encode()), Parsed)


# --- whatever there is ----------------------------------------------------------------------------------

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)
FIELDS = (
    *("model", "messages", "prompt", "prompt_embeds", "max_tokens", "max_completion_tokens", "n", "best_of"),
    *("truncate_prompt_tokens", "add_special_tokens", "stream", "stream_options", "echo", "suffix", "tools"),
    *("kv_transfer_params", "chat_template_kwargs", "parameters", "sampling_params", "priority"),
    *("input", "instructions", "previous_response_id", "background", "truncation", "max_output_tokens"),
    *("system", "thinking", "output_config", "reasoning", "token_ids", "content_parts", "inputs", "text"),
    *("input_ids", "input_embeds", "image_data", "n_predict", "prompt_tokens", "max_new_tokens", "texts"),
    *("text_1", "text_2", "query", "documents", "items", "instruction", "data", "multimodal_data"),
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=8)
ROUTES = st.sampled_from([CHAT, TEXT, BATCH, OTHER, *(route(form) for form in Form)])
ENGINES = st.sampled_from([VLLM(), SGLang(), TGI(), LlamaCpp()])
CONVERSATIONS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", 7])},
        optional={
            "content": ANY
            | st.lists(
                st.fixed_dictionaries(
                    {
                        "type": st.sampled_from(
                            ["text", "image", "tool_use", "tool_result", "thinking", "input_text"]
                        )
                    },
                    optional={
                        "text": ANY,
                        "content": ANY,
                        "input": ANY,
                        "source": ANY,
                        "thinking": ANY,
                        "id": ANY,
                    },
                ),
                max_size=3,
            ),
            "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", 7]),
            "tool_calls": ANY,
            "name": ANY,
            "arguments": ANY,
            "call_id": ANY,
            "summary": ANY,
        },
    ),
    max_size=4,
)
FUZZ = settings(
    max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(target=ROUTES, body=BODIES, turns=st.none() | CONVERSATIONS, engine=ENGINES)
@FUZZ
async def test_no_body_makes_it_raise(
    tiny_counter: ChainCounter, target: Route, body: Json, turns: list[Json] | None, engine: Engine
) -> None:
    """A16, A26: no value or shape of any field makes counting raise or a claim negative."""
    reader = Reader(tiny_counter, engine, vocab_size=tiny_counter.vocab_size, context=lambda: 8192)
    if turns is None:
        body = {"messages": [USER], "prompt": "hi", "max_tokens": 5, "input": "hi"} | body
    else:
        body |= {"messages": turns, "input": turns, "max_tokens": 5}
    read = await reader.read(target, JSON, json.dumps(body).encode())
    if isinstance(read, Parsed):
        assert read.shape.n >= 1
        assert min(read.shape.prompts) >= 0
        assert (read.shape.asked_output or 0) >= 0
    else:
        assert read.status in (400, 415, 422)
        assert read.message


@given(target=ROUTES, body=st.binary(max_size=200))
@FUZZ
async def test_no_bytes_make_it_raise(tiny_reader: Reader, target: Route, body: bytes) -> None:
    assert isinstance(await tiny_reader.read(target, JSON, body), (Parsed, BadRequest))
