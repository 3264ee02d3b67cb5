"""The ``/generate`` and ``/completion`` bodies of TGI, SGLang, llama.cpp, and lengths alone.

Their servers read limits less strictly than vLLM, or refuse other things: a limit that is not a plain number
claims as if none was sent, and the engine judges it.
"""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from kvctl.engines.base import Route
from kvctl.proxy.limits import LARGEST, BadRequest, Fields, malformed, validation_errors
from kvctl.proxy.prompts import Prompts
from kvctl.proxy.readers.base import Asked, Body, Counted, Facts, bounded, bounded_by_all, model_of, together
from kvctl.proxy.readers.openai import count_prompts
from kvctl.tokens.base import Count, CountMethod

PLAIN_OUTPUT = 512
"""Output tokens of a plain body that names no limit."""


def ceiling(value: Any) -> int | None:
    """The largest number that a lenient parser may read in ``value``; None: no number at all."""
    if isinstance(value, str):
        value = Fields({"value": value}).integer("value")
    if isinstance(value, float):
        return math.ceil(min(value, float(LARGEST))) if math.isfinite(value) else None
    return min(int(value), LARGEST) if isinstance(value, int) else None


# --- text-generation-inference ----------------------------------------------------------------------


async def read_tgi(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """``inputs``; ``parameters``: max_new_tokens, best_of, truncate."""
    del route, size
    inputs, given = data.get("inputs"), data.get("parameters")
    if not isinstance(inputs, str) or not inputs:
        return _tgi_refuses("`inputs` cannot be empty" if inputs == "" else "`inputs` must be a string")
    params: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    asked = _tgi_limits(params)
    if isinstance(asked, BadRequest):
        return asked
    return asked, await facts.counter.count_text(model_of(data), (inputs,), add_special_tokens=True)


def _tgi_limits(params: Mapping[str, Any]) -> Asked | BadRequest:
    """An explicit null limit means the rest of the context; without the field the default applies."""
    values = {key: params.get(key) for key in ("max_new_tokens", "best_of", "truncate")}
    for key, value in values.items():
        if value is not None and ceiling(value) is None:
            return _tgi_refuses(f"`{key}` must be a whole number")
        if isinstance(value, float) and not value.is_integer():
            return _tgi_refuses(f"`{key}` must be a whole number, got {value}")
        if value is not None and (ceiling(value) or 0) < 1:
            return _tgi_refuses(f"`{key}` must be strictly positive")
    numbers = {key: ceiling(value) for key, value in values.items()}
    return Asked(
        output=numbers["max_new_tokens"],
        n=numbers["best_of"] or 1,
        truncate=numbers["truncate"],
        unlimited="max_new_tokens" in params and params["max_new_tokens"] is None,
    )


def _tgi_refuses(words: str) -> BadRequest:
    return BadRequest(message=f"Input validation error: {words}", status=422, type="validation")


# --- SGLang -----------------------------------------------------------------------------------------


async def read_sglang(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """``text``, ``input_ids`` or ``input_embeds``, alone or in a list; ``sampling_params``, alone or each."""
    del route, size
    asked = _sglang_limits(data.get("sampling_params"))
    if isinstance(asked, BadRequest):
        return asked
    texts, ids = _sglang_prompts(data)
    if not texts and not ids:
        return asked, bounded_by_all(facts, data)
    media = sum(facts.media.of_items(data.get(f"{kind}_data"), kind) for kind in ("image", "audio", "video"))
    count = await count_prompts(facts, {"model": data.get("model")}, Prompts(texts=texts, ids=ids))
    if not media:
        return asked, count
    each = tuple(prompt + media for prompt in count.prompts)
    return asked, Count(prompts=each, method=CountMethod.BOUND, seconds=count.seconds)


def _sglang_prompts(data: Body) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Texts to be counted, and the lengths of prompts that are ids or rows already."""
    text = data.get("text")
    several = text if isinstance(text, list) and _is_list_of(text, str) else []
    texts = (text,) if isinstance(text, str) else tuple(several)
    lengths: list[int] = []
    ids, embeds = data.get("input_ids"), data.get("input_embeds")
    if isinstance(ids, list) and ids:
        lengths += [len(row) for row in ids] if _is_list_of(ids, list) else [len(ids)]
    if isinstance(embeds, list) and _is_list_of(embeds, list):
        nested = all(_is_list_of(rows, list) for rows in embeds)
        lengths += [len(rows) for rows in embeds] if nested else [len(embeds)]
    return texts, tuple(lengths)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


def _sglang_limits(params: Any) -> Asked | BadRequest:
    """An explicit null limit means none; without the field the engine's default applies."""
    each = params if isinstance(params, list) else [params]
    sets: list[Mapping[str, Any]] = [item if isinstance(item, Mapping) else {} for item in each] or [{}]
    given = [item["max_new_tokens"] for item in sets if "max_new_tokens" in item]
    outputs = [ceiling(value) for value in given]
    negative = min((output for output in outputs if output is not None), default=0)
    if negative < 0:
        return BadRequest(message=f"max_new_tokens must be at least 0, got {negative}.")
    n = max((ceiling(item.get("n")) or 1 for item in sets), default=1)
    known = [output for output in outputs if output is not None]
    return Asked(
        output=max(known) if known and len(known) == len(sets) else None,
        n=max(n, 1),
        unlimited=None in outputs or (bool(known) and len(known) < len(sets)),
    )


# --- llama.cpp --------------------------------------------------------------------------------------


async def read_llamacpp(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """``prompt`` (text, ids, both mixed, or a list of such); ``n_predict``: below 0 means no limit."""
    del route, size
    asked = _llamacpp_limits(data)
    prompt = data.get("prompt")
    if isinstance(prompt, list) and not any(type(item) in (int, float) for item in prompt):
        given = prompt  # several prompts
    else:
        given = [prompt]
    extra = [data[key] for key in ("input_prefix", "input_suffix", "input_extra") if data.get(key)]
    counts = await asyncio.gather(*(_llamacpp_prompt(facts, data, item) for item in given))
    if not counts:
        return asked, bounded_by_all(facts, data)
    if not extra:
        return asked, together(counts)
    around = bounded_by_all(facts, {"extra": extra}).prompts[0]
    return asked, bounded(*(prompt + around for count in counts for prompt in count.prompts))


def _llamacpp_limits(data: Body) -> Asked:
    names = ("n_predict", "max_tokens", "max_completion_tokens")
    given = [ceiling(data[name]) for name in names if data.get(name) is not None]
    unlimited = any(output is None or output < 0 for output in given)
    n = max(ceiling(data.get(name)) or 1 for name in ("n", "n_cmpl"))
    largest = max((output for output in given if output is not None), default=0)
    return Asked(output=None if unlimited or not given else largest, n=max(n, 1), unlimited=unlimited)


async def _llamacpp_prompt(facts: Facts, data: Body, prompt: Any) -> Count:
    model = model_of(data)
    if isinstance(prompt, str):
        return await facts.counter.count_text(model, (prompt,), add_special_tokens=True)
    if isinstance(prompt, list):
        texts = [item for item in prompt if isinstance(item, str)]
        if not texts:
            return Count(prompts=(len(prompt),), method=CountMethod.LOCAL)
        parts = await facts.counter.count_text(model, texts, add_special_tokens=True)
        return bounded(sum(parts.prompts) + len(prompt) - len(texts))
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt_string"), str):
        text = await facts.counter.count_text(model, (prompt["prompt_string"],), add_special_tokens=True)
        return bounded(text.prompts[0] + facts.media.of_items(prompt.get("multimodal_data"), "image"))
    return bounded_by_all(facts, {"prompt": prompt})


# --- lengths alone ----------------------------------------------------------------------------------


async def read_plain(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """``prompt_tokens`` and ``max_new_tokens``: nothing is to be counted."""
    del facts, route, size
    fields = Fields(data)
    prompt = fields.integer("prompt_tokens", nullable=False, least=0)
    output = fields.integer("max_new_tokens", least=0)
    if "prompt_tokens" not in data:
        return malformed("missing", "body.prompt_tokens", "Field required", f"<dict of {len(data)} items>")
    if fields.wrongs or prompt is None:
        return validation_errors(fields.wrongs)
    output = PLAIN_OUTPUT if output is None else output
    return Asked(output=output), Count(prompts=(prompt,), method=CountMethod.LOCAL)
