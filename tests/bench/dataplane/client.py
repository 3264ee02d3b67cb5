"""The load: raw HTTP/1.1 over uvloop, so that the client is no bottleneck and adds little noise."""

import asyncio
import time
from collections.abc import Iterable
from typing import cast


class Call(asyncio.Protocol):
    """One kept-alive connection; ``ask`` sends a request and returns the seconds to its last byte."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._got = bytearray()
        self.events = 0
        self.first_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("closed in the middle of an answer"))

    def data_received(self, data: bytes) -> None:
        if not self._got:
            self.first_at = time.perf_counter()
        self._got += data
        if self._whole() and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _whole(self) -> bool:
        border = self._got.find(b"\r\n\r\n")
        if border < 0:
            return False
        head = bytes(self._got[:border]).lower()
        at = head.find(b"content-length:")
        if at >= 0:
            return len(self._got) >= border + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])
        return self._got.endswith(b"0\r\n\r\n")

    async def ask(self, request: bytes) -> float:
        """Raises ConnectionError, or RuntimeError on any status but 200."""
        assert self._transport is not None
        self._got.clear()
        self._done = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._transport.write(request)
        await self._done
        taken = time.perf_counter() - started
        if not self._got.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(bytes(self._got[:300]).decode(errors="replace"))
        self.events += self._got.count(b"data: ")
        return taken

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def connect(port: int) -> Call:
    call = Call()
    await asyncio.get_running_loop().create_connection(lambda: call, "127.0.0.1", port)
    return call


def request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def closed_loop(port: int, asks: Iterable[bytes], *, connections: int) -> list[float]:
    """An answer to each of ``asks`` over ``connections``; seconds of each."""
    left = iter(asks)
    taken: list[float] = []

    async def work() -> None:
        call = await connect(port)
        taken.extend([await call.ask(ask) for ask in left])
        call.close()

    await asyncio.gather(*(work() for _ in range(connections)))
    return taken


async def streams(port: int, ask: bytes, count: int) -> int:
    """``count`` streams side by side to their end; events that came."""
    calls = [await connect(port) for _ in range(count)]
    await asyncio.gather(*(call.ask(ask) for call in calls))
    for call in calls:
        call.close()
    return sum(call.events for call in calls)


async def open_loop(port: int, asks: Iterable[bytes], *, rate: float) -> list[float]:
    """``rate`` requests a second whatever the answers do; seconds of each.

    The loop's own time has milliseconds under uvloop, so the clock is another.
    """
    pool = [await connect(port) for _ in range(64)]
    taken: list[float] = []
    tasks = set()

    async def one(ask: bytes) -> None:
        call = pool.pop() if pool else await connect(port)
        taken.append(await call.ask(ask))
        pool.append(call)

    started = time.perf_counter()
    for number, ask in enumerate(asks):
        await asyncio.sleep(max(started + number / rate - time.perf_counter(), 0))
        task = asyncio.create_task(one(ask))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for call in pool:
        call.close()
    return taken
