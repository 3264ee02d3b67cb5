"""The engine's own ``/tokenize``: exact with whatever template and flags it runs, for one round trip.

Bounded in number and time, so that a slow engine cannot hold arrivals for long; recent answers are cached,
since callers retry with the same body.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from kvctl.tokens.base import CountMethod
from kvctl.tokens.begin import Tokens, prefix_of
from kvctl.tokens.foreign import Interpreter
from kvctl.tokens.source import Uncountable, Why

Ask = Callable[[bytes], Awaitable[tuple[int, bytes]]]
"""Posts a JSON body to the engine's /tokenize; (status, answer). Raises OSError or TimeoutError."""

_CHAT_KEYS = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    "chat_template",
)
_AS_OPTIONS = (
    "documents",
    "reasoning_effort",
)  # /tokenize has no such fields; the template takes them as options
MOST_PROMPTS = 64
KEPT_ANSWERS = 1024
MOST_BEGUN = 16_384  # tokens that are hashed on the loop: of longer prompts the prefix stays unknown


class EngineCounter:
    """A source of exact counts from the engine."""

    method = CountMethod.ENGINE

    def __init__(
        self,
        ask: Ask,
        *,
        concurrency: int = 8,
        most_waiting: int = 128,
        timeout_s: float = 5.0,
        max_bytes: int = 4 * 1024 * 1024,
    ) -> None:
        self._ask = ask
        self._slots = asyncio.Semaphore(concurrency)
        self._most_waiting = most_waiting
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self.waiting = 0  # asked or waiting to ask: a gauge
        self.begins: Callable[[], bool] = lambda: False  # whether prefixes are wanted

    async def text(self, model: str, prompts: Sequence[str], *, add_special_tokens: bool) -> tuple[int, ...]:
        """Tokens of each prompt. Raises Uncountable."""
        if len(prompts) > MOST_PROMPTS:
            raise Uncountable(Why.TOO_LARGE, "too many prompts to ask for one by one")
        payloads = [{"prompt": prompt, "add_special_tokens": add_special_tokens} for prompt in prompts]
        counts = await asyncio.gather(
            *(self._count(model, payload) for payload in payloads), return_exceptions=True
        )
        for count in counts:
            if isinstance(count, BaseException):
                raise count
        return tuple(count for count in counts if isinstance(count, int))

    async def chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> int:
        """Prompt tokens of a chat body. Raises Uncountable."""
        if body_bytes > self._max_bytes:
            raise Uncountable(Why.TOO_LARGE)
        payload = {key: body[key] for key in _CHAT_KEYS if body.get(key) is not None}
        options = body.get("chat_template_kwargs") or {}
        if not isinstance(options, Mapping):
            raise Uncountable(Why.SHAPE, "chat_template_kwargs is no object")
        options = dict(options)
        options |= {key: body[key] for key in _AS_OPTIONS if body.get(key) is not None}
        if body.get("reasoning_effort") is not None:
            options.setdefault("enable_thinking", body["reasoning_effort"] != "none")
        if options:
            payload["chat_template_kwargs"] = options
        return await self._count(model, payload)

    def know_engine(self, read: Callable[[], str]) -> None:
        """``read`` tells which engine answers."""
        if isinstance(self._ask, Interpreter):
            self._ask.kind = read

    def forget(self) -> None:
        """Drop the kept answers: the engine may be another one now."""
        self._kept.clear()

    async def close(self) -> None:
        """Nothing is held: the session is its owner's."""

    async def _count(self, model: str, payload: Mapping[str, Any]) -> int:
        body = _encode({"model": model, **payload} if model else payload)
        if len(body) > self._max_bytes:
            raise Uncountable(Why.TOO_LARGE)
        key = hashlib.blake2b(body, digest_size=16).digest()
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        count = _read_count(*await self._bounded(body), begins=self.begins())
        self._kept[key] = count
        if len(self._kept) > KEPT_ANSWERS:
            self._kept.popitem(last=False)
        return count

    async def _bounded(self, body: bytes) -> tuple[int, bytes]:
        if self.waiting >= self._most_waiting:
            raise Uncountable(Why.BUSY)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                return await self._ask(body)
        except TimeoutError as error:
            raise Uncountable(Why.TIMEOUT) from error
        except (OSError, aiohttp.ClientError) as error:
            raise Uncountable(Why.UNREACHABLE, str(error)) from error
        finally:
            self.waiting -= 1


def _encode(payload: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(payload, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise Uncountable(Why.SHAPE, str(error)) from error


def _read_count(status: int, answer: bytes, *, begins: bool) -> int:
    if status != 200:
        raise Uncountable(Why.REFUSED, f"/tokenize answered {status}")
    try:
        told = json.loads(answer)
        count = told["count"]
    except (ValueError, TypeError, KeyError) as error:
        raise Uncountable(Why.REFUSED, "/tokenize answered something else") from error
    if type(count) is not int or count < 0:
        raise Uncountable(Why.REFUSED, "/tokenize answered no count")
    if not begins or count > MOST_BEGUN:
        return count
    ids = told.get("tokens")
    return Tokens(count, prefix_of(ids)) if isinstance(ids, list) and len(ids) == count else count
