"""The engine's words in here were taken from vLLM 0.32.0 for the same bodies."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.engines.base import Api, Engine, Form, Route, Treatment
from kvctl.engines.llamacpp import LlamaCpp
from kvctl.engines.sglang import SGLang
from kvctl.engines.tgi import TGI
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Parsed, Reader
from kvctl.proxy.errors import bad_request
from kvctl.proxy.limits import BadRequest
from kvctl.tokens.base import Count, CountMethod
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.load import load_counter
from tests.effort import examples
from tests.tokens.tiny import write

Json = dict[str, Any]
JSON = {"Content-Type": "application/json"}


def route(path: str, name: str, form: Form) -> Route:
    return Route(method="POST", path=path, name=name, treatment=Treatment.GENERATE, form=form)


CHAT = route("/v1/chat/completions", "chat", Form.CHAT)
TEXT = route("/v1/completions", "completions", Form.COMPLETION)
BATCH = route("/v1/chat/completions/batch", "chat_batch", Form.CHAT_BATCH)
OTHER = route("/v1/messages", "messages", Form.OTHER)
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def counter(folder: Path) -> AsyncIterator[ChainCounter]:
    counter = load_counter(str(folder))
    yield counter
    await counter.close()


@pytest.fixture
def reader(counter: ChainCounter) -> Reader:
    return Reader(counter, VLLM(), vocab_size=counter.vocab_size, context=lambda: 8192)


async def parsed(reader: Reader, route: Route, body: Json | bytes) -> Parsed:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    read = await reader.read(route, JSON, raw)
    assert isinstance(read, Parsed), read
    return read


async def refused(reader: Reader, route: Route, body: Json | bytes) -> Json:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    read = await reader.read(route, JSON, raw)
    assert isinstance(read, BadRequest), read
    error: Json = json.loads(bad_request(Api.OPENAI, read).body)["error"]
    return error


# --- what is asked for ------------------------------------------------------------------------------


async def test_a_chat(reader: Reader) -> None:
    body = {
        "model": "m",
        "messages": [USER],
        "max_tokens": 50,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    read = await parsed(reader, CHAT, body)
    assert (read.shape.route, read.shape.model, read.shape.n) == ("chat", "m", 2)
    assert (read.shape.asked_output, read.shape.default_output) == (50, None)
    assert (read.stream, read.include_usage, read.shape.stream) == (True, True, True)
    assert (read.count_method, read.shape.exact) == (CountMethod.LOCAL, True)
    assert len(read.shape.prompts) == 1


async def test_a_completion(reader: Reader) -> None:
    read = await parsed(reader, TEXT, {"model": "m", "prompt": "hi there"})
    assert (read.shape.asked_output, read.shape.default_output) == (None, 16)
    assert (read.stream, read.include_usage, read.shape.n) == (False, False, 1)
    assert read.shape.exact


NUMBERS: list[tuple[Any, int | None]] = [
    ("7", 7),
    (True, 1),
    (" 7 ", 7),
    ("+7", 7),
    ("007", 7),
    ("1_000", 1000),
    (7.0, 7),
    ("7.0", 7),
    (None, None),
    (10**30, 2**53),
    (2**63, 2**53),
]


@pytest.mark.parametrize(("value", "read_as"), NUMBERS)
@pytest.mark.parametrize("target", [CHAT, TEXT])
async def test_limits_are_read_as_the_engine_reads_them(
    reader: Reader, target: Route, value: Any, read_as: int | None
) -> None:
    """A16: '100' and true are numbers to the engine, null is absent, a huge value is held to a finite one."""
    body = {"messages": [USER], "prompt": "hi", "max_tokens": value}
    assert (await parsed(reader, target, body)).shape.asked_output == read_as


async def test_the_newer_field_goes_first(reader: Reader) -> None:
    both = {"messages": [USER], "max_tokens": 9, "max_completion_tokens": 5}
    assert (await parsed(reader, CHAT, both)).shape.asked_output == 5
    assert (await parsed(reader, CHAT, both | {"max_completion_tokens": None})).shape.asked_output == 9


WRONG: list[tuple[Any, str, str, str]] = [
    ("null", "int_parsing", "Input should be a valid integer, unable to parse string as an integer", "null"),
    ("1e2", "int_parsing", "Input should be a valid integer, unable to parse string as an integer", "1e2"),
    ("", "int_parsing", "Input should be a valid integer, unable to parse string as an integer", ""),
    (7.5, "int_from_float", "Input should be a valid integer, got a number with a fractional part", "7.5"),
    (
        1e308,
        "int_parsing_size",
        "Unable to parse input string as an integer, exceeded maximum size",
        "1e+308",
    ),
    ([1], "int_type", "Input should be a valid integer", "<list of 1 items>"),
    ({}, "int_type", "Input should be a valid integer", "<dict of 0 items>"),
]


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("field", ["max_tokens", "n", "truncate_prompt_tokens"])
async def test_what_the_engine_refuses_is_refused_in_its_words(
    reader: Reader, field: str, case: tuple[Any, str, str, str]
) -> None:
    """A16: 1.5, 1e308 and text that is no number never reach the budget's arithmetic."""
    value, kind, message, shown = case
    error = await refused(reader, TEXT, {"prompt": "hi", field: value})
    line = {"type": kind, "loc": f"body.{field}", "msg": message, "input": shown}
    assert error == {
        "message": f"1 validation error:\n  {line}",
        "type": "Bad Request",
        "param": f"body.{field}",
        "code": 400,
    }


@pytest.mark.parametrize("value", [0, -1, -186, False, "-5"])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_nothing_below_one(reader: Reader, field: str, value: Any) -> None:
    """A16: -186 (a context minus a prompt, by a client) is a 400 and no negative claim."""
    error, number = await refused(reader, CHAT, {"messages": [USER], field: value}), int(value)
    assert error == {
        "message": f"max_tokens must be at least 1, got {number}. (parameter=max_tokens, value={number})",
        "type": "BadRequestError",
        "param": "max_tokens",
        "code": 400,
    }


async def test_more_refusals_in_the_engines_words(reader: Reader) -> None:
    assert (await refused(reader, TEXT, {"prompt": "hi", "n": 0}))[
        "message"
    ] == "n must be at least 1, got 0."
    assert (await refused(reader, TEXT, {"prompt": "hi", "n": None}))["param"] == "body.n"
    assert (await parsed(reader, CHAT, {"messages": [USER], "n": None})).shape.n == 1
    below = await refused(reader, TEXT, {"prompt": "hi", "truncate_prompt_tokens": -2})
    assert below["message"] == (
        "1 validation error:\n  {'type': 'greater_than_equal', 'loc': 'body.truncate_prompt_tokens', "
        "'msg': 'Input should be greater than or equal to -1', 'input': '-2', 'ctx': {'ge': -1}}"
    )
    two = await refused(reader, TEXT, {"prompt": "hi", "max_tokens": "x", "n": 1.5})
    assert two["message"].startswith(
        "2 validation errors:\n  {'type': 'int_parsing', 'loc': 'body.max_tokens'"
    )


async def test_scoring_generates_nothing(reader: Reader) -> None:
    body = {"prompt": "hi", "max_tokens": 0, "echo": True}
    assert (await parsed(reader, TEXT, body)).shape.asked_output == 0
    await refused(reader, TEXT, body | {"echo": False})


@pytest.mark.parametrize(
    ("n", "best_of", "sequences"),
    [(2, 1, 2), (1, 8, 8), (None, 3, 3), (2, "4", 4), (2, None, 2), (2, "x", 2), (2, -7, 2)],
)
async def test_best_of(reader: Reader, n: int | None, best_of: Any, sequences: int) -> None:
    """A18: n=2 best_of=1 is two sequences, n=1 best_of=8 is eight."""
    body = {"prompt": "hi", "best_of": best_of} | ({} if n is None else {"n": n})
    assert (await parsed(reader, TEXT, body)).shape.n == sequences


@pytest.mark.parametrize(
    ("target", "asked", "bad"),
    [
        (TEXT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (TEXT, {"prompt_logprobs": "21"}, "prompt_logprobs"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 100_000}, "top_logprobs"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (TEXT, {"prompt_logprobs": 5, "logprobs": 20}, None),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, None),
        (CHAT, {"logprobs": None, "prompt_logprobs": None}, None),
        (TEXT, {"prompt_logprobs": -2}, None),
        (TEXT, {"logprobs": "many"}, None),
    ],
)
async def test_logprobs_are_bounded_apart_from_the_budget(
    counter: ChainCounter, target: Route, asked: Json, bad: str | None
) -> None:
    """A22: the whole vocabulary, or more than the operator allows, is a 400 that says why."""
    reader = Reader(counter, VLLM(), max_logprobs=20)
    body = {"messages": [USER], "prompt": "hi"} | asked
    if bad is None:
        await parsed(reader, target, body)
        return
    error = await refused(reader, target, body)
    assert (error["param"], error["code"]) == (bad, 400)
    assert "GPU memory beside the KV cache" in error["message"]
    await parsed(Reader(counter, VLLM(), max_logprobs=None), target, body)


# --- prompts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts", "exact"),
    [
        ([5, 6, 7], (3,), True),
        ([[5, 6], [7]], (2, 1), True),
        (["a", "a a"], (2, 3), True),
        (["1", "2"], (2, 2), True),
        ([1, "2"], (2,), False),
        ([True, 2.0], (2,), False),
        ([[1], ["x", None]], (1, 2), False),
        ([[]], (0,), True),
        ([""], (1,), True),
    ],
)
async def test_forms_of_a_prompt(reader: Reader, prompt: Any, prompts: tuple[int, ...], exact: bool) -> None:
    shape = (await parsed(reader, TEXT, {"prompt": prompt})).shape
    assert (shape.prompts, shape.exact) == (prompts, exact)


@pytest.mark.parametrize("flag", [False, "no", 0])
async def test_specials_as_the_body_says(reader: Reader, flag: Any) -> None:
    plain = (await parsed(reader, TEXT, {"prompt": "a"})).shape.prompts[0]
    assert (await parsed(reader, TEXT, {"prompt": "a", "add_special_tokens": flag})).shape.prompts == (
        plain - 1,
    )


async def test_embeds_count_by_their_size_and_are_no_proof(reader: Reader) -> None:
    """A33: 6 MB of base64 tensor are counted by their bytes, as rows, and never tokenised as text."""
    shape = (await parsed(reader, TEXT, {"prompt_embeds": "A" * 6_000_000})).shape
    assert (shape.prompts, shape.exact) == ((-(-4_500_000 // 512),), False)
    both = (await parsed(reader, TEXT, {"prompt": "a", "prompt_embeds": ["QQ==", "x"]})).shape
    assert (both.prompts, both.exact) == ((1, 1, 2), False)


async def test_a_suffix_joins_the_prompt(reader: Reader) -> None:
    plain = (await parsed(reader, TEXT, {"prompt": "hi"})).shape
    filled = (await parsed(reader, TEXT, {"prompt": "hi", "suffix": "and then some"})).shape
    assert filled.prompts > plain.prompts
    assert not filled.exact


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], 7, {}, [None], [{"x": 1}], ["a", ["b"]], [-1, 5], [[-3]], [99_999_999], [[1], [10**9]]],
)
async def test_prompts_that_the_engine_refuses(reader: Reader, prompt: Any) -> None:
    """A20: ids below 0 or beyond the vocabulary, which take an engine down, are a 400 (empty prompts too)."""
    error = await refused(reader, TEXT, {"prompt": prompt})
    assert error["code"] == 400
    assert error["message"]


async def test_ids_pass_where_the_vocabulary_is_not_known(counter: ChainCounter) -> None:
    """A20: without a known vocabulary the ids are counted, not judged."""
    reader = Reader(counter, VLLM())
    assert (await parsed(reader, TEXT, {"prompt": [99_999_999]})).shape.prompts == (1,)


@pytest.mark.parametrize(
    ("truncate", "prompt", "exact"),
    [(3, 3, True), (0, 0, True), (9000, 40, True), (-1, 40, False), (None, 40, True)],
)
async def test_truncation(reader: Reader, truncate: int | None, prompt: int, exact: bool) -> None:
    body = {"prompt": list(range(40)), "truncate_prompt_tokens": truncate}
    shape = (await parsed(reader, TEXT, body)).shape
    assert (shape.prompts, shape.exact) == ((prompt,), exact)
    long = {"prompt": [1] * 9000, "truncate_prompt_tokens": -1}
    assert (await parsed(reader, TEXT, long)).shape.prompts == (8192,)


async def test_ids_handed_over_by_a_prefill_instance_count(reader: Reader) -> None:
    body = {"messages": [USER], "kv_transfer_params": {"prompt_token_ids": list(range(500))}}
    shape = (await parsed(reader, CHAT, body)).shape
    assert (shape.prompts, shape.exact) == ((500,), False)


@pytest.mark.parametrize("messages", [None, [], "hi", {}, 7])
async def test_chats_without_messages(reader: Reader, messages: Any) -> None:
    assert (await refused(reader, CHAT, {"messages": messages}))["message"]
    missing = await refused(reader, CHAT, {"model": "m", "max_tokens": 3})
    line = {"type": "missing", "loc": "body.messages", "msg": "Field required", "input": "<dict of 2 items>"}
    assert missing["message"] == f"1 validation error:\n  {line}"


ODD_CHATS: list[Json] = [
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": {}}}]},
    {"role": "user", "content": 7},
    {"role": 7},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]},
    {"role": "user", "content": "\ud800"},
]


@pytest.mark.parametrize("message", ODD_CHATS)
async def test_odd_chats_are_bounded_and_left_to_the_engine(reader: Reader, message: Json) -> None:
    """A26: shapes that break a renderer get a bound, not an error; the engine judges them."""
    shape = (await parsed(reader, CHAT, {"messages": [message]})).shape
    assert not shape.exact
    assert shape.prompts[0] > 1


async def test_a_batch_is_a_prompt_a_conversation(reader: Reader) -> None:
    one = (await parsed(reader, CHAT, {"messages": [USER]})).shape
    shape = (await parsed(reader, BATCH, {"messages": [[USER], [USER], [USER]], "max_tokens": 5})).shape
    assert shape.prompts == one.prompts * 3


async def test_other_routes_are_bounded_by_all_that_they_say(reader: Reader) -> None:
    body = {
        "max_tokens": 100,
        "parameters": {"max_new_tokens": 300, "best_of": 4},
        "sampling_params": {"n": "2", "max_tokens": -5},
        "system": "s" * 5000,
        "messages": [USER],
    }
    shape = (await parsed(reader, OTHER, body)).shape
    assert (shape.asked_output, shape.n, shape.exact) == (300, 4, False)
    assert shape.prompts[0] > 5000
    assert (await parsed(reader, OTHER, {"max_tokens": -1})).shape.asked_output is None


class PrefixCounter:
    """Knows how each prompt begins."""

    async def count_text(
        self, model: str, prompts: Sequence[str], *, add_special_tokens: bool = True
    ) -> Count:
        del model, add_special_tokens
        begins = tuple(((5, hash(prompt)),) for prompt in prompts)
        return Count(prompts=(20,) * len(prompts), method=CountMethod.LOCAL, prefixes=begins)

    async def count_chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> Count:
        del body_bytes
        return await self.count_text(model, [str(body["messages"])])


async def test_how_prompts_begin_is_told_where_it_is_known_of_each() -> None:
    reader = Reader(PrefixCounter(), VLLM())
    texts = (await parsed(reader, TEXT, {"prompt": ["a", "b"]})).shape
    assert texts.prefixes == (((5, hash("a")),), ((5, hash("b")),))
    batch = (await parsed(reader, BATCH, {"messages": [[USER], [USER]]})).shape
    assert len(batch.prefixes) == 2
    cut = (await parsed(reader, TEXT, {"prompt": "a", "truncate_prompt_tokens": 7})).shape
    assert cut.prefixes == ()
    with_embeds = (await parsed(reader, TEXT, {"prompt": "a", "prompt_embeds": "QQ=="})).shape
    assert with_embeds.prefixes == ()


# --- bytes ------------------------------------------------------------------------------------------

PLAIN = '{"model": "m", "prompt": "hé", "max_tokens": 3}'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
async def test_encodings_that_the_engine_reads(reader: Reader, encoding: str) -> None:
    read = await parsed(reader, TEXT, PLAIN.encode(encoding))
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
    reader: Reader, body: bytes, message: str, param: str | None
) -> None:
    error = await refused(reader, TEXT, body)
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
async def test_a_limit_given_twice_is_refused(reader: Reader, body: bytes) -> None:
    assert "more than once" in (await refused(reader, TEXT, body))["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\\"n\\": 1, \\"n\\": 2", "n": 1}',
        b'{"prompt": "a", "n": 1, "logit_bias": {"n": 1, "n": 2}}',
        b'{"prompt": "a", "user": "x", "user": "y", "n": 1}',
        b'{"prompt": "sn\\u006fw", "n": 1}',
    ],
)
async def test_what_decides_nothing_may_be_there_twice(reader: Reader, body: bytes) -> None:
    assert (await parsed(reader, TEXT, body)).shape.n == 1


@pytest.mark.parametrize(
    "sent", ["", "text/plain", "application/vnd.api+json", "application/json ;x", "multipart/form-data"]
)
async def test_other_content_types_are_refused_as_the_engine_does(reader: Reader, sent: str) -> None:
    read = await reader.read(TEXT, {"Content-Type": sent}, PLAIN.encode())
    assert isinstance(read, BadRequest)
    assert "Only 'application/json' is allowed" in read.message


@pytest.mark.parametrize("sent", ["application/json; charset=utf-8", "APPLICATION/JSON"])
async def test_json_by_any_other_spelling(reader: Reader, sent: str) -> None:
    assert isinstance(await reader.read(TEXT, {"Content-Type": sent}, PLAIN.encode()), Parsed)


# --- everything else ----------------------------------------------------------------------------------

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
ROUTES = st.sampled_from([CHAT, TEXT, BATCH, OTHER, *(route("/any", form.value, form) for form in Form)])
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
    counter: ChainCounter, target: Route, body: Json, turns: list[Json] | None, engine: Engine
) -> None:
    """A16, A26: no value or shape of any field makes counting raise or a claim negative."""
    reader = Reader(counter, engine, vocab_size=counter.vocab_size, context=lambda: 8192)
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
async def test_no_bytes_make_it_raise(reader: Reader, target: Route, body: bytes) -> None:
    assert isinstance(await reader.read(target, JSON, body), (Parsed, BadRequest))
