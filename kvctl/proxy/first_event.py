"""A look at a stream's first event before its status goes out: an engine may refuse inside a 200.

Law 5: bytes pass unchanged, with this one exception, which the operator must ask for (``first_event_peek``):
a 200 whose first event is an error becomes the answer that the engine would have given instead of the 200,
with the event's own data as its body. Any other stream passes as it came, its head a little later.
"""

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvctl.engines.series import json_object
from kvctl.proxy.errors import Answer
from kvctl.proxy.response import Response

_MOST = 64 * 1024  # bytes that an error event may have
_BORDER = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINE_END = re.compile(rb"\r\n|\n|\r")

# Where an error carries no number, the word for its kind: Anthropic's, then TGI's.
_BY_KIND = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "overloaded_error": 529,
    "validation": 422,
    "generation": 424,
    "incomplete_generation": 500,
    "overloaded": 429,
}


async def refusal_in(response: Response, patience: float) -> Answer | None:
    """The refusal that a stream begins with; None: there is none, or none came within ``patience`` seconds.

    The stream is left untouched.
    """
    if response.status != 200 or not _is_plain_stream(response):
        return None
    early = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(patience):
            early = await response.peek(_holds_an_event)
    data = _first_event(early)
    status = _status_of(data)
    if status is None:
        return None
    kept = [(name, value) for name, value in response.headers if name.lower() == b"retry-after"]
    told = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in kept]
    return Answer(status, (("Content-Type", "application/json"), *told), data)


def _is_plain_stream(response: Response) -> bool:
    kind = response.content_type.partition(b";")[0].strip().lower()
    return kind == b"text/event-stream" and response.content_encoding in (b"", b"identity")


def _holds_an_event(early: bytes) -> bool:
    return len(early) > _MOST or _first_event(early) != b""


def _first_event(early: bytes) -> bytes:
    """The data of the first whole event that has any."""
    blocks = _BORDER.split(early.removeprefix(b"\xef\xbb\xbf"))[:-1]
    return next(filter(None, map(_data_of, blocks)), b"")


def _data_of(block: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(block) if line.startswith(b"data:")]
    return b"\n".join(lines)


def _status_of(data: bytes) -> int | None:
    """The status that an error event stands for; None: it is not an error, or tells no status."""
    event = json_object(data)
    error = event.get("error")
    if isinstance(error, Mapping):
        return _status_in(error)
    return _BY_KIND.get(str(event.get("error_type"))) if isinstance(error, str) else None


def _status_in(error: Mapping[str, Any]) -> int | None:
    code = error.get("code")
    if isinstance(code, int) and 400 <= code <= 599:
        return code
    return _BY_KIND.get(str(error.get("type")))
