"""Bodies of requests -> what the scheduler runs, with the refusals of vLLM 0.32 in its own words.

The true length of an answer, which a gate in front must not read, comes from the first of:

* ``sim_output_tokens``: an extension of this engine, one number, or one per sequence;
* ``min_tokens: k-1`` beside ``logit_bias``: how a real engine is made to answer with k tokens;
* ``ignore_eos``: the answer runs to its cap;
* else a seeded draw, never below ``min_tokens``.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvctl.sim import lengths, text
from kvctl.sim.scheduler import EngineConfig

MOST_SEQUENCES = 16384
COMPLETION_DEFAULT = 16
"""Output tokens of /v1/completions when no limit is sent."""
PLAIN_DEFAULT = 512
"""The same of /generate."""


class RefusedError(Exception):
    """The engine's answer to a request that it will not run: status and JSON body."""

    def __init__(self, status: int, message: str, kind: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request that runs: ``true_outputs`` has one length for each of (prompts x n) sequences."""

    chat: bool
    prompts: tuple[int, ...]
    n: int
    max_outputs: tuple[int, ...]  # one per prompt
    true_outputs: tuple[int, ...]
    scoring: bool  # max_tokens 0: the prompt is computed, no token is answered
    stream: bool
    include_usage: bool
    hashes: tuple[tuple[int, ...], ...] = ()  # of the full blocks of each prompt; (): no prefix caching


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises RefusedError as the engine's own parser words it."""
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        place = f"body.{error.pos}"
        detail = {
            "type": "json_invalid",
            "loc": place,
            "msg": "JSON decode error",
            "ctx": {"error": error.msg},
        }
        raise _invalid(detail, place) from None
    except UnicodeDecodeError as error:
        raise _bad_request(f"There was an error parsing the body: {error}", None) from None
    if not isinstance(body, dict):
        raise _invalid(
            {"type": "model_attributes_type", "loc": "body", "msg": "Input should be an object"}, "body"
        )
    return body


def check_model(body: Mapping[str, Any], served: str) -> None:
    """Raises RefusedError (404) if the request names another model."""
    wanted = body.get("model")
    if wanted not in (None, "", served):
        message = f"The model `{wanted}` does not exist. Valid aliases: {served}."
        raise RefusedError(404, message, "NotFoundError", "model")


def integer(body: Mapping[str, Any], name: str) -> int | None:
    """A field as pydantic's lax mode reads an integer: "7", 7.0 and true are numbers, 7.5 is refused."""
    value = body.get(name)
    if value is None or isinstance(value, int):
        return None if value is None else int(value)
    try:
        number = int(value.strip().replace("_", "")) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise _not_an_integer(name, value) from None
    if number != number or number in (float("inf"), float("-inf")) or number != int(number):  # noqa: PLR0124 - NaN
        raise _not_an_integer(name, value)
    return int(number)


class Reader:
    """Reads generation requests for one engine. ``seed`` decides the lengths that no request says."""

    def __init__(self, config: EngineConfig, model: str, seed: int) -> None:
        self._config = config
        self._model = model
        self._random = random.Random(seed)  # noqa: S311 - a reproducible load, not a secret

    def read(self, body: Mapping[str, Any], *, chat: bool) -> Generation:
        """What to run. Raises RefusedError."""
        check_model(body, self._model)
        prompts = chat_prompts(body) if chat else completion_prompts(body)
        asked = self._asked(body, chat=chat)
        n = 1 if (given := integer(body, "n")) is None else given
        if not 1 <= n <= MOST_SEQUENCES:
            raise _bad_request(f"n must be between 1 and {MOST_SEQUENCES}, got {n}.", "n")
        max_outputs = tuple(self._max_output(prompt, asked) for prompt in prompts)
        return Generation(
            chat=chat,
            prompts=prompts,
            n=n,
            max_outputs=max_outputs,
            true_outputs=self._true_outputs(body, [cap for cap in max_outputs for _ in range(n)]),
            scoring=asked == 0,
            stream=bool(body.get("stream")),
            include_usage=_include_usage(body),
            hashes=self._hashes(body, chat=chat) if self._config.prefix_caching else (),
        )

    def _hashes(self, body: Mapping[str, Any], *, chat: bool) -> tuple[tuple[int, ...], ...]:
        size, salt = self._config.block_size, str(body.get("cache_salt") or "")
        prompts = [text.render_chat(body)] if chat else completion_ids(body)
        return tuple(text.block_hashes(ids, size, salt) for ids in prompts)

    def read_lengths(self, body: Mapping[str, Any]) -> Generation:
        """What to run of ``prompt_tokens`` and ``max_new_tokens``: one sequence. Raises RefusedError."""
        prompt, asked = integer(body, "prompt_tokens"), integer(body, "max_new_tokens")
        if prompt is None or prompt < 0 or (asked is not None and asked < 0):
            raise _bad_request("prompt_tokens and max_new_tokens must be whole numbers from 0 on", None)
        caps = [self._max_output(prompt, PLAIN_DEFAULT if asked is None else asked)]
        return Generation(
            chat=False,
            prompts=(prompt,),
            n=1,
            max_outputs=tuple(caps),
            true_outputs=self._true_outputs(body, caps),
            scoring=asked == 0,
            stream=bool(body.get("stream")),
            include_usage=_include_usage(body),
        )

    def _asked(self, body: Mapping[str, Any], *, chat: bool) -> int | None:
        """The caller's limit or the route's default; None: what is left of the context."""
        name = (
            "max_completion_tokens"
            if chat and body.get("max_completion_tokens") is not None
            else "max_tokens"
        )
        asked, context = integer(body, name), self._config.max_model_len
        if asked is None:
            return None if chat else COMPLETION_DEFAULT
        if asked < 0:
            raise _bad_request(
                f"{name} must be at least 1, got {asked}. (parameter={name}, value={asked})", name
            )
        if asked > context:
            raise _bad_request(
                f"{name}={asked} cannot be greater than max_model_len={context}. Please request fewer output"
                f" tokens. (parameter={name}, value={asked})",
                name,
            )
        return asked

    def _max_output(self, prompt: int, asked: int | None) -> int:
        """As vLLM 0.32: prompt + asked is shortened to the context, a prompt that fills it is refused."""
        context = self._config.max_model_len
        if prompt >= context:
            raise _bad_request(
                f"This model's maximum context length is {context} tokens. However, your request has {prompt}"
                " input tokens. Please reduce the length of the input messages."
                f" (parameter=input_tokens, value={prompt})",
                "input_tokens",
            )
        return max(1, context - prompt if asked is None else min(asked, context - prompt))

    def _true_outputs(self, body: Mapping[str, Any], caps: list[int]) -> tuple[int, ...]:
        told = body.get("sim_output_tokens")
        if told is not None:
            each = told if isinstance(told, list) and told else [told]
            lengths_told = [integer({"sim_output_tokens": one}, "sim_output_tokens") or 1 for one in each]
            return tuple(max(1, lengths_told[i % len(each)]) for i in range(len(caps)))
        least = integer(body, "min_tokens") or 0
        if least and body.get("logit_bias"):
            return (least + 1,) * len(caps)
        if body.get("ignore_eos"):
            return tuple(cap + 1 for cap in caps)
        return tuple(max(least, lengths.ANSWERS.draw(self._random)) for _ in caps)


def chat_prompts(body: Mapping[str, Any]) -> tuple[int, ...]:
    """Prompt tokens of a chat request. Raises RefusedError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        detail = {"type": "missing", "loc": "body.messages", "msg": "Field required"}
        raise _invalid(detail, "body.messages")
    try:
        return (text.count_chat(body),)
    except ValueError as error:
        raise _bad_request(str(error), "messages") from None


def completion_prompts(body: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens of each prompt: text, token ids, or a list of either. Raises RefusedError."""
    extra = 1 if body.get("add_special_tokens", True) else 0
    counts = [_prompt_tokens(one, extra) for one in _each_prompt(body)]
    if not all(counts):
        raise _bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    return tuple(counts)


def completion_ids(body: Mapping[str, Any]) -> list[list[int]]:
    """Token ids of each prompt of a body that ``completion_prompts`` took."""
    special = [text.BOS] if body.get("add_special_tokens", True) else []
    return [[*special, *text.encode(one)] if isinstance(one, str) else one for one in _each_prompt(body)]


def _each_prompt(body: Mapping[str, Any]) -> list[Any]:
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]


def _prompt_tokens(prompt: object, extra: int) -> int:
    """Tokens of one prompt; 0 if there is none."""
    if isinstance(prompt, str):
        return text.count(prompt) + extra if prompt else 0
    return len(prompt) if isinstance(prompt, list) else 0


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        detail = {
            "type": "model_attributes_type",
            "loc": "body.stream_options",
            "msg": "Input should be an object",
        }
        raise _invalid(detail, "body.stream_options")
    return bool((options or {}).get("include_usage"))


def _bad_request(message: str, param: str | None) -> RefusedError:
    return RefusedError(400, message, "BadRequestError", param)


def _invalid(detail: Mapping[str, Any], place: str) -> RefusedError:
    return RefusedError(400, f"1 validation error:\n  {dict(detail)}", "Bad Request", place)


def _not_an_integer(name: str, value: object) -> RefusedError:
    place = f"body.{name}"
    kind = "int_from_float" if isinstance(value, float) else "int_parsing"
    says = "Input should be a valid integer" + (
        ", got a number with a fractional part" if kind[4] == "f" else ""
    )
    return _invalid({"type": kind, "loc": place, "msg": says, "input": str(value)}, place)
