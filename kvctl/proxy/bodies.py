"""Bodies of metered routes -> what they ask of the engine (``core.claim.Shape``).

Law 4: a 400 needs proof. What the engine refuses for certain is refused here in its own words; what merely
looks odd is counted by an upper bound and left to the engine. Nothing malformed may ever shrink a claim.
Law 5: bytes pass unchanged. The body is read here, never written: the original bytes are forwarded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvctl.core.claim import Shape
from kvctl.engines.base import Engine, Form, Route
from kvctl.proxy.jsonbody import read_object
from kvctl.proxy.limits import (
    BadRequest,
    Fields,
    malformed,
    too_few_sequences,
    too_small,
    validation_errors,
)
from kvctl.proxy.logprobs import too_many_logprobs
from kvctl.proxy.prompts import Prompts, completion_prompts
from kvctl.tokens.base import Count, Counter, CountMethod
from kvctl.tokens.bound import TOKENS_PER_REQUEST, json_bound

_WRONG_TYPE = BadRequest(
    message="1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
    type="Bad Request",
)
# Where the routes that have no reader of their own keep their limits. The largest of those found counts.
_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_length")
_NESTED = ("parameters", "sampling_params", "generation_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A body that was understood: what it asks for, and how that was counted."""

    shape: Shape
    stream: bool
    count_method: CountMethod
    count_seconds: float
    include_usage: bool


@dataclass(frozen=True, slots=True)
class _Asked:
    """The limits in a body. ``truncate``: the engine cuts prompts to so many tokens; -1: to its context."""

    output: int | None
    n: int
    truncate: int | None = None


_Counted = tuple[_Asked, Count] | BadRequest
_Read = Callable[["Reader", Mapping[str, Any], int], Awaitable[_Counted]]


class Reader:
    """Reads the bodies of metered routes.

    ``context`` tells the engine's context length where it is known by now, for prompts that the engine is
    asked to cut to it. ``embeds_bytes_per_token``: the narrowest row of a ``prompt_embeds`` tensor.
    ``max_logprobs``: most log-probabilities a token that may be asked for; None: any number.
    """

    def __init__(
        self,
        counter: Counter,
        engine: Engine,
        *,
        vocab_size: int | None = None,
        context: Callable[[], int | None] = lambda: None,
        embeds_bytes_per_token: int = 512,
        max_logprobs: int | None = None,
    ) -> None:
        self._counter = counter
        self._engine = engine
        self._vocab_size = vocab_size
        self._context = context
        self._embeds_bytes_per_token = embeds_bytes_per_token
        self._max_logprobs = max_logprobs

    async def read(self, route: Route, headers: Mapping[str, str], body: bytes) -> Parsed | BadRequest:
        """What ``body`` asks for on ``route``, or the engine's answer to what it refuses. Never raises."""
        if not _is_json(headers):
            return _WRONG_TYPE
        data = read_object(body)
        if isinstance(data, BadRequest):
            return data
        if bad := too_many_logprobs(data, self._max_logprobs):
            return bad
        read = await _READERS.get(route.form, Reader._any)(self, data, len(body))
        if isinstance(read, BadRequest):
            return read
        asked, count = read
        return self._parsed(route, data, asked, count)

    def _parsed(self, route: Route, data: Mapping[str, Any], asked: _Asked, count: Count) -> Parsed:
        prompts, exact = self._truncated(count.prompts, asked.truncate)
        fields = Fields(data)
        stream = fields.flag("stream")
        options = data.get("stream_options")
        shape = Shape(
            route=route.name,
            model=_model(data),
            prompts=prompts or (0,),
            n=asked.n,
            asked_output=asked.output,
            default_output=self._engine.default_output(route),
            stream=stream,
            exact=exact and count.exact,
        )
        return Parsed(
            shape=shape,
            stream=stream,
            count_method=count.method,
            count_seconds=count.seconds,
            include_usage=isinstance(options, dict) and Fields(options).flag("include_usage"),
        )

    def _truncated(self, prompts: tuple[int, ...], truncate: int | None) -> tuple[tuple[int, ...], bool]:
        """Prompts as the engine cuts them, and whether that is certain."""
        if truncate is None:
            return prompts, True
        if truncate >= 0:
            return tuple(min(prompt, truncate) for prompt in prompts), True
        context = self._context()
        return tuple(min(prompt, context or prompt) for prompt in prompts), False

    # --- one reader per kind of body ---------------------------------------------------------------

    async def _chat(self, data: Mapping[str, Any], body_bytes: int) -> _Counted:
        asked = _chat_limits(data)
        if isinstance(asked, BadRequest):
            return asked
        given = _given_ids(data)
        if bad := _no_messages(data, ids_given=given > 0):
            return bad
        count = await self._counter.count_chat(_model(data), data, body_bytes)
        if given:
            longest = max(*count.prompts, given)
            count = Count(prompts=(longest,), method=CountMethod.BOUND, seconds=count.seconds)
        return asked, count

    async def _chat_batch(self, data: Mapping[str, Any], body_bytes: int) -> _Counted:
        asked = _chat_limits(data)
        if isinstance(asked, BadRequest):
            return asked
        if bad := _no_messages(data, ids_given=False):
            return bad
        model, chats = _model(data), data["messages"]
        each = max(1, body_bytes // len(chats))
        counts = await asyncio.gather(
            *(self._counter.count_chat(model, {**data, "messages": chat}, each) for chat in chats)
        )
        return asked, _together(counts)

    async def _completion(self, data: Mapping[str, Any], body_bytes: int) -> _Counted:
        del body_bytes
        asked = _completion_limits(data)
        if isinstance(asked, BadRequest):
            return asked
        prompts = completion_prompts(data, self._vocab_size, self._embeds_bytes_per_token)
        if isinstance(prompts, BadRequest):
            return prompts
        return asked, await self._count_prompts(data, prompts)

    async def _count_prompts(self, data: Mapping[str, Any], prompts: Prompts) -> Count:
        known = Count(
            prompts=prompts.embeds + prompts.ids,
            method=CountMethod.BOUND if prompts.doubtful else CountMethod.LOCAL,
        )
        if not prompts.texts:
            return known
        specials = Fields(data).flag("add_special_tokens", default=True)
        texts = await self._counter.count_text(_model(data), prompts.texts, add_special_tokens=specials)
        return _together((known, texts)) if known.prompts or prompts.doubtful else texts

    async def _any(self, data: Mapping[str, Any], body_bytes: int) -> _Counted:
        """Any other route: all that is written counts as prompt, and the largest limit found wins."""
        del body_bytes
        places = [data, *(value for key in _NESTED if isinstance(value := data.get(key), dict))]
        outputs = [v for p in places for key in _OUTPUT_LIMITS if (v := Fields(p).integer(key)) is not None]
        copies = [v for p in places for key in ("n", "best_of") if (v := Fields(p).integer(key)) is not None]
        largest = max(outputs, default=0)
        asked = _Asked(largest if largest > 0 else None, max(1, *copies, 1))
        bound = json_bound(data) + TOKENS_PER_REQUEST
        return asked, Count(prompts=(bound,), method=CountMethod.BOUND)


_READERS: dict[Form, _Read] = {
    Form.CHAT: Reader._chat,  # noqa: SLF001 - the class's own table
    Form.CHAT_BATCH: Reader._chat_batch,  # noqa: SLF001
    Form.COMPLETION: Reader._completion,  # noqa: SLF001
}


def _is_json(headers: Mapping[str, str]) -> bool:
    """The engine refuses every other content type."""
    sent = headers.get("Content-Type") or headers.get("content-type") or ""
    return sent.lower().split(";", maxsplit=1)[0] == "application/json"


def _model(data: Mapping[str, Any]) -> str:
    model = data.get("model")
    return model if isinstance(model, str) else ""


def _together(counts: Sequence[Count]) -> Count:
    """All prompts of several counts: as doubtful as the most doubtful of them."""
    methods = [count.method for count in counts]
    order = (CountMethod.BOUND, CountMethod.ENGINE, CountMethod.LOCAL)
    return Count(
        prompts=tuple(prompt for count in counts for prompt in count.prompts),
        method=next(method for method in order if method in methods),
        seconds=sum(count.seconds for count in counts),
    )


# --- limits -----------------------------------------------------------------------------------------


def _chat_limits(data: Mapping[str, Any]) -> _Asked | BadRequest:
    fields = Fields(data)
    newer, older = fields.integer("max_completion_tokens"), fields.integer("max_tokens")
    n, truncate = fields.integer("n"), fields.integer("truncate_prompt_tokens", least=-1)
    output = older if newer is None else newer
    return _checked(fields, output, 1 if n is None else n, truncate, least_output=1)


def _completion_limits(data: Mapping[str, Any]) -> _Asked | BadRequest:
    fields = Fields(data)
    output, truncate = fields.integer("max_tokens"), fields.integer("truncate_prompt_tokens", least=-1)
    n = fields.integer("n", nullable=False)
    # vLLM 0.32 ignores best_of; where it is honoured it sets the number of sequences.
    best_of = Fields(data).integer("best_of")
    scoring = fields.flag("echo") and output == 0  # legal: nothing is generated, the prompt is scored
    checked = _checked(fields, output, 1 if n is None else n, truncate, least_output=0 if scoring else 1)
    if isinstance(checked, BadRequest):
        return checked
    return _Asked(checked.output, max(checked.n, best_of or 1), truncate)


def _checked(
    fields: Fields, output: int | None, n: int, truncate: int | None, *, least_output: int
) -> _Asked | BadRequest:
    if fields.wrongs:
        return validation_errors(fields.wrongs)
    if n < 1:
        return too_few_sequences(n)
    if output is not None and output < least_output:
        return too_small("max_tokens", output)
    return _Asked(output, n, truncate)


# --- messages ---------------------------------------------------------------------------------------


def _no_messages(data: Mapping[str, Any], *, ids_given: bool) -> BadRequest | None:
    messages = data.get("messages")
    if isinstance(messages, list) and (messages or ids_given):
        return None
    if isinstance(messages, list):
        return BadRequest(
            message="Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    if "messages" not in data:
        return malformed("missing", "body.messages", "Field required", f"<dict of {len(data)} items>")
    return malformed("list_type", "body.messages", "Input should be a valid list", str(messages)[:200])


def _given_ids(data: Mapping[str, Any]) -> int:
    """Prompt tokens that a prefill instance hands on: they replace what the messages would render to."""
    transfer = data.get("kv_transfer_params")
    ids = transfer.get("prompt_token_ids") if isinstance(transfer, dict) else None
    return len(ids) if isinstance(ids, list) else 0
