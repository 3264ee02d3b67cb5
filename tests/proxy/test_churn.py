"""Faults at random on both sides: nothing is left behind."""

import asyncio
import gc
import os
import random
from collections.abc import Awaitable, Callable

from kvctl.core.outcomes import EndReason, ProxyFault, RejectReason
from kvctl.proxy.seams import ProxyConfig
from tests.proxy.harness import (
    CHAT,
    CHAT_STREAM,
    DONE,
    LAST,
    PLAIN,
    STREAM,
    STREAM_HEAD,
    Rig,
    Wire,
    chunk,
    event,
    eventually,
    plain,
    post,
    rig,
)

WHOLE = STREAM_HEAD + chunk(STREAM) + LAST
ANSWERS = (
    plain(PLAIN),
    WHOLE,
    plain(b'{"error":{}}', "429 Too Many Requests"),
    plain(b"", "503 Busy"),
    STREAM_HEAD
    + b"".join(chunk(event(str(n))) for n in range(50))
    + chunk(event("", "length") + DONE)
    + LAST,
    b"nonsense",
)


def engine(dice: random.Random) -> Callable[[Wire], Awaitable[None]]:
    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            answer = dice.choice(ANSWERS)
            end = dice.choice(("whole", "whole", "whole", "cut", "reset", "hang"))
            if end != "whole":
                answer = answer[: dice.randrange(len(answer))]
            await wire.send_split(answer, dice.choice((3, 50, 100_000)))
            if end == "hang":
                await asyncio.sleep(0.05)
            if end == "reset":
                wire.reset()
            if end != "whole" or answer == b"nonsense":
                return

    return script


async def client(it: Rig, dice: random.Random) -> None:
    for _ in range(12):
        wire = await it.client()
        request = post(dice.choice((CHAT, CHAT_STREAM)), "/v1/chat/completions", b"Connection: close")
        if dice.random() < 0.2:
            request = request[: dice.randrange(len(request))]
        try:
            await wire.send(request)
            async with asyncio.timeout(dice.choice((0.0, 0.005, 0.02, 0.2))):
                await wire.reader.read()
        except (TimeoutError, ConnectionError):
            pass
        if dice.random() < 0.3:
            wire.reset()
        wire.close()


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count of names is all that is wanted


async def test_churn_leaves_no_lease_no_descriptor_no_defect() -> None:
    dice = random.Random(20)
    config = ProxyConfig(client_write_timeout=0.2, body_timeout=0.1, header_timeout=0.2)
    async with rig(engine(dice), config=config) as it:
        await asyncio.gather(*(client(it, dice) for _ in range(4)))
        await it.quiet()
        await asyncio.gather(*(client(it, dice) for _ in range(24)))
        while len(set(it.reasons)) < 4:  # also where all wait too long
            await client(it, dice)
        await it.quiet()
        await it.upstream.close()
        await eventually(lambda: it.engine.open == 0)
        assert it.upstream.connections == 0
        rejects = [record.reject for record in it.seen.records if record.reject is not None]
        assert set(rejects) <= {RejectReason.ENGINE_UNREACHABLE}  # by a machine that stands still
        assert len(it.ended) + len(rejects) == it.seen.admissions
        assert EndReason.CANCELLED not in it.reasons
        assert ProxyFault.DEFECT not in it.seen.faults


async def test_descriptors_after_a_whole_life_are_those_before() -> None:
    counts: list[int] = []
    for _ in range(3):
        async with rig(engine(random.Random(3))) as it:
            await asyncio.gather(*(client(it, random.Random(n)) for n in range(4)))
        if counts:
            await eventually(lambda: descriptors() <= counts[0])
        else:
            await asyncio.sleep(0.05)
        counts.append(descriptors())
