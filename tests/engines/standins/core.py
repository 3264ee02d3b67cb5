"""What all stand-ins share: a pool, a batch that makes a token a step, and an HTTP server around it.

The step is short and nothing is random: the answer to a request is as many tokens as it asked for, or as the
stand-in's ``natural`` length says where that is less. A test holds the batch with ``hold`` and lets it go.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiohttp import web

STEP_S = 0.002


@dataclass(eq=False)
class Run:
    """One request in the batch."""

    prompt: int
    most: int
    made: int = 0
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)


class Standin:
    """A server with ``capacity`` KV tokens that runs at most ``slots`` requests at once, the rest waits."""

    name: ClassVar[str]

    def __init__(
        self, *, context: int = 4096, capacity: int = 16_000, slots: int = 64, natural: int = 10_000
    ) -> None:
        self.context, self.capacity, self.slots, self.natural = context, capacity, slots, natural
        self.running: list[Run] = []
        self.waiting: list[Run] = []
        self.steps = 0
        self.prompt_total = 0
        self.output_total = 0
        self.finished: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self.moving = asyncio.Event()
        self.moving.set()
        self._runner: web.AppRunner | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    # --- what a test does ---------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Inside, it listens; ``port`` 0: any free one."""
        app = web.Application()
        self.routes(app)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._task = asyncio.create_task(self._step())
        try:
            yield self.url
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._runner.cleanup()

    def hold(self) -> None:
        """No step from now on."""
        self.moving.clear()

    def go(self) -> None:
        """Steps again."""
        self.moving.set()

    # --- what an engine of its kind says ------------------------------------------------------------

    def routes(self, app: web.Application) -> None:
        raise NotImplementedError

    @property
    def used(self) -> int:
        """KV tokens held."""
        return sum(run.prompt + run.made for run in self.running)

    # --- the batch ----------------------------------------------------------------------------------

    def fits(self, run: Run) -> bool:
        """Whether ``run`` may join the batch now."""
        return len(self.running) < self.slots and self.used + run.prompt <= self.capacity

    async def _step(self) -> None:
        while True:
            await self.moving.wait()
            while self.waiting and self.fits(self.waiting[0]):
                self.running.append(self.waiting.pop(0))
            if self.running:
                self.steps += 1
            for run in list(self.running):
                run.made += 1
                run.tokens.put_nowait(run.made)
                if run.made >= run.most:
                    self.leave(run)
            await asyncio.sleep(STEP_S)

    def leave(self, run: Run) -> None:
        """A request is over, or its client is gone."""
        if run in self.waiting:
            self.waiting.remove(run)
        if run in self.running:
            self.running.remove(run)
            self.prompt_total += run.prompt
            self.output_total += run.made
            self.finished.append(run.made)
        run.tokens.put_nowait(None)

    @contextlib.contextmanager
    def run(self, prompt: int, most: int) -> Iterator[Run]:
        """A request in the batch, and out of it whatever happens."""
        run = Run(prompt, max(1, min(most, self.natural)))
        self.waiting.append(run)
        try:
            yield run
        finally:
            self.leave(run)

    async def whole(self, prompt: int, most: int) -> Run:
        """Run to the end."""
        with self.run(prompt, most) as run:
            while await run.tokens.get() is not None:
                pass
        return run

    async def each(self, prompt: int, most: int) -> AsyncIterator[tuple[int, bool]]:
        """Number of each token, and whether it is the last."""
        with self.run(prompt, most) as run:
            while (number := await run.tokens.get()) is not None:
                yield number, number >= run.most


async def read(request: web.Request, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """The body, kept for the test."""
    body: dict[str, Any] = await request.json()
    seen.append(body)
    return body


async def event_stream(request: web.Request) -> web.StreamResponse:
    """The head of a stream of events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def words(text: str) -> int:
    """Tokens of a prompt, as all stand-ins count."""
    return max(1, len(text.split()))
