"""kvctl's daemon with a probe on its loop: ``python -m tests.bench.dataplane.probed FILE``.

Settings as KVCTL_* variables. Every millisecond it notes, in seconds, how late the loop woke it.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import uvloop

from kvctl.process import prepare_interpreter, serve
from kvctl.settings.loading import load

PERIOD_S = 0.001
FLUSH = 200


async def probe(target: Path) -> None:
    delays: list[str] = []
    with target.open("w") as out:
        while True:
            due = time.perf_counter() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            delays.append(f"{max(time.perf_counter() - due, 0):.6f}")
            if len(delays) >= FLUSH:
                out.write("\n".join(delays) + "\n")
                out.flush()
                delays.clear()


async def main(target: Path) -> None:
    task = asyncio.get_running_loop().create_task(probe(target))
    try:
        await serve(load(None, os.environ), stop=asyncio.Event())
    finally:
        task.cancel()


if __name__ == "__main__":
    prepare_interpreter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(Path(sys.argv[1])))
