"""Prompt-only bodies: what is counted, what is bounded, and that nothing is generated."""

from typing import Any

import pytest

from kvctl.engines.base import Form
from kvctl.engines.llamacpp import LlamaCpp
from kvctl.engines.sglang import SGLang
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Reader
from kvctl.proxy.readers.pooling import TOKENS_PER_PAIR
from kvctl.tokens.chain import ChainCounter
from tests.proxy.reading import Json, refusal, route, route_of, shape

EMBED = route_of(VLLM(), "/v1/embeddings")
SCORE = route_of(VLLM(), "/score")
LABEL = route_of(VLLM(), "/generative_scoring")
RANK = route_of(VLLM(), "/v2/rerank")
TEXT = route_of(VLLM(), "/v1/completions")


@pytest.mark.parametrize(
    ("value", "lengths"),
    [("a", None), (["a", "a a"], None), ([5, 6, 7], (3,)), ([[5, 6], [7]], (2, 1)), ([], (0,))],
)
async def test_inputs_are_counted_as_prompts(
    tiny_reader: Reader, value: Any, lengths: tuple[int, ...] | None
) -> None:
    asked = await shape(tiny_reader, EMBED, {"model": "m", "input": value})
    if lengths is None:
        lengths = (await shape(tiny_reader, TEXT, {"prompt": value})).prompts
    assert (asked.prompts, asked.exact, asked.asked_output, asked.n) == (lengths, True, 0, 1)


async def test_other_names_of_the_input(tiny_counter: ChainCounter) -> None:
    """Cohere's texts, SGLang's text and ids, llama.cpp's content; messages as a chat that nobody answers."""
    vllm, sglang = Reader(tiny_counter, VLLM()), Reader(tiny_counter, SGLang())
    (one,) = (await shape(vllm, EMBED, {"input": "hi"})).prompts
    assert (await shape(vllm, route_of(VLLM(), "/v2/embed"), {"texts": ["hi", "hi"]})).prompts == (one, one)
    assert (await shape(sglang, route_of(SGLang(), "/encode"), {"text": "hi"})).prompts == (one,)
    llama = Reader(tiny_counter, LlamaCpp())
    assert (await shape(llama, route_of(LlamaCpp(), "/embedding"), {"content": "hi"})).prompts == (one,)
    user = {"role": "user", "content": "hi"}
    chat = await shape(vllm, route_of(VLLM(), "/v1/chat/completions"), {"messages": [user]})
    asked = await shape(vllm, EMBED, {"messages": [user]})
    assert asked.exact
    assert asked.prompts <= chat.prompts
    plugin = await shape(vllm, route_of(VLLM(), "/pooling"), {"data": {"image": "x" * 500}})
    assert not plugin.exact


async def test_truncation_and_refusals(tiny_reader: Reader) -> None:
    body = {"input": [5] * 40, "truncate_prompt_tokens": 3}
    assert (await shape(tiny_reader, EMBED, body)).prompts == (3,)
    assert (await refusal(tiny_reader, EMBED, body | {"truncate_prompt_tokens": -2}))["error"]["code"] == 400
    assert (await refusal(tiny_reader, EMBED, {}))["error"]["param"] == "body.input"


@pytest.mark.parametrize("value", [[[-3]], [10**9], 7, {"x": 1}, ["a", 5]])
async def test_odd_inputs_are_the_engines_to_refuse(tiny_reader: Reader, value: Any) -> None:
    """A20: ids that no row stands for do not reach the device; other shapes are bounded and forwarded."""
    if value in ([[-3]], [10**9]):
        await refusal(tiny_reader, EMBED, {"input": value})
    else:
        assert not (await shape(tiny_reader, EMBED, {"input": value})).exact


async def test_a_text_longer_than_the_context_is_no_proof(tiny_reader: Reader) -> None:
    """The engine may cut it into several prompts: it claims whole contexts, and no 400 is proven."""
    asked = await shape(tiny_reader, EMBED, {"input": [5] * 20_000})
    assert (asked.prompts, asked.exact) == ((8192, 8192, 3616), False)


@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        ({"text_1": "a", "text_2": "b"}, 1),
        ({"text_1": "a", "text_2": ["b", "c", "d"]}, 3),
        ({"text_1": ["a", "a"], "text_2": ["b", "c"]}, 2),
        ({"queries": "a", "documents": ["b", {"text": "c"}]}, 2),
        ({"queries": "a", "items": [{"content": [{"type": "text", "text": "c"}]}]}, 1),
        ({"data_1": [5, 6, 7], "data_2": [[5, 6], [7]]}, 2),
    ],
)
async def test_scores_are_pairs(tiny_reader: Reader, body: Json, pairs: int) -> None:
    asked = await shape(tiny_reader, SCORE, body)
    assert (len(asked.prompts), asked.asked_output, asked.exact) == (pairs, 0, False)
    assert min(asked.prompts) > TOKENS_PER_PAIR


async def test_a_pair_is_both_texts_and_what_is_put_around_them(tiny_reader: Reader) -> None:
    one = (await shape(tiny_reader, EMBED, {"input": "a long query"})).prompts[0]
    two = (await shape(tiny_reader, EMBED, {"input": "and a document"})).prompts[0]
    body = {"query": "a long query", "documents": ["and a document"]}
    assert (await shape(tiny_reader, RANK, body)).prompts == (one + two + TOKENS_PER_PAIR,)
    longer = await shape(tiny_reader, RANK, body | {"instruction": "w" * 400})
    assert longer.prompts[0] > one + two + TOKENS_PER_PAIR + 400
    cut = await shape(tiny_reader, RANK, body | {"truncate_prompt_tokens": 4})
    assert cut.prompts == (4,)


async def test_labels_are_one_token_of_output(tiny_reader: Reader) -> None:
    asked = await shape(tiny_reader, LABEL, {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]})
    assert (len(asked.prompts), asked.asked_output) == (2, 1)


@pytest.mark.parametrize("form", [Form.SCORE, Form.RERANK])
@pytest.mark.parametrize("body", [{}, {"query": "a"}, {"documents": []}, {"query": "a", "documents": []}])
async def test_halves_are_the_engines_to_refuse(tiny_reader: Reader, form: Form, body: Json) -> None:
    asked = await shape(tiny_reader, route(form), body)
    assert (asked.exact, asked.asked_output) == (False, 0)


@pytest.mark.parametrize("more", [{"queries": 7.5, "documents": True}, {"queries": "a", "items": "b"}])
async def test_a_pair_that_cannot_be_read_does_not_hide_another(tiny_reader: Reader, more: Json) -> None:
    """The engine takes the first pair of fields that is valid."""
    body = {"text_1": "word " * 300, "text_2": ["c", "d"]}
    alone = await shape(tiny_reader, SCORE, body)
    beside = await shape(tiny_reader, SCORE, body | more)
    assert beside.prompts == alone.prompts
