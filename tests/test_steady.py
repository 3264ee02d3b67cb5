"""What the tests stand on: a loop on which no stall of the machine is time, and ports of one's own."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ports import BLOCK, free_port
from tests.steady import MOST_TRIES, SteadyLoop, in_time

STALL_S = 0.3


async def test_a_stall_is_no_time() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteadyLoop)
    before = loop.time()
    time.sleep(STALL_S)  # noqa: ASYNC251 - the stall
    await asyncio.sleep(0)
    assert loop.time() - before < STALL_S / 2


async def test_what_was_in_time_but_for_a_stall_is_in_time() -> None:
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, STALL_S)
    loop.call_soon(loop.call_soon, done.set)
    async with asyncio.timeout(STALL_S / 2):
        await done.wait()


async def test_whoever_does_nothing_is_too_late() -> None:
    before = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()
    assert time.monotonic() - before >= 0.05


async def test_threads_and_processes_are_heard() -> None:
    assert await asyncio.to_thread(lambda: 7) == 7
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(3)")
    assert await process.wait() == 3


async def test_a_scenario_is_played_again_only_if_the_loop_stood_still() -> None:
    tries: list[float] = []

    async def fails(stall_s: float) -> None:
        tries.append(stall_s)
        await asyncio.sleep(0.01)
        time.sleep(stall_s)  # noqa: ASYNC251 - the stall
        await asyncio.sleep(0.01)
        assert len(tries) == 3

    await in_time(lambda: fails(0.1), 0.1)
    assert len(tries) == 3
    tries.clear()
    with pytest.raises(AssertionError):
        await in_time(lambda: fails(0.0), 3600.0)
    assert len(tries) == 1


async def test_a_scenario_that_always_fails_fails() -> None:
    tries: list[int] = []

    async def fails() -> None:
        tries.append(1)
        time.sleep(0.01)  # noqa: ASYNC251 - the stall
        raise LookupError

    with pytest.raises(LookupError):
        await in_time(fails, 0.001)
    assert len(tries) <= MOST_TRIES


def test_no_port_is_handed_out_twice() -> None:
    script = f"from tests.ports import free_port\nprint(*[free_port() for _ in range({BLOCK + 1})])"
    others = [
        subprocess.Popen(
            [sys.executable, "-c", script], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    ports = [free_port() for _ in range(BLOCK + 1)]
    for each in others:
        ports += map(int, each.communicate()[0].split())
    assert len(set(ports)) == 3 * (BLOCK + 1)
