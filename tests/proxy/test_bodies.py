"""Limits and prompts in bodies. The engine's words in here were taken from vLLM 0.32.0."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvctl.engines.base import Route
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Reader
from kvctl.tokens.base import Count, CountMethod
from kvctl.tokens.chain import ChainCounter
from tests.proxy.reading import BATCH, CHAT, OTHER, TEXT, Json, parsed, refused

USER = {"role": "user", "content": "hi"}


# --- what is asked for ------------------------------------------------------------------------------


async def test_a_chat(tiny_reader: Reader) -> None:
    body = {
        "model": "m",
        "messages": [USER],
        "max_tokens": 50,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    read = await parsed(tiny_reader, CHAT, body)
    assert (read.shape.route, read.shape.model, read.shape.n) == ("chat", "m", 2)
    assert (read.shape.asked_output, read.shape.default_output) == (50, None)
    assert (read.stream, read.shape.stream) == (True, True)
    assert (read.count_method, read.shape.exact) == (CountMethod.LOCAL, True)
    assert len(read.shape.prompts) == 1


async def test_a_completion(tiny_reader: Reader) -> None:
    read = await parsed(tiny_reader, TEXT, {"model": "m", "prompt": "hi there"})
    assert (read.shape.asked_output, read.shape.default_output) == (None, 16)
    assert (read.stream, read.shape.n) == (False, 1)
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
    tiny_reader: Reader, target: Route, value: Any, read_as: int | None
) -> None:
    """A16: '100' and true are numbers to the engine, null is absent, a huge value is held to a finite one."""
    body = {"messages": [USER], "prompt": "hi", "max_tokens": value}
    assert (await parsed(tiny_reader, target, body)).shape.asked_output == read_as


async def test_the_newer_field_goes_first(tiny_reader: Reader) -> None:
    both = {"messages": [USER], "max_tokens": 9, "max_completion_tokens": 5}
    assert (await parsed(tiny_reader, CHAT, both)).shape.asked_output == 5
    assert (await parsed(tiny_reader, CHAT, both | {"max_completion_tokens": None})).shape.asked_output == 9


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
    tiny_reader: Reader, field: str, case: tuple[Any, str, str, str]
) -> None:
    """A16: 1.5, 1e308 and text that is no number never reach the budget's arithmetic."""
    value, kind, message, shown = case
    error = await refused(tiny_reader, TEXT, {"prompt": "hi", field: value})
    line = {"type": kind, "loc": f"body.{field}", "msg": message, "input": shown}
    assert error == {
        "message": f"1 validation error:\n  {line}",
        "type": "Bad Request",
        "param": f"body.{field}",
        "code": 400,
    }


@pytest.mark.parametrize("value", [0, -1, -186, False, "-5"])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_nothing_below_one(tiny_reader: Reader, field: str, value: Any) -> None:
    """A16: -186 (a context minus a prompt, by a client) is a 400 and no negative claim."""
    error, number = await refused(tiny_reader, CHAT, {"messages": [USER], field: value}), int(value)
    assert error == {
        "message": f"max_tokens must be at least 1, got {number}. (parameter=max_tokens, value={number})",
        "type": "BadRequestError",
        "param": "max_tokens",
        "code": 400,
    }


async def test_more_refusals_in_the_engines_words(tiny_reader: Reader) -> None:
    assert (await refused(tiny_reader, TEXT, {"prompt": "hi", "n": 0}))[
        "message"
    ] == "n must be at least 1, got 0."
    assert (await refused(tiny_reader, TEXT, {"prompt": "hi", "n": None}))["param"] == "body.n"
    assert (await parsed(tiny_reader, CHAT, {"messages": [USER], "n": None})).shape.n == 1
    below = await refused(tiny_reader, TEXT, {"prompt": "hi", "truncate_prompt_tokens": -2})
    assert below["message"] == (
        "1 validation error:\n  {'type': 'greater_than_equal', 'loc': 'body.truncate_prompt_tokens', "
        "'msg': 'Input should be greater than or equal to -1', 'input': '-2', 'ctx': {'ge': -1}}"
    )
    two = await refused(tiny_reader, TEXT, {"prompt": "hi", "max_tokens": "x", "n": 1.5})
    assert two["message"].startswith(
        "2 validation errors:\n  {'type': 'int_parsing', 'loc': 'body.max_tokens'"
    )


async def test_scoring_generates_nothing(tiny_reader: Reader) -> None:
    body = {"prompt": "hi", "max_tokens": 0, "echo": True}
    assert (await parsed(tiny_reader, TEXT, body)).shape.asked_output == 0
    await refused(tiny_reader, TEXT, body | {"echo": False})


@pytest.mark.parametrize(
    ("n", "best_of", "sequences"),
    [(2, 1, 2), (1, 8, 8), (None, 3, 3), (2, "4", 4), (2, None, 2), (2, "x", 2), (2, -7, 2)],
)
async def test_best_of(tiny_reader: Reader, n: int | None, best_of: Any, sequences: int) -> None:
    """A18: n=2 best_of=1 is two sequences, n=1 best_of=8 is eight."""
    body = {"prompt": "hi", "best_of": best_of} | ({} if n is None else {"n": n})
    assert (await parsed(tiny_reader, TEXT, body)).shape.n == sequences


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
    tiny_counter: ChainCounter, target: Route, asked: Json, bad: str | None
) -> None:
    """A22: the whole vocabulary, or more than the operator allows, is a 400 that says why."""
    reader = Reader(tiny_counter, VLLM(), max_logprobs=20)
    body = {"messages": [USER], "prompt": "hi"} | asked
    if bad is None:
        await parsed(reader, target, body)
        return
    error = await refused(reader, target, body)
    assert (error["param"], error["code"]) == (bad, 400)
    assert "GPU memory beside the KV cache" in error["message"]
    await parsed(Reader(tiny_counter, VLLM(), max_logprobs=None), target, body)


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
async def test_forms_of_a_prompt(
    tiny_reader: Reader, prompt: Any, prompts: tuple[int, ...], exact: bool
) -> None:
    shape = (await parsed(tiny_reader, TEXT, {"prompt": prompt})).shape
    assert (shape.prompts, shape.exact) == (prompts, exact)


@pytest.mark.parametrize("flag", [False, "no", 0])
async def test_specials_as_the_body_says(tiny_reader: Reader, flag: Any) -> None:
    plain = (await parsed(tiny_reader, TEXT, {"prompt": "a"})).shape.prompts[0]
    assert (await parsed(tiny_reader, TEXT, {"prompt": "a", "add_special_tokens": flag})).shape.prompts == (
        plain - 1,
    )


async def test_embeds_count_by_their_size_and_are_no_proof(tiny_reader: Reader) -> None:
    """A33: 6 MB of base64 tensor are counted by their bytes, as rows, and never tokenised as text."""
    shape = (await parsed(tiny_reader, TEXT, {"prompt_embeds": "A" * 6_000_000})).shape
    assert (shape.prompts, shape.exact) == ((-(-4_500_000 // 512),), False)
    both = (await parsed(tiny_reader, TEXT, {"prompt": "a", "prompt_embeds": ["QQ==", "x"]})).shape
    assert (both.prompts, both.exact) == ((1, 1, 2), False)


async def test_a_suffix_joins_the_prompt(tiny_reader: Reader) -> None:
    plain = (await parsed(tiny_reader, TEXT, {"prompt": "hi"})).shape
    filled = (await parsed(tiny_reader, TEXT, {"prompt": "hi", "suffix": "and then some"})).shape
    assert filled.prompts > plain.prompts
    assert not filled.exact


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], 7, {}, [None], [{"x": 1}], ["a", ["b"]], [-1, 5], [[-3]], [99_999_999], [[1], [10**9]]],
)
async def test_prompts_that_the_engine_refuses(tiny_reader: Reader, prompt: Any) -> None:
    """A20: ids below 0 or beyond the vocabulary, which take an engine down, are a 400 (empty prompts too)."""
    error = await refused(tiny_reader, TEXT, {"prompt": prompt})
    assert error["code"] == 400
    assert error["message"]


async def test_ids_pass_where_the_vocabulary_is_not_known(tiny_counter: ChainCounter) -> None:
    """A20: without a known vocabulary the ids are counted, not judged."""
    reader = Reader(tiny_counter, VLLM())
    assert (await parsed(reader, TEXT, {"prompt": [99_999_999]})).shape.prompts == (1,)


@pytest.mark.parametrize(
    ("truncate", "prompt", "exact"),
    [(3, 3, True), (0, 0, True), (9000, 40, True), (-1, 40, False), (None, 40, True)],
)
async def test_truncation(tiny_reader: Reader, truncate: int | None, prompt: int, exact: bool) -> None:
    body = {"prompt": list(range(40)), "truncate_prompt_tokens": truncate}
    shape = (await parsed(tiny_reader, TEXT, body)).shape
    assert (shape.prompts, shape.exact) == ((prompt,), exact)
    long = {"prompt": [1] * 9000, "truncate_prompt_tokens": -1}
    assert (await parsed(tiny_reader, TEXT, long)).shape.prompts == (8192,)


async def test_ids_handed_over_by_a_prefill_instance_count(tiny_reader: Reader) -> None:
    body = {"messages": [USER], "kv_transfer_params": {"prompt_token_ids": list(range(500))}}
    shape = (await parsed(tiny_reader, CHAT, body)).shape
    assert (shape.prompts, shape.exact) == ((500,), False)


@pytest.mark.parametrize("messages", [None, [], "hi", {}, 7])
async def test_chats_without_messages(tiny_reader: Reader, messages: Any) -> None:
    assert (await refused(tiny_reader, CHAT, {"messages": messages}))["message"]
    missing = await refused(tiny_reader, CHAT, {"model": "m", "max_tokens": 3})
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
async def test_odd_chats_are_bounded_and_left_to_the_engine(tiny_reader: Reader, message: Json) -> None:
    """A26: shapes that break a renderer get a bound, not an error; the engine judges them."""
    shape = (await parsed(tiny_reader, CHAT, {"messages": [message]})).shape
    assert not shape.exact
    assert shape.prompts[0] > 1


async def test_a_batch_is_a_prompt_a_conversation(tiny_reader: Reader) -> None:
    one = (await parsed(tiny_reader, CHAT, {"messages": [USER]})).shape
    shape = (await parsed(tiny_reader, BATCH, {"messages": [[USER], [USER], [USER]], "max_tokens": 5})).shape
    assert shape.prompts == one.prompts * 3


async def test_other_routes_are_bounded_by_all_that_they_say(tiny_reader: Reader) -> None:
    body = {
        "max_tokens": 100,
        "parameters": {"max_new_tokens": 300, "best_of": 4},
        "sampling_params": {"n": "2", "max_tokens": -5},
        "system": "s" * 5000,
        "messages": [USER],
    }
    shape = (await parsed(tiny_reader, OTHER, body)).shape
    assert (shape.asked_output, shape.n, shape.exact) == (300, 4, False)
    assert shape.prompts[0] > 5000
    assert (await parsed(tiny_reader, OTHER, {"max_tokens": -1})).shape.asked_output is None


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
