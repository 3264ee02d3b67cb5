"""The own generate routes of vLLM, TGI, SGLang and llama.cpp, and lengths alone."""

from typing import Any

import pytest

from kvctl.engines.base import Api, Form
from kvctl.engines.llamacpp import LlamaCpp
from kvctl.engines.sglang import SGLang
from kvctl.engines.sim import Sim
from kvctl.engines.tgi import TGI
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Reader
from kvctl.tokens.chain import ChainCounter
from tests.proxy.reading import Json, refusal, route, route_of, shape

IDS = route_of(VLLM(), "/inference/v1/generate")
ANY = route_of(VLLM(), "/invocations")
BATCH = route_of(VLLM(), "/v1/chat/completions/batch")
TEXT = route_of(VLLM(), "/v1/completions")
CHAT = route_of(VLLM(), "/v1/chat/completions")
USER: Json = {"role": "user", "content": "hi"}


def reader_of(counter: ChainCounter, engine: Any) -> Reader:
    return Reader(counter, engine, vocab_size=counter.vocab_size, context=lambda: 8192, max_logprobs=20)


# --- vLLM -------------------------------------------------------------------------------------------


async def test_ids_in(tiny_reader: Reader) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": "9", "n": 3}, "priority": -4}
    asked = await shape(tiny_reader, IDS, body)
    assert (asked.prompts, asked.exact) == ((3,), True)
    assert (asked.asked_output, asked.n, asked.priority) == (9, 3, -4)
    free = await shape(tiny_reader, IDS, {"token_ids": [5], "sampling_params": {}})
    assert (free.asked_output, free.default_output, free.n) == (None, None, 1)
    media = {
        "token_ids": [5],
        "sampling_params": {},
        "content_parts": [{"type": "image_url", "image_url": {}}],
    }
    assert not (await shape(tiny_reader, IDS, media)).exact


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"token_ids": []},
        {"token_ids": "x"},
        {"token_ids": [-1]},
        {"token_ids": [10**9]},
        {"token_ids": [5], "sampling_params": {"max_tokens": 0}},
        {"token_ids": [5], "sampling_params": {"max_tokens": 7.5}},
        {"token_ids": [5], "sampling_params": {"n": 0}},
        {"token_ids": [5], "sampling_params": {"n": None}},
    ],
)
async def test_ids_that_the_engine_refuses(tiny_reader: Reader, body: Json) -> None:
    assert (await refusal(tiny_reader, IDS, body))["error"]["code"] == 400


async def test_a_limit_beyond_the_context_is_no_proof_where_the_engine_just_stops(
    tiny_reader: Reader, tiny_counter: ChainCounter
) -> None:
    """Law 4: only an engine that refuses such a limit may be spoken for."""
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 9_000}}
    assert (await shape(tiny_reader, IDS, body)).asked_output == 8192
    assert (await shape(tiny_reader, TEXT, {"prompt": "a", "max_tokens": 9_000})).asked_output == 9_000
    llama = reader_of(tiny_counter, LlamaCpp())
    limits = {"prompt": "a", "messages": [USER], "n_predict": 9_000, "max_tokens": 9_000}
    for path in ("/completion", "/v1/chat/completions"):
        assert (await shape(llama, route_of(LlamaCpp(), path), limits)).asked_output == 8192


async def test_the_place_of_a_nested_limit_is_named(tiny_reader: Reader) -> None:
    answer = await refusal(tiny_reader, IDS, {"token_ids": [5], "sampling_params": {"max_tokens": "x"}})
    assert answer["error"]["param"] == "body.sampling_params.max_tokens"


async def test_logprobs_are_bounded_where_they_are_nested(tiny_counter: ChainCounter) -> None:
    """A22: the whole vocabulary is refused wherever the limit stands."""
    for engine, target, body in (
        (VLLM(), IDS, {"token_ids": [5], "sampling_params": {"prompt_logprobs": -1}}),
        (SGLang(), route_of(SGLang(), "/generate"), {"text": "a", "top_logprobs_num": 5000}),
        (TGI(), route_of(TGI(), "/generate"), {"inputs": "a", "parameters": {"top_n_tokens": 5000}}),
    ):
        answer = await refusal(reader_of(tiny_counter, engine), target, body)
        assert "GPU memory beside the KV cache" in str(answer)


@pytest.mark.parametrize(
    ("body", "default", "output"),
    [
        ({"messages": [USER], "max_tokens": 9}, None, 9),
        ({"prompt": "hi"}, 16, None),
        ({"prompt": "hi", "max_tokens": 9}, 16, 9),
        ({"input": "hi"}, None, 0),
        ({"text_1": "a", "text_2": ["b", "c"]}, None, 0),
    ],
)
async def test_invocations_are_told_by_their_fields(
    tiny_reader: Reader, body: Json, default: int | None, output: int | None
) -> None:
    asked = await shape(tiny_reader, ANY, body)
    assert (asked.route, asked.asked_output, asked.default_output) == ("invocations", output, default)


async def test_invocations_of_two_forms_are_bounded_by_all_of_it(tiny_reader: Reader) -> None:
    """Which one the engine takes depends on what it refuses: neither may shrink the claim."""
    body = {"messages": "bad", "prompt": "p" * 3000, "max_tokens": 900, "n": 2}
    asked = await shape(tiny_reader, ANY, body)
    assert (asked.exact, asked.asked_output, asked.n, asked.default_output) == (False, 900, 2, None)
    assert asked.prompts[0] > 3000


async def test_a_batch_has_no_copies_and_no_empty_conversations(tiny_reader: Reader) -> None:
    for body in ({"messages": [[USER]], "n": 2}, {"messages": [[USER], []]}):
        assert (await refusal(tiny_reader, BATCH, body))["error"]["code"] == 400


async def test_priority_and_prefixes_of_other_routes(tiny_counter: ChainCounter) -> None:
    body = {"prompt": "hi", "priority": "3"}
    assert (await shape(reader_of(tiny_counter, VLLM()), TEXT, body)).priority == 3
    assert (await shape(reader_of(tiny_counter, VLLM()), TEXT, body | {"priority": "x"})).priority == 0
    assert (
        await shape(reader_of(tiny_counter, TGI()), route_of(TGI(), "/v1/completions"), body)
    ).priority == 0


# --- TGI --------------------------------------------------------------------------------------------


async def test_tgi_takes_null_for_the_rest_of_the_context(tiny_counter: ChainCounter) -> None:
    """It is the default of 100 only where the field is not there at all."""
    reader, target = reader_of(tiny_counter, TGI()), route_of(TGI(), "/generate")
    free = await shape(reader, target, {"inputs": "a", "parameters": {"max_new_tokens": None}})
    assert (free.asked_output, free.default_output) == (None, None)
    absent = await shape(reader, target, {"inputs": "a", "parameters": {}})
    assert (absent.asked_output, absent.default_output) == (None, 100)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_tgi(tiny_counter: ChainCounter, path: str) -> None:
    reader, target = reader_of(tiny_counter, TGI()), route_of(TGI(), path)
    plain = await shape(reader, target, {"inputs": "hi there"})
    assert (plain.exact, plain.asked_output, plain.default_output, plain.n) == (True, None, 100, 1)
    assert plain.stream is (path == "/generate_stream")
    assert target.api is Api.TGI
    params = {"max_new_tokens": 40, "best_of": 3, "truncate": 2, "details": True}
    asked = await shape(reader, target, {"inputs": "hi there", "parameters": params})
    assert (asked.prompts, asked.asked_output, asked.n) == ((2,), 40, 3)
    assert (await shape(reader, target, {"inputs": "hi", "stream": True})).stream


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": ""},
        {"inputs": 7},
        {"inputs": "a", "parameters": {"max_new_tokens": 0}},
        {"inputs": "a", "parameters": {"max_new_tokens": -1}},
        {"inputs": "a", "parameters": {"max_new_tokens": 7.5}},
        {"inputs": "a", "parameters": {"max_new_tokens": "many"}},
        {"inputs": "a", "parameters": {"best_of": []}},
    ],
)
async def test_tgi_refuses_in_its_own_form(tiny_counter: ChainCounter, body: Json) -> None:
    answer = await refusal(reader_of(tiny_counter, TGI()), route_of(TGI(), "/generate"), body)
    assert answer["error_type"] == "validation"
    assert answer["error"].startswith("Input validation error: `")


# --- SGLang -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"text": "hi"}, 1),
        ({"text": ["hi", "there", "you"]}, 3),
        ({"input_ids": [5, 6, 7]}, 1),
        ({"input_ids": [[5, 6], [7]]}, 2),
        ({"input_embeds": [[0.1, 0.2], [0.3, 0.4]]}, 1),
        ({"input_embeds": [[[0.1]], [[0.3]]]}, 2),
    ],
)
async def test_sglang_prompts(tiny_counter: ChainCounter, body: Json, prompts: int) -> None:
    asked = await shape(reader_of(tiny_counter, SGLang()), route_of(SGLang(), "/generate"), body)
    assert (len(asked.prompts), asked.exact, asked.default_output) == (prompts, True, 128)


@pytest.mark.parametrize(
    ("params", "output", "default", "n"),
    [
        (None, None, 128, 1),
        ({"max_new_tokens": 40, "n": 3}, 40, 128, 3),
        ({"max_new_tokens": None}, None, None, 1),
        ({"max_new_tokens": 7.5}, 8, 128, 1),
        ({"max_new_tokens": "70"}, 70, 128, 1),
        ({"max_new_tokens": "x"}, None, None, 1),
        ({"max_new_tokens": 0}, 0, 128, 1),
        ([{"max_new_tokens": 40}, {"max_new_tokens": 90, "n": 2}], 90, 128, 2),
        ([{"max_new_tokens": 40}, {}], None, None, 1),
        ("odd", None, 128, 1),
    ],
)
async def test_sglang_limits(
    tiny_counter: ChainCounter, params: Any, output: int | None, default: int | None, n: int
) -> None:
    """A limit that is null or unreadable is none at all, and claims the rest of the context."""
    body = {"text": "hi", "sampling_params": params}
    asked = await shape(reader_of(tiny_counter, SGLang()), route_of(SGLang(), "/generate"), body)
    assert (asked.asked_output, asked.default_output, asked.n) == (output, default, n)


async def test_sglang_media_and_refusals(tiny_counter: ChainCounter) -> None:
    reader, target = reader_of(tiny_counter, SGLang()), route_of(SGLang(), "/generate")
    asked = await shape(reader, target, {"text": "hi", "image_data": ["A" * 90_000, "http://x/y.png"]})
    assert not asked.exact
    assert 2 * 16_384 < asked.prompts[0] < 2 * 16_384 + 50
    await refusal(reader, target, {"text": "hi", "sampling_params": {"max_new_tokens": -1}})
    assert not (await shape(reader, target, {"neither": "x"})).exact


# --- llama.cpp --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts", "exact"),
    [
        ("hi", 1, True),
        ([5, 6, 7], 1, True),
        (["hi", "there"], 2, True),
        ([[5, 6], "there"], 2, True),
        ([5, "there", 6], 1, False),
        ({"prompt_string": "hi", "multimodal_data": ["A" * 9000]}, 1, False),
        ([], 1, False),
        (None, 1, False),
        ({"odd": 1}, 1, False),
    ],
)
async def test_llamacpp_prompts(tiny_counter: ChainCounter, prompt: Any, prompts: int, exact: bool) -> None:
    reader, target = reader_of(tiny_counter, LlamaCpp()), route_of(LlamaCpp(), "/completion")
    asked = await shape(reader, target, {"prompt": prompt})
    assert (len(asked.prompts), asked.exact) == (prompts, exact)
    assert asked.prompts[0] >= 1


@pytest.mark.parametrize(
    ("limits", "output"),
    [
        ({}, None),
        ({"n_predict": 40}, 40),
        ({"n_predict": -1}, None),
        ({"n_predict": "x"}, None),
        ({"n_predict": 40, "max_tokens": 90}, 90),
        ({"max_tokens": 7.5}, 8),
        ({"n_predict": 0}, 0),
    ],
)
async def test_llamacpp_limits(tiny_counter: ChainCounter, limits: Json, output: int | None) -> None:
    """-1 is no limit there, neither on its own route nor in a chat."""
    reader = reader_of(tiny_counter, LlamaCpp())
    asked = await shape(reader, route_of(LlamaCpp(), "/completion"), {"prompt": "hi"} | limits)
    assert asked.asked_output == output
    chat = {"messages": [USER], "max_tokens": -1}
    assert (await shape(reader, route_of(LlamaCpp(), "/v1/chat/completions"), chat)).asked_output is None


async def test_llamacpp_reads_any_content_type_and_fills_in(tiny_counter: ChainCounter) -> None:
    reader = reader_of(tiny_counter, LlamaCpp())
    body = b'{"prompt": "hi", "n_predict": 3}'
    form = "application/x-www-form-urlencoded"
    assert (await shape(reader, route_of(LlamaCpp(), "/completion"), body, form)).asked_output == 3
    infill = {"input_prefix": "a" * 500, "input_suffix": "b", "prompt": ""}
    assert (await shape(reader, route_of(LlamaCpp(), "/infill"), infill)).prompts[0] > 500


# --- lengths alone ----------------------------------------------------------------------------------


async def test_lengths_alone(tiny_counter: ChainCounter) -> None:
    reader, target = reader_of(tiny_counter, Sim()), route_of(Sim(), "/generate")
    asked = await shape(reader, target, {"prompt_tokens": 900, "max_new_tokens": 200})
    assert (asked.prompts, asked.asked_output, asked.exact) == ((900,), 200, True)
    assert (await shape(reader, target, {"prompt_tokens": "900"})).asked_output == 512
    assert (await shape(reader, target, {"prompt_tokens": 9, "max_new_tokens": None})).asked_output == 512
    for body in (
        {},
        {"prompt_tokens": -1},
        {"prompt_tokens": 9, "max_new_tokens": -1},
        {"prompt_tokens": None},
    ):
        await refusal(reader, target, body)


@pytest.mark.parametrize("form", [form for form in Form if form is not Form.AUDIO])
@pytest.mark.parametrize("engine", [VLLM(), TGI(), SGLang(), LlamaCpp()])
async def test_every_form_reads_an_empty_body(tiny_counter: ChainCounter, form: Form, engine: Any) -> None:
    """Whatever is missing is refused or bounded, and never an exception."""
    await reader_of(tiny_counter, engine).read(route(form), {"Content-Type": "application/json"}, b"{}")
