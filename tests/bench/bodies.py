"""``python -m tests.bench.bodies --count 500 --mib 64``: large bodies at once, and the memory that they take.

Bodies are sent as fast as they are taken. Those beyond ``max_body_bytes_total`` must be refused (503) before
they are read, the rest served, and the daemon's memory must stay near the bound. JSON on standard output.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.bench.churn import rss
from tests.live.daemon import Daemon
from tests.proxy.harness import PLAIN, FakeEngine, Wire, plain
from tests.test_serve import MODELS, PAGE

MIB = 1 << 20
START = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":4,"user":"'
SETTINGS = {"TOKENIZER": "bound", "GPUS": "none", "LOG_LEVEL": "warning"}


async def engine(wire: Wire) -> None:
    """Answers everything, bodies unread by anybody."""
    answers = {b"/metrics": PAGE, b"/v1/models": MODELS}
    while True:
        head = await wire.reader.readuntil(b"\r\n\r\n")
        left = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
        while left:
            left -= len(await wire.reader.read(min(left, MIB)))
        await wire.send(plain(answers.get(head.split(b" ")[1], PLAIN)))


async def send_one(port: int, size: int, seen: Counter[str]) -> None:
    """One request of ``size`` bytes; its status, however early it comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {size}\r\n\r\n".encode() + START)
    answer = asyncio.create_task(reader.read(15))
    left, filler = size - len(START) - 2, b"x" * MIB
    with suppress(ConnectionError):
        while left and not answer.done():
            writer.write(filler[:left])
            left -= min(left, MIB)
            await writer.drain()
        writer.write(b'"}' if not left else b"")
    try:
        seen[(await answer)[9:12].decode() or "closed"] += 1
    except ConnectionError:
        seen["reset"] += 1
    writer.close()


async def run(count: int, size: int, settings: dict[str, str] | None = None) -> dict[str, Any]:
    """All at once; what was answered, and resident bytes before, at most, and after."""
    behind, seen, samples = FakeEngine(engine), Counter[str](), list[int]()
    await behind.start()
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(f"http://127.0.0.1:{behind.port}", Path(folder), SETTINGS | (settings or {}))
        await asyncio.to_thread(daemon.start)
        try:
            await asyncio.to_thread(daemon.wait_ready)
            pid = daemon.process.pid if daemon.process is not None else 0
            before, began = rss(pid), time.monotonic()
            watch = asyncio.create_task(_sample(pid, samples))
            await asyncio.gather(*(send_one(daemon.port, size, seen) for _ in range(count)))
            took = time.monotonic() - began
            await asyncio.to_thread(daemon.wait_empty)
            watch.cancel()
            await asyncio.sleep(1)
            after = rss(pid)
        finally:
            await asyncio.to_thread(daemon.stop)
            await behind.stop()
    return {
        "bodies": count,
        "body_bytes": size,
        "seconds": round(took, 1),
        "statuses": dict(seen),
        "rss_before": before,
        "rss_peak_above": max(samples) - before,
        "rss_after_above": after - before,
    }


async def _sample(pid: int, into: list[int]) -> None:
    while True:
        into.append(rss(pid))
        await asyncio.sleep(0.02)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bodies", description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args()
    report = asyncio.run(run(options.count, options.mib * MIB))
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
