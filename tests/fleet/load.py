"""``python -m tests.fleet.load PORT BODY RATE SECONDS``: an open-loop load; refusals are no errors."""

import asyncio
import sys

from tests.bench.dataplane.client import Call, connect, request


async def one(pool: list[Call], port: int, ask: bytes) -> None:
    call = pool.pop() if pool else await connect(port)
    try:
        await call.ask(ask)
    except (RuntimeError, ConnectionError):
        call.close()
    else:
        pool.append(call)


async def main(port: int, ask: bytes, rate: float, seconds: float) -> None:
    pool: list[Call] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(int(rate * seconds)):
            group.create_task(one(pool, port, ask))
            await asyncio.sleep(1 / rate)


if __name__ == "__main__":
    where, body, rate, seconds = sys.argv[1:]
    asyncio.run(main(int(where), request("/v1/completions", body.encode()), float(rate), float(seconds)))
