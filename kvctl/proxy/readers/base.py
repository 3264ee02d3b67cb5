"""What the readers of bodies share: what they know of the engine, and what they hand back.

Law 4: a 400 needs proof, and nothing malformed may ever shrink a claim. What an engine refuses for certain is
refused in its words; what merely looks odd is counted by an upper bound and left to the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from kvctl.engines.base import Engine, Form, Route
from kvctl.proxy.conversations import Begun, Conversations
from kvctl.proxy.limits import BadRequest, Fields
from kvctl.tokens.base import Count, Counter, CountMethod
from kvctl.tokens.bound import TOKENS_PER_REQUEST
from kvctl.tokens.media import MediaBounds, bound_of_all

UNKNOWN_CONTEXT = 32_768
"""The tokens assumed for a prompt that only the engine knows, where its context length is unknown too."""

_STRICT = ("vllm", "sim")
_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_length")
_NESTED = ("parameters", "sampling_params", "generation_config")

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of the engine when a body is read.

    ``strict``: limits are read as vLLM reads them, and refused in its words; otherwise a limit that is not a
    plain number is left to the engine and claims as if none was sent. ``context`` returns the context length
    (None: not known yet), ``begins`` whether prefixes are wanted. ``efforts`` keeps, per model, what
    ``thinking: disabled`` means to its template, ``conversations`` what the engine keeps by response id.
    """

    counter: Counter
    engine: Engine
    vocab_size: int | None = None
    context: Callable[[], int | None] = lambda: None
    embeds_bytes_per_token: int = 512
    media: MediaBounds = field(default_factory=MediaBounds)
    begins: Callable[[], bool] = lambda: False
    efforts: dict[str, bool] = field(default_factory=dict)
    conversations: Conversations = field(default_factory=Conversations)

    @property
    def strict(self) -> bool:
        """Whether the engine's validation is repeated here; its kind may be detected only later."""
        return self.engine.name in _STRICT


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The limits in a body.

    ``output`` None: the engine's default for the route, or for ``form`` where the body has that form; but
    with ``unlimited`` the rest of the context, whatever the default is. ``truncate``: the engine cuts prompts
    to so many tokens; -1: to its context. ``begun``: the engine keeps the conversation; None: it does not.
    ``background``: generation goes on when the request is over. ``turns``: the engine may run tools by itself
    and go on.
    """

    output: int | None = None
    n: int = 1
    truncate: int | None = None
    unlimited: bool = False
    form: Form | None = None
    begun: Begun | None = None
    background: bool = False
    turns: bool = False


class OddShapeError(ValueError):
    """A conversation that the engine may render in a way not known here."""


Counted = tuple[Asked, Count] | BadRequest

NOTHING = Asked(output=0)
"""Prompt-only routes: nothing is generated."""


def model_of(data: Body) -> str:
    """The model that the body names, or ""."""
    model = data.get("model")
    return model if isinstance(model, str) else ""


def bounded(*prompts: int) -> Count:
    """Prompts with upper bounds of their tokens, not counts."""
    return Count(prompts=prompts, method=CountMethod.BOUND)


def bounded_by_all(facts: Facts, data: Body) -> Count:
    """All that is written in the body, bounded as one prompt; media at their own bound."""
    return bounded(bound_of_all(data, facts.media) + TOKENS_PER_REQUEST)


async def read_any(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """A body of no known form: all that is written counts as prompt, and the largest limit found wins."""
    del route, size
    places = [data, *(value for key in _NESTED if isinstance(value := data.get(key), dict))]
    outputs = [v for p in places for key in _OUTPUT_LIMITS if (v := Fields(p).integer(key)) is not None]
    copies = [v for p in places for key in ("n", "best_of") if (v := Fields(p).integer(key)) is not None]
    largest = max(outputs, default=0)
    asked = Asked(output=largest if largest > 0 else None, n=max(1, *copies, 1))
    return asked, bounded_by_all(facts, data)


def together(counts: Sequence[Count]) -> Count:
    """All prompts of several counts; as exact as the least exact of them."""
    methods = [count.method for count in counts]
    order = (CountMethod.BOUND, CountMethod.ENGINE, CountMethod.LOCAL)
    whole = all(len(count.prefixes) == len(count.prompts) for count in counts)
    return Count(
        prompts=tuple(prompt for count in counts for prompt in count.prompts),
        method=next(method for method in order if method in methods),
        seconds=sum(count.seconds for count in counts),
        prefixes=tuple(prefix for count in counts for prefix in count.prefixes) if whole else (),
    )


def no_proof(count: Count) -> Count:
    """The same numbers, marked as an upper bound."""
    return replace(count, method=CountMethod.BOUND)
