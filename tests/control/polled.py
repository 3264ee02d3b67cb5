"""Engines that answer polls as told, and a scraper with what it emitted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from aiohttp import web

from kvctl.control.poll import Poller
from kvctl.control.scraper import Scraper
from kvctl.core.events import EngineDescribed, Scraped, ScrapeFailed
from kvctl.engines.vllm import VLLM
from tests.ports import free_port

PAGES = Path(__file__).parent.parent / "conformance" / "pages"
PAGE = (PAGES / "vllm-0.32-overloaded.prom").read_text()
PATIENCE_S = 60.0
Event = Scraped | ScrapeFailed | EngineDescribed
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def page(*, preempted: int = 404, started: str = "1.79598200909e+09") -> str:
    changed = PAGE.replace('num_preemptions_total{engine="0",model_name="tiny"} 404.0',
                           f'num_preemptions_total{{engine="0",model_name="tiny"}} {preempted}')  # fmt: skip
    return changed.replace(
        "process_start_time_seconds 1.79598200909e+09", f"process_start_time_seconds {started}"
    )


@dataclass
class FakeEngine:
    """Answers /metrics and /v1/models as told, and counts what is asked at once."""

    text: str = PAGE
    status: int = 200
    delay_s: float = 0.0
    models: str = '{"data":[{"id":"tiny","max_model_len":8192}]}'
    asked: list[str] = field(default_factory=list)
    headers: list[str | None] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        self.asked.append("metrics")
        self.headers.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.at_once -= 1
        return web.Response(text=self.text, status=self.status)

    async def model_list(self, _request: web.Request) -> web.StreamResponse:
        self.asked.append("models")
        return web.Response(text=self.models, content_type="application/json")


@asynccontextmanager
async def served(
    metrics: Handler, models: Handler, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, host, port or free_port())  # which may be left and taken again
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw(answer: bytes | None, *, reset: bool = False) -> AsyncIterator[int]:
    """Reads a head, sends ``answer`` (None: nothing) and closes, or resets, the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            if answer is not None:
                writer.write(answer)
                await writer.drain()
            if reset:
                writer.transport.abort()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Watched:
    """A scraper and the events that it emitted."""

    def __init__(
        self, url: str, *, interval_s: float = 0.005, info_interval_s: float = 600.0,
        timeout_s: float = PATIENCE_S, max_bytes: int = 1 << 20, authorization: str | None = None,
    ) -> None:  # fmt: skip
        self.events: list[Event] = []
        poller = Poller(url, timeout_s=timeout_s, max_bytes=max_bytes, authorization=authorization)
        self.scraper = Scraper(
            VLLM(), poller, self.events.append, interval_s=interval_s, info_interval_s=info_interval_s
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.scraper.close()

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not ready():  # noqa: ASYNC110 - what is waited for is a count, not an event
            await asyncio.sleep(0.002)


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
