"""Prompt-only bodies: embeddings, pooling, classification, scores and ranks. Nothing is generated.

The engine may cut a text that is longer than its context into several prompts (chunked embeddings), so a
long one is no proof of a 400: it claims whole contexts.

A score reads a query with each document, as one prompt (a cross-encoder) or as two; the sum of both, with
``TOKENS_PER_PAIR`` for what a template puts around them, bounds either.
"""

from collections.abc import Mapping
from typing import Any

from kvctl.engines.base import Route
from kvctl.proxy.limits import BadRequest, Fields, malformed, validation_errors
from kvctl.proxy.prompts import Prompts, embedding_inputs
from kvctl.proxy.readers.base import (
    NOTHING,
    Asked,
    Body,
    Counted,
    Facts,
    bounded,
    bounded_by_all,
    model_of,
)
from kvctl.proxy.readers.openai import count_prompts
from kvctl.tokens.base import Count, CountMethod
from kvctl.tokens.media import bound_of_all

TOKENS_PER_PAIR = 96

_INPUTS = ("input", "texts", "text", "input_ids", "content")  # vLLM, Cohere, SGLang, llama.cpp
_PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
_RANK = (("query", "documents"), ("query", "texts"))
_LABELS = (("query", "items"),)


async def read_embed(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """``input`` (text, ids, lists of either) by its name in each API, or ``messages``."""
    del route
    fields = Fields(data)
    truncate = fields.integer("truncate_prompt_tokens", least=-1)
    if fields.wrongs and facts.strict:
        return validation_errors(fields.wrongs)
    asked = Asked(output=0, truncate=truncate)
    if data.get("messages") is not None and data.get("input") is None:
        chat = {"add_generation_prompt": False, **data}
        return asked, _in_contexts(facts, await facts.counter.count_chat(model_of(data), chat, size))
    value = next((data[key] for key in _INPUTS if data.get(key) is not None), None)
    if value is None:
        return _without_input(facts, data)
    prompts = embedding_inputs(value, facts.vocab_size)
    if isinstance(prompts, BadRequest):
        # ids that no row stands for are refused; of other shapes some engines take more than vLLM
        return prompts if _are_ids(value) else (asked, bounded_by_all(facts, data))
    return asked, _in_contexts(facts, await count_prompts(facts, data, prompts))


def _are_ids(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(row, list) for row in value) or all(type(item) is int for item in value)


def _without_input(facts: Facts, data: Body) -> Counted:
    """Cohere's ``inputs`` and ``images``, or the ``data`` of a plugin; else nothing to embed."""
    if any(data.get(key) is not None for key in ("inputs", "images", "data")):
        return NOTHING, bounded_by_all(facts, data)
    return malformed("missing", "body.input", "Field required", f"<dict of {len(data)} items>")


def _in_contexts(facts: Facts, count: Count) -> Count:
    """Prompts longer than the context, split into whole contexts and a rest."""
    context = facts.context()
    if context is None or max(count.prompts, default=0) <= context:
        return count
    cut = [
        piece
        for prompt in count.prompts
        for piece in (*(context,) * (prompt // context), prompt % context)
        if piece
    ]
    return Count(prompts=tuple(cut), method=CountMethod.BOUND, seconds=count.seconds)


async def read_score(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """Two lists of texts (one against each, or pair by pair), or a query whose items are labelled.

    Where several pairs of fields are given the engine takes the first that it can read; the largest is
    claimed.
    """
    del size
    written = [
        names for names in (*_PAIRS, *_LABELS, *_RANK) if all(data.get(name) is not None for name in names)
    ]
    if not written:
        return _incomplete(facts, route, data)
    counts = [await _pairs(facts, data, *(data[name] for name in names)) for names in written]
    labels = any(names in _LABELS for names in written)
    largest = max(counts, key=lambda count: sum(count.prompts))
    return Asked(output=1 if labels else 0, truncate=_cut(data)), largest


async def read_rerank(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """``query`` with each of ``documents``."""
    del size
    for names in _RANK:
        if all(data.get(name) is not None for name in names):
            pairs = await _pairs(facts, data, *(data[name] for name in names))
            return Asked(output=0, truncate=_cut(data)), pairs
    return _incomplete(facts, route, data)


def _cut(data: Body) -> int | None:
    """``truncate_prompt_tokens``; what cannot be read is left for the engine to refuse."""
    fields = Fields(data)
    value = fields.integer("truncate_prompt_tokens", least=-1)
    return None if fields.wrongs else value


def _incomplete(facts: Facts, route: Route, data: Body) -> Counted:
    """A body without the fields of its form: the engine refuses it, or knows other names."""
    del route
    return NOTHING, bounded_by_all(facts, data)


def _items(value: Any) -> list[Any]:
    """One item, or the list of them; ids in a flat list are one item."""
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return [value]
    return value if isinstance(value, list) else [value]


async def _pairs(facts: Facts, data: Body, first: Any, second: Any) -> Count:
    """Each of one side with each of the other, or pair by pair where both have several."""
    left, right = await _lengths(facts, data, _items(first)), await _lengths(facts, data, _items(second))
    around = TOKENS_PER_PAIR + _instruction(facts, data)
    if len(left) == len(right):
        pairs = [a + b for a, b in zip(left, right, strict=True)]
    else:
        pairs = [a + b for a in left for b in right]
    return bounded(*(pair + around for pair in pairs)) if pairs else bounded(around)


def _instruction(facts: Facts, data: Body) -> int:
    said = {key: data[key] for key in ("instruction", "chat_template_kwargs") if data.get(key) is not None}
    return bound_of_all(said, facts.media) if said else 0


async def _lengths(facts: Facts, data: Body, items: list[Any]) -> list[int]:
    """Tokens of each item: a text, ids, or an object with text or content parts."""
    texts = {place: text for place, item in enumerate(items) if (text := _text(item)) is not None}
    lengths = [
        len(item) if isinstance(item, list) else bound_of_all({"": item}, facts.media) for item in items
    ]
    if texts:
        count = await count_prompts(facts, {"model": data.get("model")}, Prompts(texts=tuple(texts.values())))
        for place, tokens in zip(texts, count.prompts, strict=True):
            lengths[place] = tokens
    return lengths


def _text(item: Any) -> str | None:
    if isinstance(item, str):
        return item
    text = item.get("text") if isinstance(item, Mapping) and set(item) == {"text"} else None
    return text if isinstance(text, str) else None
