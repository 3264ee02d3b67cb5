"""Open-loop callers that stream chat completions and retry as openai-python does.

What became of each is a ``Call`` of the replay, so that the figures are made by the same code.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from kvctl.sim.client import may_retry, retry_delay
from kvctl.sim.replay import Call
from kvctl.sim.trace import Row
from tests.live.engine import forced_length

RETRIES = 2
END = b"data: [DONE]\n\n"
ERROR = b'data: {"error"'  # an engine whose queue is full may say so inside a 200, and end it with [DONE]
UNAVAILABLE = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What all callers have in common. ``cap`` None: they send no output limit."""

    url: str
    model: str
    cap: int | None
    seed: int
    patience_s: float = 20.0  # after the last arrival; who is not done by then is cut


def call_id(number: int, tries: int, output: int) -> str:
    """The X-Request-Id of an attempt: what a gate that knows the future may read."""
    return f"bench.{number}.{tries}.{output}"


def read_call_id(text: str) -> tuple[int, int]:
    """(tries, true output) of an attempt; (1, 1) of a request that no caller of the bench sent."""
    parts = text.split(".")
    return (int(parts[2]), int(parts[3])) if parts[0] == "bench" and len(parts) == 4 else (1, 1)


@dataclass(slots=True)
class Heard:
    """What callers noticed beside their answers: by how much they came later than they should, and refusals.

    Callers who come late are a load that nobody asked for: the machine had no time for them.
    """

    late_s: list[float] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)  # by the reason that was told
    hints_s: list[float] = field(default_factory=list)  # waits before another try


async def drive(crowd: Crowd, rows: Sequence[Row], texts: Iterable[str]) -> tuple[list[Call], Heard]:
    """All callers, to their end or until patience is over."""
    calls = [Call(row=row, cap=crowd.cap) for row in rows]
    bodies = [_body(crowd, row, text) for row, text in zip(rows, texts, strict=True)]
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        one = _Caller(crowd, session, time.monotonic())
        tasks = [asyncio.create_task(one.make(call, body)) for call, body in zip(calls, bodies, strict=True)]
        done, pending = await asyncio.wait(tasks, timeout=rows[-1].at_s + crowd.patience_s)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await asyncio.gather(*done)
    return calls, one.heard


def _body(crowd: Crowd, row: Row, text: str) -> bytes:
    body = {
        "model": crowd.model,
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        **forced_length(row.output_tokens),
    }
    if crowd.cap is not None:
        body["max_tokens"] = crowd.cap
    return json.dumps(body).encode()


class _Caller:
    def __init__(self, crowd: Crowd, session: aiohttp.ClientSession, began: float) -> None:
        self._crowd = crowd
        self._session = session
        self._began = began
        self.heard = Heard()

    async def make(self, call: Call, body: bytes) -> None:
        source = random.Random(f"{self._crowd.seed} {call.row.number}")
        await asyncio.sleep(self._began + call.row.at_s - time.monotonic())
        self.heard.late_s.append(time.monotonic() - self._began - call.row.at_s)
        while True:
            call.tries += 1
            call.asked_at = time.monotonic() - self._began
            status, headers = await self._attempt(call, body)
            if call.tries > 1:
                call.retries += 1
                call.retries_admitted += status == 200
            if call.complete:
                return
            self.heard.refusals[headers.get("x-kvctl-reason", str(status))] += 1
            if call.tries > RETRIES or call.first_at is not None or not may_retry(status, headers):
                call.given_up = True
                return
            wait_s = retry_delay(headers, call.tries - 1, source)
            self.heard.hints_s.append(wait_s)
            await asyncio.sleep(wait_s)

    async def _attempt(self, call: Call, body: bytes) -> tuple[int, Mapping[str, str]]:
        """Status and headers; status 0: no connection, or it broke."""
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": call_id(call.row.number, call.tries, call.row.output_tokens),
        }
        url = f"{self._crowd.url}/v1/chat/completions"
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
            async with self._session.post(url, data=body, headers=headers) as response:
                if response.status != 200:
                    await response.read()
                elif not await self._read(call, response):
                    return UNAVAILABLE, response.headers
                return response.status, response.headers
        return 0, {}

    async def _read(self, call: Call, response: aiohttp.ClientResponse) -> bool:
        """Whether it was an answer. An error in its stead counts as a refusal: callers try again."""
        tail, last, failed = b"", 0.0, False
        async for data in response.content.iter_any():
            last = time.monotonic() - self._began
            failed = failed or ERROR in tail + data
            if call.first_at is None and not failed:
                call.first_at = last
            tail = (tail + data)[-max(len(END), len(ERROR)) :]
        if tail.endswith(END) and not failed:
            call.ended_at, call.output, call.complete = last, call.row.output_tokens, True
        return not failed
