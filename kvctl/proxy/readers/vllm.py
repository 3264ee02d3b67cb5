"""vLLM's own bodies: ``/inference/v1/generate`` (ids in, ids out) and SageMaker's ``/invocations``."""

from collections.abc import Mapping
from typing import Any

from kvctl.engines.base import Form, Route
from kvctl.proxy.limits import (
    BadRequest,
    Fields,
    malformed,
    too_few_sequences,
    too_small,
    validation_errors,
)
from kvctl.proxy.prompts import outside_vocabulary
from kvctl.proxy.readers.base import Asked, Body, Counted, Facts, bounded, read_any
from kvctl.proxy.readers.openai import read_chat, read_completion
from kvctl.proxy.readers.pooling import read_embed, read_score
from kvctl.tokens.base import Count, CountMethod


async def read_generate(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """``token_ids``; ``sampling_params.max_tokens`` (none: the rest of the context), ``n``."""
    del route, size
    ids = data.get("token_ids")
    if not isinstance(ids, list) or not ids:
        return _no_ids(data, ids)
    asked = _limits(data.get("sampling_params"))
    if isinstance(asked, BadRequest):
        return asked
    if {type(item) for item in ids} != {int} or data.get("content_parts"):
        media = facts.media.of_parts(data.get("content_parts"))
        return asked, bounded(len(ids) + media)
    if bad := outside_vocabulary(ids, facts.vocab_size, "token_ids"):
        return bad
    return asked, Count(prompts=(len(ids),), method=CountMethod.LOCAL)


def _no_ids(data: Body, ids: Any) -> BadRequest:
    if "token_ids" not in data:
        return malformed("missing", "body.token_ids", "Field required", f"<dict of {len(data)} items>")
    if ids == []:
        message = "List should have at least 1 item after validation, not 0"
        rule = {"field_type": "List", "min_length": 1, "actual_length": 0}
        return malformed("too_short", "body.token_ids", message, "<list of 0 items>", rule)
    return malformed("list_type", "body.token_ids", "Input should be a valid list", str(ids)[:200])


def _limits(params: Any) -> Asked | BadRequest:
    if not isinstance(params, Mapping):
        return Asked()  # the engine refuses it
    fields = Fields(params, "body.sampling_params")
    output, n = fields.integer("max_tokens"), fields.integer("n", nullable=False)
    if fields.wrongs:
        return validation_errors(fields.wrongs)
    if n is not None and n < 1:
        return too_few_sequences(n)
    if output is not None and output < 1:
        return too_small("max_tokens", output)
    return Asked(output=output, n=1 if n is None else n)


_KEYS = {
    Form.CHAT: ("messages",),
    Form.COMPLETION: ("prompt", "prompt_embeds"),
    Form.EMBED: ("input",),
    Form.SCORE: ("data_1", "text_1", "queries", "query"),
}
_READ = {
    Form.CHAT: read_chat,
    Form.COMPLETION: read_completion,
    Form.EMBED: read_embed,
    Form.SCORE: read_score,
}


async def read_invocations(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """The body of another route, recognised by its fields; where they fit several, all of it is bounded."""
    forms = [form for form, keys in _KEYS.items() if any(data.get(key) is not None for key in keys)]
    if len(forms) != 1:
        return await read_any(facts, route, data, size)
    read = await _READ[forms[0]](facts, route, data, size)
    if isinstance(read, BadRequest):
        return read
    asked, count = read
    return (
        Asked(
            output=asked.output,
            n=asked.n,
            truncate=asked.truncate,
            unlimited=asked.unlimited,
            form=forms[0],
        ),
        count,
    )
