"""The ``prompt`` of /v1/completions in all its forms: text, texts, token ids, lists of token ids, tensors.

Law 4: token ids are counted as they come, exactly. Ids outside the vocabulary can take an engine down, so
they are refused wherever the vocabulary's size is known.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvctl.proxy.limits import BadRequest, malformed


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """What remains to be counted (``texts``) and what is counted already (tokens per prompt).

    ``lists`` are the token ids themselves, where all of them are plain integers.
    """

    texts: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    lists: tuple[list[int], ...] = ()
    embeds: tuple[int, ...] = ()
    doubtful: bool = False  # counted by a bound


_EMPTY = BadRequest(
    message="Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
    param="prompt",
)
_NONE = BadRequest(message="You must pass at least one prompt", param="prompt")


def completion_prompts(
    data: Mapping[str, Any], vocab_size: int | None, embeds_bytes_per_token: int
) -> Prompts | BadRequest:
    """The prompts of a completion body, or the engine's answer to what it refuses for certain."""
    embeds = _embeds(data["prompt_embeds"], embeds_bytes_per_token) if "prompt_embeds" in data else ()
    prompt = data.get("prompt")
    if prompt is None or prompt in ("", []):
        return Prompts(embeds=embeds, doubtful=True) if embeds else (_NONE if prompt == [] else _EMPTY)
    found = _prompt(prompt, vocab_size)
    if isinstance(found, BadRequest):
        return found
    if not (found.texts or embeds):
        return found
    suffix = data.get("suffix")  # for the few models that fill in the middle, it is part of the prompt
    texts = (
        tuple(text + suffix for text in found.texts) if isinstance(suffix, str) and suffix else found.texts
    )
    doubtful = bool(embeds) or texts is not found.texts or found.doubtful
    return Prompts(texts=texts, ids=found.ids, lists=found.lists, embeds=embeds, doubtful=doubtful)


def embedding_inputs(value: Any, vocab_size: int | None) -> Prompts | BadRequest:
    """The prompts in ``input`` of an embedding body: text or ids, alone or in a list."""
    if value in ("", []) or value is None:
        return Prompts(texts=("",)) if value == "" else Prompts(ids=(0,))
    return _prompt(value, vocab_size, "input")


def _prompt(prompt: Any, vocab_size: int | None, field: str = "prompt") -> Prompts | BadRequest:
    if isinstance(prompt, str):
        return Prompts(texts=(prompt,))
    if not isinstance(prompt, list):
        return malformed("string_type", f"body.{field}", "Input should be a valid string", str(prompt)[:200])
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return outside_vocabulary(prompt, vocab_size, field) or Prompts(ids=(len(prompt),), lists=(prompt,))
    if kinds == {str}:
        return Prompts(texts=tuple(prompt))
    if kinds == {list}:
        return _token_lists(prompt, vocab_size, field)
    if kinds <= {int, bool, float, str}:
        return _token_lists([prompt], vocab_size, field)
    return malformed(
        "int_type", f"body.{field}", "Input should be a valid integer", f"<list of {len(prompt)} items>"
    )


def _token_lists(lists: list[list[Any]], vocab_size: int | None, field: str) -> Prompts | BadRequest:
    plain = True
    for ids in lists:
        if set(map(type, ids)) <= {int}:
            if bad := outside_vocabulary(ids, vocab_size, field):
                return bad
        else:
            plain = False  # written in another form, or refused: the engine decides
    return Prompts(ids=tuple(map(len, lists)), lists=tuple(lists) if plain else (), doubtful=not plain)


def outside_vocabulary(ids: list[int], vocab_size: int | None, field: str) -> BadRequest | None:
    """The answer to ids in ``field`` that no row of the embedding stands for."""
    if not ids:
        return None
    least, most = min(ids), max(ids)
    if least < 0:
        return malformed(
            "greater_than_equal",
            f"body.{field}",
            "Input should be greater than or equal to 0",
            str(least),
            {"ge": 0},
        )
    if vocab_size is not None and most >= vocab_size:
        return BadRequest(
            message=(
                f"Token id {most} is out of vocabulary: the model has {vocab_size} tokens. "
                "Nothing was generated. Send ids of this model's own tokenizer."
            ),
            param=field,
        )
    return None


def _embeds(value: Any, bytes_per_token: int) -> tuple[int, ...]:
    """The most tokens of each base64 tensor: bytes over the narrowest row. Garbage is left for the engine."""
    tensors = value if isinstance(value, list) else [value]
    return tuple(
        max(1, -(-len(item) * 3 // 4 // bytes_per_token))
        for item in tensors
        if isinstance(item, str) and item
    )
