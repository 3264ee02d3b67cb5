"""The model's own tokenizer and template, in this process.

Law 6: nothing slow on the loop. Short texts are encoded inline (a hand-over costs 0.1 ms); longer ones in a
few threads, with a deadline and a bound on those waiting. ``encode_batch_fast`` lets go of the GIL while it
works, ``encode`` does not.

A text of more characters than the context has tokens, times the longest token of the vocabulary, is refused
by the engine before it tokenises (its ``max_chars_per_token`` rule). Such a text is not tokenised here
either: the least number of tokens that it can have is proof enough (law 4).
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvctl.tokens.base import CountMethod
from kvctl.tokens.conversation import conversation, tool_list
from kvctl.tokens.files import ModelFiles
from kvctl.tokens.source import Uncountable, Why
from kvctl.tokens.template import ChatTemplate, template_options

WAITING_PER_WORKER = 32


class LocalCounter:
    """A source of exact counts from a model's files.

    ``inline_bytes``: texts up to this length are encoded on the loop. ``workers``: threads for longer ones.
    ``timeout_s``: how long a caller waits for one of those, its queueing included. ``context`` may be set to
    what reads the engine's context length, where it is known.
    """

    method = CountMethod.LOCAL

    def __init__(
        self,
        files: ModelFiles,
        *,
        inline_bytes: int = 2048,
        workers: int = 2,
        timeout_s: float = 5.0,
        max_chars: int = 16 * 1024 * 1024,
    ) -> None:
        self._tokenizer = files.tokenizer
        self._templates = files.templates
        self.vocab_size = files.vocab_size
        self._longest_token = files.longest_token
        self.context: Callable[[], int | None] = lambda: None
        self._inline_bytes = inline_bytes
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        self._most_waiting = workers * WAITING_PER_WORKER
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kvctl-tokens")
        self.waiting = 0  # handed to the threads and not yet done: a gauge

    async def text(self, model: str, prompts: Sequence[str], *, add_special_tokens: bool) -> tuple[int, ...]:
        """Tokens of each prompt. Raises Uncountable."""
        del model
        size = sum(map(len, prompts))
        return await self._run(functools.partial(self._encode, list(prompts), add_special_tokens), size)

    async def chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> int:
        """Prompt tokens of a chat body. Raises Uncountable."""
        del model
        template = self._template(body)
        (count,) = await self._run(functools.partial(self._render, template, body), body_bytes)
        return count

    async def close(self) -> None:
        """Let the threads end; what they are at is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _template(self, body: Mapping[str, Any]) -> ChatTemplate:
        named = "tool_use" if body.get("tools") else "default"
        template = self._templates.get(named) or self._templates.get("default")
        if template is None:
            raise Uncountable(Why.TEMPLATE, "the model has no chat template")
        return template

    async def _run(self, count: Callable[[], tuple[int, ...]], size: int) -> tuple[int, ...]:
        if size <= self._inline_bytes:
            return count()
        if self.waiting >= self._most_waiting:
            raise Uncountable(Why.BUSY)
        future = asyncio.get_running_loop().run_in_executor(self._pool, count)
        self.waiting += 1
        future.add_done_callback(self._one_less)
        done, _ = await asyncio.wait((future,), timeout=self._timeout_s)
        if not done:
            future.cancel()
            raise Uncountable(Why.TIMEOUT)
        return future.result()

    def _one_less(self, future: "asyncio.Future[tuple[int, ...]]") -> None:
        self.waiting -= 1
        if not future.cancelled():
            future.exception()  # a late failure has no reader any more

    # --- on the loop for short texts, in a thread for long ones --------------------------------------

    def _render(self, template: ChatTemplate, body: Mapping[str, Any]) -> tuple[int, ...]:
        messages = conversation(body.get("messages"), wrap=template.wants_parts)
        text = template.render(messages, tool_list(body.get("tools")), template_options(body))
        specials = body.get("add_special_tokens", False)
        if not isinstance(specials, bool):
            raise Uncountable(Why.SHAPE, "add_special_tokens is no boolean")
        return self._encode([text], specials)

    def _encode(self, texts: list[str], add_special_tokens: bool) -> tuple[int, ...]:
        context = self.context()
        if context is not None and max(map(len, texts), default=0) > context * self._longest_token:
            return tuple(-(-len(text) // self._longest_token) for text in texts)
        if sum(map(len, texts)) > self._max_chars:
            raise Uncountable(Why.TOO_LARGE)
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except Exception as error:  # lone surrogates (TypeError), or whatever the native code could not do
            raise Uncountable(Why.TEXT, str(error)) from error
        return tuple(map(len, encodings))
