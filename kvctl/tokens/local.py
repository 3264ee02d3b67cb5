"""The model's own tokenizer and template, in this process.

Law 6: nothing slow on the loop. Short texts are encoded inline (a hand-over costs 0.1 ms); longer ones in a
few threads, with a deadline and bounds on how many wait and on what they hold. ``encode_batch_fast`` releases
the GIL while it works, ``encode`` does not.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvctl.tokens.files import ModelFiles
from kvctl.tokens.source import OwnTokenizer, Tally, Uncountable, Why
from kvctl.tokens.tokeniser import Tokeniser

WAITING_PER_WORKER = 32
WAITING_BYTES = 256 * 1024 * 1024


class LocalCounter(OwnTokenizer):
    """A source of exact counts from a model's files.

    ``inline_bytes``: texts up to this length are encoded on the loop. ``workers``: threads for longer ones.
    ``timeout_s``: how long a caller waits for one of those, queueing included. ``waiting_bytes``: the most
    that all waiting texts together may hold.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        inline_bytes: int = 2048,
        workers: int = 2,
        timeout_s: float = 5.0,
        max_chars: int = 16 * 1024 * 1024,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        super().__init__(files.vocab_size, sorted(files.templates))
        self._tokeniser = Tokeniser(files, max_chars=max_chars)
        self._inline_bytes = inline_bytes
        self._timeout_s = timeout_s
        self._most_waiting = workers * WAITING_PER_WORKER
        self._most_bytes = waiting_bytes
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kvctl-tokens")
        self._held = 0  # bytes of what waits

    async def text(self, model: str, prompts: Sequence[str], *, add_special_tokens: bool) -> tuple[int, ...]:
        """Tokens of each prompt. Raises Uncountable."""
        del model
        count = functools.partial(self._tokeniser.texts, prompts, add_special_tokens, self.view())
        return await self._run(count, sum(map(len, prompts)))

    async def chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> int:
        """Prompt tokens of a chat body. Raises Uncountable."""
        del model
        (count,) = await self._run(functools.partial(self._tokeniser.chat, body, self.view()), body_bytes)
        return count

    async def other_way(self) -> bool:
        """Load the tokenizer as other versions of the engine's libraries do, or back again."""
        return await asyncio.to_thread(self._tokeniser.other_way)

    @property
    def tally(self) -> Tally:
        """The work of the segment cache so far."""
        return self._tokeniser.tally

    @property
    def keeps(self) -> bool:
        """Whether counts of segments are cached."""
        return self._tokeniser.keeps

    async def close(self) -> None:
        """Let the threads end, without waiting for what they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, count: Callable[[], tuple[int, ...]], size: int) -> tuple[int, ...]:
        if size <= self._inline_bytes:
            return count()
        if self.waiting >= self._most_waiting or (self.waiting and self._held + size > self._most_bytes):
            raise Uncountable(Why.BUSY)
        future = asyncio.get_running_loop().run_in_executor(self._pool, count)
        self.waiting += 1
        self._held += size
        future.add_done_callback(functools.partial(self._one_less, size))
        done, _ = await asyncio.wait((future,), timeout=self._timeout_s)
        if not done:
            future.cancel()
            raise Uncountable(Why.TIMEOUT)
        return future.result()

    def _one_less(self, size: int, future: "asyncio.Future[tuple[int, ...]]") -> None:
        self.waiting -= 1
        self._held -= size
        if not future.cancelled():
            future.exception()  # nobody reads a late failure
