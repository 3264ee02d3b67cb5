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

from kvctl.core.claim import Prefix, Shape
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
_JSON = "application/json"
_ALWAYS_STREAMS = "/generate_stream"


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """A body that was understood: what it asks for, and how its prompt was counted."""

    shape: Shape
    stream: bool
    count_method: CountMethod
    count_seconds: float
    counted: Count | None = None  # to compare with the engine's usage; None: not comparable
    begun: Begun | None = None  # the engine keeps the conversation
    background: bool = False  # the answer is generated even if nobody waits for it
    turns: bool = False  # the engine may run tools by itself, and go on


class Reader:
    """Reads the bodies of metered routes.

    ``context`` returns the engine's context length (None: not known yet), for prompts that the engine is
    asked to cut to it. ``embeds_bytes_per_token``: the narrowest row of a ``prompt_embeds`` tensor.
    ``max_logprobs``: most log-probabilities a token that may be asked for; None: any number. ``media``: the
    bounds of images, audio and video outside of chats. ``begins`` returns whether the prefixes of prompts
    given as token ids are wanted. ``learn`` is called with what a count turned out to be.
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
        facts, form = self._facts, route.form
        sent = headers.get("Content-Type") or headers.get("content-type") or ""
        if form is Form.AUDIO:
            parts, counted = audio.read_audio(facts, sent, body)
            return self._parsed(route, audio.as_body(parts), counted)
        if sent != _JSON and sent.lower().split(";", maxsplit=1)[0] != _JSON and facts.strict:
            return _WRONG_TYPE
        small = len(body) <= jsonbody.LARGE
        data = jsonbody.read_object(body) if small else await jsonbody.read(body)
        if isinstance(data, BadRequest):
            return data
        if bad := too_many_logprobs(data, self._max_logprobs):
            return bad
        return self._parsed(route, data, await READERS[form](facts, route, data, len(body)))

    def learn(self, parsed: Parsed, true: int | None) -> None:
        """Compare with ``true``, the prompt tokens by the engine's usage; None: it did not say."""
        if parsed.counted is not None and true is not None:
            self._learn(parsed.counted, true)

    async def remember(self, parsed: Parsed, document: bytes) -> None:
        """Note a whole answer whose conversation the engine keeps. Never raises."""
        answer = await jsonbody.read(document) if document else None
        told = finished(answer) if isinstance(answer, dict) else None
        if told is not None and parsed.begun is not None:
            await remember(self._facts, parsed.shape, parsed.begun, told, len(document))

    def _parsed(self, route: Route, data: Mapping[str, Any], counted: Counted) -> Parsed | BadRequest:
        if isinstance(counted, BadRequest):
            return counted
        asked, count = counted
        prompts, exact = count.prompts, count.method is not CountMethod.BOUND
        if asked.truncate is not None:
            prompts, certain = self._truncated(prompts, asked.truncate)
            exact = exact and certain
        stream = ("stream" in data and Fields(data).flag("stream")) or route.path.endswith(_ALWAYS_STREAMS)
        shape = Shape(
            route=route.name,
            model=model_of(data),
            prompts=prompts or (0,),
            n=asked.n,
            asked_output=None if asked.output is None else self._output(route, asked.output),
            default_output=None if asked.unlimited else self._default_output(route, asked),
            stream=stream and not asked.background,  # its lease moves on though nobody reads along
            exact=exact,
            # What only reads a prompt (scores, embeddings) may pass the engine's cache by.
            prefixes=_prefixes(count, prompts, data) if count.prefixes and asked.output != 0 else (),
            priority=self._priority(data) if "priority" in data else 0,
        )
        return Parsed(
            shape=shape,
            stream=stream,
            count_method=count.method,
            count_seconds=count.seconds,
            # token ids take no time, and say nothing about a tokenizer
            counted=count if count.seconds and prompts == count.prompts else None,
            begun=asked.begun,
            background=asked.background,
            turns=asked.turns,
        )

    def _output(self, route: Route, asked: int) -> int:
        """The asked limit, at most the context where the engine takes a larger one and stops there."""
        if route.form is not Form.VLLM_GENERATE and self._facts.engine.name != "llamacpp":
            return asked
        return min(asked, self._facts.context() or asked)

    def _default_output(self, route: Route, asked: Asked) -> int | None:
        known = route if asked.form is None else replace(route, form=asked.form)
        return self._facts.engine.default_output(known)

    def _priority(self, data: Mapping[str, Any]) -> int:
        """By vLLM's rule: the lower, the sooner. What cannot be read is left for the engine to refuse."""
        return (Fields(data).integer("priority") or 0) if self._facts.strict else 0

    def _truncated(self, prompts: tuple[int, ...], truncate: int) -> tuple[tuple[int, ...], bool]:
        """Prompts as the engine cuts them, and whether their lengths are then certain."""
        if truncate >= 0:
            return tuple(min(prompt, truncate) for prompt in prompts), True
        context = self._facts.context()
        return tuple(min(prompt, context or prompt) for prompt in prompts), False


def _prefixes(count: Count, prompts: tuple[int, ...], data: Mapping[str, Any]) -> tuple[Prefix, ...]:
    """The prefixes of the prompts, where all of them are known and none was cut; else empty."""
    known = prompts == count.prompts and len(count.prefixes) == len(prompts)
    return as_cached(count.prefixes, data) if known else ()
