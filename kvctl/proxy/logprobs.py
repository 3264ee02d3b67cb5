"""Log-probabilities that a request asks for: GPU memory that no KV budget covers.

For each token the engine then holds a row as long as the vocabulary, outside the KV pool; for those of a
prompt (``prompt_logprobs``), one for every token of a prefill chunk at once. -1 asks for the whole
vocabulary. The budget cannot weigh that, so it has a bound of its own.
"""

from collections.abc import Mapping
from typing import Any

from kvctl.proxy.limits import BadRequest, Fields

_FIELDS = (
    *("prompt_logprobs", "top_logprobs", "logprobs"),
    *("top_logprobs_num", "top_n_tokens"),  # SGLang's and TGI's
)
_NESTED = ("sampling_params", "parameters")  # objects, or lists of them
_LOOKED_AT = frozenset((*_FIELDS, *_NESTED))
_WHOLE_VOCABULARY = -1


def too_many_logprobs(data: Mapping[str, Any], most: int | None) -> BadRequest | None:
    """The answer to a body that asks for more than ``most`` per token (None: any number), else None.

    A number that the engine's validation refuses is left to the engine, as is chat's switch ``logprobs``.
    """
    if most is None or _LOOKED_AT.isdisjoint(data):
        return None
    nested = [data[key] for key in _NESTED if key in data]
    for place in (data, *nested) if nested else (data,):
        for options in place if isinstance(place, list) else (place,):
            if isinstance(options, dict) and (bad := _beyond(options, most)):
                return bad
    return None


def _beyond(options: Mapping[str, Any], most: int) -> BadRequest | None:
    for name in _FIELDS:
        if options.get(name) is None or isinstance(options[name], bool):
            continue
        asked = Fields(options).integer(name)
        if asked is not None and (asked > most or asked == _WHOLE_VOCABULARY):
            return _refused(name, asked, most)
    return None


def _refused(name: str, asked: int, most: int) -> BadRequest:
    what = "the whole vocabulary" if asked == _WHOLE_VOCABULARY else f"{asked} log-probabilities"
    message = (
        f"{name}={asked} asks for {what} a token; at most {most} are allowed here (max_logprobs), as they "
        "take GPU memory beside the KV cache. Nothing was generated."
    )
    return BadRequest(message=f"{message} (parameter={name}, value={asked})", param=name)
