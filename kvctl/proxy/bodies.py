"""Bodies of metered routes -> what they ask of the engine (``core.claim.Shape``).

Law 4: a 400 needs proof. What the engine refuses for certain is refused here in its own words; what merely
looks odd is counted by an upper bound and left to the engine. Nothing malformed may ever shrink a claim.
Law 5: bytes pass unchanged. The body is read here, never written: the original bytes are forwarded.

Each form of body has its reader in ``kvctl/proxy/readers``; a route names its form.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from kvctl.core.claim import Shape
from kvctl.engines.base import Engine, Form, Route
from kvctl.proxy import jsonbody
from kvctl.proxy.conversations import Begun, finished
from kvctl.proxy.limits import BadRequest, Fields
from kvctl.proxy.logprobs import too_many_logprobs
from kvctl.proxy.readers import READERS, audio
from kvctl.proxy.readers.base import Asked, Counted, Facts, model_of
from kvctl.proxy.readers.responses import remember
from kvctl.tokens.base import Count, Counter, CountMethod
from kvctl.tokens.begin import as_cached
from kvctl.tokens.media import MediaBounds

_WRONG_TYPE = BadRequest(
    message="1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
    type="Bad Request",
)
_ALWAYS_STREAMS = "/generate_stream"
# The form, or the engine, that takes any limit and just stops where its context ends.
_STOPS_AT_CONTEXT = (Form.VLLM_GENERATE, "llamacpp")


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """A body that was understood: what it asks for, and how that was counted."""

    shape: Shape
    stream: bool
    count_method: CountMethod
    count_seconds: float
    counted: Count | None = None  # as the engine's usage may be compared with it; None: it may not
    include_usage: bool
    begun: Begun | None = None  # the engine keeps the conversation


class Reader:
    """Reads the bodies of metered routes.

    ``context`` tells the engine's context length where it is known by now, for prompts that the engine is
    asked to cut to it. ``embeds_bytes_per_token``: the narrowest row of a ``prompt_embeds`` tensor.
    ``max_logprobs``: most log-probabilities a token that may be asked for; None: any number. ``media``: the
    bounds of images, audio and video where they are no parts of a chat. ``begins`` tells whether it is worth
    knowing how prompts of token ids begin. ``learn`` is told what counts turned out to be.
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
        media: MediaBounds | None = None,
        begins: Callable[[], bool] = lambda: False,
        learn: Callable[[Count, int], None] = lambda _count, _true: None,
    ) -> None:
        self._max_logprobs = max_logprobs
        self._learn = learn
        self._facts = Facts(
            counter=counter,
            engine=engine,
            vocab_size=vocab_size,
            context=context,
            embeds_bytes_per_token=embeds_bytes_per_token,
            media=media or MediaBounds(),
            begins=begins,
        )

    async def read(self, route: Route, headers: Mapping[str, str], body: bytes) -> Parsed | BadRequest:
        """What ``body`` asks for on ``route``, or the engine's answer to what it refuses. Never raises."""
        sent = headers.get("Content-Type") or headers.get("content-type") or ""
        if route.form is Form.AUDIO:
            form, counted = audio.read_audio(self._facts, sent, body)
            return self._parsed(route, audio.as_body(form), counted)
        if self._facts.strict and sent.lower().split(";", maxsplit=1)[0] != "application/json":
            return _WRONG_TYPE
        small = len(body) <= jsonbody.LARGE
        data = jsonbody.read_object(body) if small else await jsonbody.read(body)
        if isinstance(data, BadRequest):
            return data
        if bad := too_many_logprobs(data, self._max_logprobs):
            return bad
        return self._parsed(route, data, await READERS[route.form](self._facts, route, data, len(body)))

    def learn(self, parsed: Parsed, true: int | None) -> None:
        """The engine's usage says how many prompt tokens a request had; None: it does not."""
        if parsed.counted is not None and true is not None:
            self._learn(parsed.counted, true)

    async def remember(self, parsed: Parsed, document: bytes) -> None:
        """An answer is whole whose conversation the engine keeps. Never raises."""
        answer = await jsonbody.read(document) if document else None
        told = finished(answer) if isinstance(answer, dict) else None
        if told is not None and parsed.begun is not None:
            await remember(self._facts, parsed.shape, parsed.begun, told, len(document))

    def _parsed(self, route: Route, data: Mapping[str, Any], counted: Counted) -> Parsed | BadRequest:
        if isinstance(counted, BadRequest):
            return counted
        asked, count = counted
        prompts, exact = self._truncated(count.prompts, asked.truncate)
        stream = Fields(data).flag("stream") or route.path.endswith(_ALWAYS_STREAMS)
        options = data.get("stream_options")
        shape = Shape(
            route=route.name,
            model=model_of(data),
            prompts=prompts or (0,),
            n=asked.n,
            asked_output=self._output(route, asked),
            default_output=self._default_output(route, asked),
            stream=stream,
            exact=exact and count.exact,
            # What only reads a prompt (scores, embeddings) may pass the engine's cache by.
            prefixes=() if asked.output == 0 else as_cached(_prefixes(count, prompts), data),
            priority=self._priority(data),
        )
        return Parsed(
            shape=shape,
            stream=stream,
            count_method=count.method,
            count_seconds=count.seconds,
            # token ids take no time, and say nothing about a tokenizer
            counted=count if prompts == count.prompts and count.seconds else None,
            include_usage=isinstance(options, dict) and Fields(options).flag("include_usage"),
            begun=asked.begun,
        )

    def _output(self, route: Route, asked: Asked) -> int | None:
        """A limit beyond the context, where it is no reason for the engine to refuse, is the context."""
        context = self._facts.context()
        if asked.output is None or context is None:
            return asked.output
        stops = route.form in _STOPS_AT_CONTEXT or self._facts.engine.name in _STOPS_AT_CONTEXT
        return min(asked.output, context) if stops else asked.output

    def _default_output(self, route: Route, asked: Asked) -> int | None:
        if asked.unlimited:
            return None
        known = route if asked.form is None else replace(route, form=asked.form)
        return self._facts.engine.default_output(known)

    def _priority(self, data: Mapping[str, Any]) -> int:
        """vLLM's: the lower, the sooner. What cannot be read is the engine's to refuse."""
        if "priority" not in data or not self._facts.strict:
            return 0
        return Fields(data).integer("priority") or 0

    def _truncated(self, prompts: tuple[int, ...], truncate: int | None) -> tuple[tuple[int, ...], bool]:
        """Prompts as the engine cuts them, and whether that is certain."""
        if truncate is None:
            return prompts, True
        if truncate >= 0:
            return tuple(min(prompt, truncate) for prompt in prompts), True
        context = self._facts.context()
        return tuple(min(prompt, context or prompt) for prompt in prompts), False


def _prefixes(count: Count, prompts: tuple[int, ...]) -> tuple[Any, ...]:
    """How the prompts begin, where that is known of each and none was cut."""
    return count.prefixes if prompts == count.prompts and len(count.prefixes) == len(prompts) else ()
