"""What may hold, fill or outlive a stream, asked for by settings, through the daemon as a process."""

import asyncio
import re
from pathlib import Path

from tests.proxy.harness import (
    CHAT_STREAM,
    DONE,
    LAST,
    STREAM_HEAD,
    FakeEngine,
    Wire,
    chunk,
    event,
    get,
    plain,
    post,
)
from tests.test_serve import MODELS, PAGE, PATIENCE_S, daemon, until

NO_LEASE = re.compile(r"^kvctl_leases(\{[^}]*\})? 0", re.MULTILINE)
BUSY = b'data: {"error":{"message":"too busy","type":"overloaded","code":503}}\n\n'


class Engine:
    """The first stream is refused inside its 200, the second is silent until its caller has left."""

    def __init__(self) -> None:
        self.streams = 0
        self.go_on = asyncio.Event()
        self.read_to_the_end = asyncio.Event()

    async def __call__(self, wire: Wire) -> None:
        pages = {b"/metrics": PAGE, b"/v1/models": MODELS}
        while True:
            path = (await wire.request()).line.split(b" ")[1]
            if path in pages:
                await wire.send(plain(pages[path]))
                continue
            self.streams += 1
            if self.streams == 1:
                await wire.send(STREAM_HEAD + chunk(BUSY + DONE) + LAST)
                continue
            await wire.send(STREAM_HEAD + chunk(event("a")))
            await self.go_on.wait()
            await wire.send(chunk(event("", "stop") + DONE) + LAST)
            self.read_to_the_end.set()


async def test_peek_heartbeat_and_drain_are_settings(tmp_path: Path) -> None:
    script = Engine()
    engine = FakeEngine(script)
    await engine.start()
    try:
        async with daemon(
            tmp_path,
            f"http://127.0.0.1:{engine.port}",
            FIRST_EVENT_PEEK="60s",
            STREAM_HEARTBEAT="100ms",
            ENGINE_DRAIN_ON_ABORT="true",
        ) as it:
            async with asyncio.timeout(PATIENCE_S):
                answer = b"engine_starting"
                while b"engine_starting" in answer:
                    answer = await it.post(CHAT_STREAM)
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"too busy" in answer
                wire = await it.client()
                await wire.send(post(CHAT_STREAM))
                await wire.reader.readuntil(event("a"))
                await wire.reader.readuntil(b": keep-alive\n\n")
                wire.reset()
                for _ in range(2):  # what comes behind the reset is answered: so it was seen
                    await it.ask(get("/healthz"))
                assert not NO_LEASE.search(await it.metrics())
                script.go_on.set()
                await script.read_to_the_end.wait()
                while not NO_LEASE.search(await it.metrics()):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.02)
            await until(lambda: script.streams == 2)
    finally:
        await engine.stop()
