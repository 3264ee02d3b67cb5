"""A caller as openai-python makes them: streams a chat completion, obeys retry hints, tries three times.

A retry waits for ``retry-after-ms``, else ``retry-after``, else half a second doubled with every try and
jittered; ``x-should-retry`` has the last word. Time to first token counts from the first attempt.
"""

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvctl.sim.load import Call

MAX_RETRIES = 2
LONGEST_HINT_S = 120.0
_RETRIABLE = frozenset({408, 409, 429})
_CHAT_MARKERS = 4  # BOS, role, end and generation prompt of a chat of one message
_FILLER = "all work and no play makes a dull cache; "


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a call. Times are seconds of the run's clock; None: did not come."""

    call: Call
    tries: int = 0
    refusals: int = 0
    status: int | None = None  # of the last attempt; 0: no connection
    first_at: float | None = None
    last_at: float | None = None
    tokens: int = 0
    complete: bool = False
    given_up: bool = False

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the first attempt to the first token."""
        return None if self.first_at is None else self.first_at - self.call.at_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, of a complete answer."""
        if not self.complete or self.first_at is None or self.last_at is None:
            return None
        return (self.last_at - self.first_at) / max(self.tokens - 1, 1)


def chat_body(call: Call, model: str) -> dict[str, Any]:
    """The request body. Its prompt counts ``call.prompt_tokens`` with the simulated engine's tokenizer."""
    size = 4 * max(call.prompt_tokens - _CHAT_MARKERS, 1)
    text = (_FILLER * (size // len(_FILLER) + 1))[:size]
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": call.cap_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "sim_output_tokens": call.output_tokens,
    }


def retry_delay(headers: Mapping[str, str], retries: int, source: random.Random) -> float:
    """Seconds to wait before the next try, after ``retries`` retries."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            hint = float(headers.get(name, "")) / unit
        except ValueError:
            continue
        if 0.0 < hint <= LONGEST_HINT_S:
            return hint
    return min(0.5 * 2.0**retries, 8.0) * (1.0 - 0.25 * source.random())


def may_retry(status: int, headers: Mapping[str, str]) -> bool:
    """Whether such an answer is worth another try. Status 0: no connection."""
    told = headers.get("x-should-retry")
    if told in ("true", "false"):
        return told == "true"
    return status in _RETRIABLE or status >= 500 or status == 0


class Caller:
    """Makes calls to one server. ``clock`` gives seconds since the start of the run."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, clock: Callable[[], float], seed: int
    ) -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311 - jitter of a reproducible load

    async def make(self, outcome: Outcome) -> None:
        """Carry the call out, filling ``outcome``. Cancelled, it leaves what was seen so far."""
        body = json.dumps(chat_body(outcome.call, self._model)).encode()
        while True:
            outcome.tries += 1
            headers = await self._attempt(body, outcome)
            if outcome.complete:
                return
            status, retries = outcome.status or 0, outcome.tries - 1
            if retries >= MAX_RETRIES or outcome.first_at is not None or not may_retry(status, headers):
                outcome.given_up = True
                return
            await asyncio.sleep(retry_delay(headers, retries, self._random))

    async def _attempt(self, body: bytes, outcome: Outcome) -> Mapping[str, str]:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url, data=body, headers=headers) as response:
                outcome.status = response.status
                if response.status == 200:
                    await self._read(response, outcome)
                else:
                    outcome.refusals += response.status in (429, 503)
                    await response.read()
                return response.headers
        except aiohttp.ClientError:
            outcome.status = 0
            return {}

    async def _read(self, response: aiohttp.ClientResponse, outcome: Outcome) -> None:
        tail = b""
        async for data in response.content.iter_any():
            now = self._clock()
            if outcome.first_at is None:
                outcome.first_at = now
            outcome.last_at = now
            tail = (tail + data)[-1024:]
        outcome.tokens = _usage_tokens(tail)
        outcome.complete = outcome.tokens > 0


def _usage_tokens(tail: bytes) -> int:
    """Output tokens by the usage event at the end of a stream; 0 if the stream did not end as it should."""
    events = tail.split(b"\n\n")
    if len(events) < 3 or events[-2] != b"data: [DONE]":
        return 0
    usage = json.loads(events[-3].removeprefix(b"data: ")).get("usage") or {}
    return int(usage.get("completion_tokens", 0))
