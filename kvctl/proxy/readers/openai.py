"""OpenAI's chat and completion bodies, and vLLM's batch of chats."""

import asyncio
from typing import Any

from kvctl.engines.base import Route
from kvctl.proxy.limits import (
    LARGEST,
    BadRequest,
    Fields,
    malformed,
    too_few_sequences,
    too_small,
    validation_errors,
)
from kvctl.proxy.prompts import Prompts, completion_prompts
from kvctl.proxy.readers.base import Asked, Body, Counted, Facts, model_of, no_proof, together
from kvctl.tokens.base import Count, CountMethod
from kvctl.tokens.begin import prefixes_of_lists


async def read_chat(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """``messages``; ``max_completion_tokens``, ``max_tokens``, ``n``."""
    del route
    asked = chat_limits(facts, data)
    if isinstance(asked, BadRequest):
        return asked
    given = _given_ids(data)
    if bad := no_messages(data, ids_given=given > 0):
        return bad
    count = await facts.counter.count_chat(model_of(data), data, size)
    if given:
        longest = max(*count.prompts, given)
        count = Count(prompts=(longest,), method=CountMethod.BOUND, seconds=count.seconds)
    return asked, count


async def read_chat_batch(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """``messages`` is a list of conversations, each a prompt of its own."""
    del route
    asked = chat_limits(facts, data)
    if isinstance(asked, BadRequest):
        return asked
    if bad := no_messages(data, ids_given=False):
        return bad
    model, chats = model_of(data), data["messages"]
    if [] in chats:
        return malformed(
            "too_short",
            f"body.messages.{chats.index([])}",
            "List should have at least 1 item after validation, not 0",
            "<list of 0 items>",
            {"field_type": "List", "min_length": 1, "actual_length": 0},
        )
    if asked.n != 1:
        return BadRequest(
            message=(
                "Batch chat completions do not support `n > 1`. Please set `n` to 1. "
                f"(parameter=n, value={asked.n})"
            ),
            param="n",
        )
    each = max(1, size // len(chats))
    counts = await asyncio.gather(
        *(facts.counter.count_chat(model, {**data, "messages": chat}, each) for chat in chats)
    )
    return asked, together(counts)


async def read_completion(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """``prompt`` in each of its forms, ``prompt_embeds``; ``max_tokens``, ``n``, ``best_of``, ``echo``."""
    del route, size
    asked = completion_limits(facts, data)
    if isinstance(asked, BadRequest):
        return asked
    prompts = completion_prompts(data, facts.vocab_size, facts.embeds_bytes_per_token)
    if isinstance(prompts, BadRequest):
        return prompts
    return asked, await count_prompts(facts, data, prompts)


async def count_prompts(facts: Facts, data: Body, prompts: Prompts) -> Count:
    """Tokens of all prompts: those counted already, and the texts."""
    begins = facts.begins() and not prompts.embeds
    known = Count(
        prompts=prompts.embeds + prompts.ids,
        method=CountMethod.BOUND if prompts.doubtful else CountMethod.LOCAL,
        prefixes=await prefixes_of_lists(prompts.lists) if begins and prompts.lists else (),
    )
    if not prompts.texts:
        return known
    specials = Fields(data).flag("add_special_tokens", default=True)
    texts = await facts.counter.count_text(model_of(data), prompts.texts, add_special_tokens=specials)
    if known.prompts:
        return together((known, texts))
    return no_proof(texts) if prompts.doubtful else texts


# --- limits -----------------------------------------------------------------------------------------

_RARE = frozenset({"best_of", "echo", "truncate_prompt_tokens"})


def _plain(data: Body, name: str) -> Asked | None:
    """The limits of a body that sets at most ``name`` and ``n``, to plain numbers; None: any other body."""
    output, n = data.get(name), data.get("n", 1)
    if output is not None and not (type(output) is int and 0 < output <= LARGEST):
        return None
    one_at_least = type(n) is int and 0 < n <= LARGEST
    return Asked(output=output, n=n) if one_at_least and _RARE.isdisjoint(data) else None


def chat_limits(facts: Facts, data: Body) -> Asked | BadRequest:
    """The limits of a chat: the newer field takes precedence."""
    if ("max_completion_tokens" not in data) and (plain := _plain(data, "max_tokens")):
        return plain
    if ("max_tokens" not in data) and (plain := _plain(data, "max_completion_tokens")):
        return plain
    fields = Fields(data)
    newer, older = fields.integer("max_completion_tokens"), fields.integer("max_tokens")
    n, truncate = fields.integer("n"), fields.integer("truncate_prompt_tokens", least=-1)
    output = older if newer is None else newer
    return _checked(facts, fields, output, 1 if n is None else n, truncate, least_output=1)


def completion_limits(facts: Facts, data: Body) -> Asked | BadRequest:
    """The limits of a completion. Where best_of is honoured it sets the number of sequences (not by 0.32)."""
    if plain := _plain(data, "max_tokens"):
        return plain
    fields = Fields(data)
    output, truncate = fields.integer("max_tokens"), fields.integer("truncate_prompt_tokens", least=-1)
    n = fields.integer("n", nullable=False)
    best_of = Fields(data).integer("best_of")
    scoring = fields.flag("echo") and output == 0  # legal: nothing is generated, the prompt is scored
    checked = _checked(
        facts, fields, output, 1 if n is None else n, truncate, least_output=0 if scoring else 1
    )
    if isinstance(checked, BadRequest):
        return checked
    return Asked(
        output=checked.output,
        n=max(checked.n, best_of or 1),
        truncate=truncate,
        unlimited=checked.unlimited,
    )


def _checked(
    facts: Facts, fields: Fields, output: int | None, n: int, truncate: int | None, *, least_output: int
) -> Asked | BadRequest:
    low = output is not None and output < least_output
    if not facts.strict:
        odd = low or bool(fields.wrongs)
        return Asked(output=None if odd else output, n=max(n, 1), truncate=truncate, unlimited=odd)
    if fields.wrongs:
        return validation_errors(fields.wrongs)
    if n < 1:
        return too_few_sequences(n)
    if output is not None and low:
        return too_small("max_tokens", output)
    return Asked(output=output, n=n, truncate=truncate)


# --- messages ---------------------------------------------------------------------------------------


def no_messages(data: Body, *, ids_given: bool) -> BadRequest | None:
    """The engine's answer to a chat without messages."""
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


def _given_ids(data: Body) -> int:
    """Prompt tokens handed on by a prefill instance: they replace what the messages would render to."""
    transfer: Any = data.get("kv_transfer_params")
    ids = transfer.get("prompt_token_ids") if isinstance(transfer, dict) else None
    return len(ids) if isinstance(ids, list) else 0
