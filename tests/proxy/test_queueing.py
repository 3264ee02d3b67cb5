"""Requests that wait, on real sockets: started by a release, left by their caller, answered in a drain."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvctl.core.events import DrainChanged, Reconfigured
from kvctl.core.outcomes import EndReason
from kvctl.core.queue import QueueConfig
from kvctl.core.supply import GateConfig
from kvctl.core.tenants import TenantRule
from tests.proxy.harness import CHAT, PLAIN, Rig, Wire, eventually, plain, post, rig

CAPACITY = 48  # three blocks, two within the margin: two requests at once


@asynccontextmanager
async def waiting(release: asyncio.Event, **config: object) -> AsyncIterator[Rig]:
    """A proxy with a queue before an engine that answers after ``release``."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await release.wait()
            await wire.send(plain(PLAIN))

    async with rig(script, capacity=CAPACITY) as it:
        made = GateConfig(
            capacity_tokens=CAPACITY,
            capacity_force=True,
            ttft_target_s=None,
            queue=QueueConfig(max_wait_s=600.0),
            **config,  # type: ignore[arg-type]
        )
        it.keeper.handle(Reconfigured(made))
        yield it


def in_queue(it: Rig) -> int:
    return len(it.gate._room)


async def test_one_that_waits_is_answered_as_if_it_had_not() -> None:
    release = asyncio.Event()
    async with waiting(release) as it:
        asked = [asyncio.create_task(it.post()) for _ in range(4)]
        await eventually(lambda: (in_queue(it), it.proxy.in_flight) == (2, 2))
        release.set()
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in await asyncio.gather(*asked))
        assert it.reasons == [EndReason.FINISHED] * 4
        await it.quiet()


async def test_a_caller_who_leaves_the_queue_is_noticed_at_once() -> None:
    """Law 1: nothing is charged for it, and its body is let go."""
    release = asyncio.Event()
    async with waiting(release) as it:
        running = [asyncio.create_task(it.post()) for _ in range(2)]
        await eventually(lambda: it.proxy.in_flight == 2)
        gone = await it.client()
        await gone.send(post(CHAT))
        await eventually(lambda: in_queue(it) == 1)
        gone.reset()
        await eventually(lambda: in_queue(it) == 0)
        assert it.proxy.in_flight == 2
        release.set()
        await asyncio.gather(*running)
        assert it.engine.accepted == 2
        await it.quiet()


async def test_a_drain_answers_those_who_wait() -> None:
    release = asyncio.Event()
    async with waiting(release) as it:
        running = [asyncio.create_task(it.post()) for _ in range(2)]
        await eventually(lambda: it.proxy.in_flight == 2)
        queued = asyncio.create_task(it.post())
        await eventually(lambda: in_queue(it) == 1)
        it.keeper.handle(DrainChanged(draining=True))
        answer = await queued
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"x-kvctl-reason: draining" in answer
        release.set()
        assert all(one.startswith(b"HTTP/1.1 200 ") for one in await asyncio.gather(*running))


async def test_one_let_in_while_its_caller_leaves_gives_its_lease_back() -> None:
    """The start and the cancellation meet in one turn of the loop."""
    release = asyncio.Event()
    async with waiting(release) as it:
        running = [asyncio.create_task(it.post()) for _ in range(2)]
        await eventually(lambda: it.proxy.in_flight == 2)
        from tests.core.conversation import shape  # noqa: PLC0415 - one use

        for leaves_first in (False, True):
            admitted = asyncio.create_task(it.keeper.admit(f"late-{leaves_first}", shape(1, 8)))
            await eventually(lambda: in_queue(it) == 1)
            wider = GateConfig(capacity_tokens=480, capacity_force=True)
            if leaves_first:
                admitted.cancel()
                it.keeper.handle(Reconfigured(wider))
            else:
                it.keeper.handle(Reconfigured(wider))
                admitted.cancel()
            await asyncio.gather(admitted, return_exceptions=True)
            assert len(it.gate.ledger) == 2
            narrow = GateConfig(
                capacity_tokens=CAPACITY,
                capacity_force=True,
                ttft_target_s=None,
                queue=QueueConfig(max_wait_s=600.0),
            )
            it.keeper.handle(Reconfigured(narrow))
        release.set()
        await asyncio.gather(*running)
        assert it.reasons.count(EndReason.CLIENT_GONE) == 2


async def test_a_tenants_limit_tells_quota_from_capacity() -> None:
    """E10: a router can tell a quota, which no other replica lifts, from a replica that is full."""
    release = asyncio.Event()
    release.set()
    async with waiting(release, tenants=(TenantRule(name="default", requests_per_minute=1),)) as it:
        assert (await it.post()).startswith(b"HTTP/1.1 200 ")
        await it.quiet()
        answer = await it.post()
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b'"code":"tenant_budget_exceeded"' in answer
        assert b"x-kvctl-reason: tenant_requests_per_minute" in answer
        after = int(answer.partition(b"Retry-After: ")[2].partition(b"\r")[0])
        assert 1 <= after <= 60


async def test_in_shadow_nobody_is_refused() -> None:
    release = asyncio.Event()
    async with waiting(release, enforce_ratio=0.0) as it:
        asked = [asyncio.create_task(it.post()) for _ in range(6)]
        await eventually(lambda: it.proxy.in_flight == 6)
        release.set()
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in await asyncio.gather(*asked))
