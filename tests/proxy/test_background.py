"""Responses that are generated in the background: their lease is kept until the engine is done with them."""

import asyncio
import json
import random
from pathlib import Path

import aiohttp
import pytest

from kvctl.core.events import Command, LeaseEnded
from kvctl.core.outcomes import SERVING, EndReason
from kvctl.proxy import watching
from kvctl.sim.server import SimServer
from tests.proxy.afterlife import PATH, Body, afterlife, asked, events

LONG = 4000  # tokens; half a minute


async def test_the_lease_outlives_the_request_and_ends_with_the_true_usage(tmp_path: Path) -> None:
    async with afterlife(tmp_path) as it:
        name = await it.begin(60)
        assert it.it.gate.leases == 1
        assert it.proxy.in_flight == 1
        page = b"".join(it.it.daemon.metrics()[0]).decode()
        assert "\nkvctl_background_responses 1.0\n" in page
        await it.until(lambda: it.reasons)
        assert it.reasons == [EndReason.FINISHED]
        told = (await it.tell(name)).json
        assert told["status"] == "completed"
        ended = it.ended[0]
        assert (ended.output_tokens, ended.prompt_tokens) == (60, told["usage"]["input_tokens"])


async def test_the_answer_passes_byte_for_byte(tmp_path: Path) -> None:
    async with afterlife(tmp_path) as it:
        answer = await it.it.post(PATH, asked(20))
        assert it.engine.responses.kept[answer.json["id"]].document.keys() == answer.json.keys()
        assert json.dumps(answer.json).encode() == answer.body
        await it.until(lambda: it.reasons)


async def test_an_answer_at_its_limit_is_capped(tmp_path: Path) -> None:
    async with afterlife(tmp_path) as it:
        await it.begin(100, max_output_tokens=30)
        await it.until(lambda: it.reasons)
        assert (it.reasons, it.ended[0].output_tokens) == ([EndReason.CAPPED], 30)


async def test_it_is_weighed_as_any_other_and_holds_its_claim(tmp_path: Path) -> None:
    async with afterlife(tmp_path, blocks=101, POLICY="static") as it:
        name = await it.begin(LONG, max_output_tokens=900)
        assert 900 < it.it.gate.claimed_tokens < 960
        refused = await it.it.post(PATH, asked(600, max_output_tokens=800))
        assert (refused.status, refused.headers["x-kvctl-reason"]) == (429, "kv_budget")
        await it.it.post(f"{PATH}/{name}/cancel", {})
        await it.until(lambda: it.reasons)


async def test_a_stream_read_to_its_end(tmp_path: Path) -> None:
    async with afterlife(tmp_path) as it, aiohttp.ClientSession() as session:
        async with session.post(it.it.url + PATH, json=asked(40, stream=True)) as answer:
            kinds = [event["type"] async for event in events(answer)]
        assert kinds.count("response.output_text.delta") == 40
        await it.until(lambda: it.reasons)
        assert (it.reasons, it.ended[0].output_tokens) == ([EndReason.FINISHED], 40)


async def test_a_stream_that_is_left_goes_on_and_can_be_read_on(tmp_path: Path) -> None:
    async with afterlife(tmp_path) as it, aiohttp.ClientSession() as session:
        async with session.post(it.it.url + PATH, json=asked(400, stream=True)) as answer:
            reading = events(answer)
            begun = await anext(reading)
            seen = [await anext(reading) for _ in range(5)]
        name, after = begun["response"]["id"], seen[-1]["sequence_number"]
        await it.until(lambda: it.proxy._handler.afterlife.alone == 1)
        assert it.it.gate.leases == 1
        query = f"?stream=true&starting_after={after}"
        async with session.get(f"{it.it.url}{PATH}/{name}{query}") as answer:
            rest = [event async for event in events(answer)]
        assert rest[0]["sequence_number"] == after + 1
        assert rest[-1]["type"] == "response.completed"
        await it.until(lambda: it.reasons)
        assert (it.reasons, it.ended[0].output_tokens) == ([EndReason.FINISHED], 400)


async def test_one_that_is_cancelled(tmp_path: Path) -> None:
    """Through kvctl it is looked at at once."""
    async with afterlife(tmp_path) as it:
        name = await it.begin(LONG)
        answer = await it.it.post(f"{PATH}/{name}/cancel", {})
        assert (answer.status, answer.json["status"]) == (200, "cancelled")
        await it.until(lambda: it.reasons)
        assert it.reasons == [EndReason.CALLER_CANCELLED]
        assert it.engine.engine.scheduler.idle


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_failed_is_told_as_queued_for_ever(
    tmp_path: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's page tells that it holds nothing, before the engine counts as wedged for it."""
    async with afterlife(tmp_path, STALL_TIMEOUT="8s") as it, aiohttp.ClientSession() as session:
        body = asked(100, sim_fails_after=5, stream=stream)
        async with session.post(it.it.url + PATH, json=body) as answer:
            if not stream:
                assert (await answer.json())["status"] == "queued"
            await it.until(lambda: it.reasons)
        assert it.reasons == [EndReason.ENGINE_IDLE]
        assert "holds no request" in caplog.text
        assert caplog.text.count("is ended") == 1
        await it.it.until(lambda status: status.state in SERVING)  # on trial, if the machine stood still
        assert (await it.it.post("/generate", {"prompt_tokens": 5, "max_new_tokens": 3})).status == 200


async def test_one_that_failed_while_others_come_and_go(tmp_path: Path) -> None:
    """Long before the engine stood still for the stall timeout: its counters moved, and it was empty."""
    async with afterlife(tmp_path, STALL_TIMEOUT="10min") as it:
        await it.begin(100, sim_fails_after=5)
        while EndReason.ENGINE_IDLE not in it.reasons:
            assert (await it.it.post("/generate", {"prompt_tokens": 5, "max_new_tokens": 3})).status == 200
            await asyncio.sleep(0.3)


async def test_an_engine_that_restarts_forgot_it(tmp_path: Path) -> None:
    async with afterlife(tmp_path) as it:
        await it.begin(LONG)
        await it.until(lambda: it.engine.engine.scheduler.running)
        watch = next(iter(it.proxy._handler.afterlife._watches.values()))
        await it.until(lambda: all(each.unseen._samples for each in watch._watched.values()))  # its page was
        await it.engine.close()
        assert it.it.gate.leases == 1
        fresh = SimServer(it.engine.engine.config, keeps_responses=True)
        await fresh.start(port=it.engine.port)
        it.engine = fresh
        try:
            await it.until(lambda: it.reasons)
            assert it.reasons == [EndReason.ENGINE_FORGOT]
        finally:
            await it.it.empty()
            await fresh.close()


async def test_the_end_of_a_drain_does_not_cut_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with afterlife(tmp_path) as it:
        await it.begin(LONG)
        it.it.daemon.drain(draining=True)
        await it.proxy.drain(0.1)
        assert it.reasons == [EndReason.SHUTDOWN]
        assert "the engine goes on" in caplog.text
        assert it.engine.engine.scheduler.running


async def test_a_drain_waits_for_it(tmp_path: Path) -> None:
    async with afterlife(tmp_path) as it:
        await it.begin(100)
        it.it.daemon.drain(draining=True)
        await it.proxy.drain(100.0)
        assert it.reasons == [EndReason.FINISHED]


async def test_with_no_place_left_a_drain_is_told_as_a_drain(tmp_path: Path) -> None:
    async with afterlife(tmp_path, BACKGROUND_RESPONSES="1") as it:
        await it.begin(100)
        it.it.daemon.drain(draining=True)
        refused = await it.it.post(PATH, asked(10))
        assert (refused.status, refused.json["error"]["code"]) == (503, "draining")
        await it.proxy.drain(100.0)


async def test_there_is_a_most(tmp_path: Path) -> None:
    async with afterlife(tmp_path, BACKGROUND_RESPONSES="1") as it:
        name = await it.begin(LONG)
        refused = await it.it.post(PATH, asked(10))
        assert (refused.status, refused.json["error"]["code"]) == (429, "background_responses")
        assert refused.headers["x-kvctl-reason"] == "background_responses"
        wait_ms = int(refused.headers["retry-after-ms"])
        assert 1000 <= wait_ms <= 1500  # nothing is known of the rate, and callers are told different times
        assert refused.headers["Retry-After"] == str(-(-wait_ms // 1000))
        page = b"".join(it.it.daemon.metrics()[0]).decode()
        counted = [line for line in page.splitlines() if line.startswith("kvctl_requests_total{")]
        assert [line for line in counted if "reject_later" in line and line.endswith(" 1.0")], counted
        assert 'reason="background_responses"} 1.0\n' in page
        told = (await it.it.daemon.journal.select(1))[0].decision
        assert str(told.reason) == "background_responses"
        assert told.retry_after_s == pytest.approx(wait_ms / 1000, abs=0.002)
        assert (await it.it.post(PATH, asked(10) | {"background": False})).status == 200
        await it.it.post(f"{PATH}/{name}/cancel", {})
        await it.until(lambda: EndReason.CALLER_CANCELLED in it.reasons)
        await it.begin(10)
        await it.until(lambda: len(it.reasons) == 3)


async def test_a_bypass_passes_those_for_whom_there_is_no_place(tmp_path: Path) -> None:
    """Everything is let in, and counted as what it would have heard."""
    async with afterlife(tmp_path, BACKGROUND_RESPONSES="1", ENFORCE="0%") as it:
        await it.begin(LONG)
        await it.begin(LONG)
        assert it.proxy.background_responses == 2
        page = b"".join(it.it.daemon.metrics()[0]).decode().splitlines()
        told = [line for line in page if 'reason="background_responses"} ' in line]
        counts = {line.partition("{")[0]: line.rpartition(" ")[2] for line in told}
        assert (counts["kvctl_shadow_rejections_total"], counts["kvctl_rejections_total"]) == ("1.0", "0.0")
        decision = (await it.it.daemon.journal.select(1))[0].decision
        assert (str(decision.reason), decision.shadow) == ("background_responses", True)
        await it.proxy.drain(0.0)


async def test_what_never_fits_hears_so_though_there_is_no_place(tmp_path: Path) -> None:
    """Coming back would not help it."""
    async with afterlife(tmp_path, BACKGROUND_RESPONSES="1") as it:
        name = await it.begin(LONG)
        refused = await it.it.post(PATH, asked(10, max_output_tokens=100_000))
        assert refused.status == 400
        await it.it.post(f"{PATH}/{name}/cancel", {})


@pytest.mark.parametrize("enforce", ["100%", "0%"])
async def test_it_can_be_switched_off(tmp_path: Path, enforce: str) -> None:
    """That it is, is no limit: a bypass does not switch it on."""
    async with afterlife(tmp_path, BACKGROUND_RESPONSES="0", ENFORCE=enforce) as it:
        refused = await it.it.post(PATH, asked(10))
        assert (refused.status, refused.json["error"]["param"]) == (400, "background")
        assert "background_responses" in refused.json["error"]["message"]
        assert not it.ended


async def test_an_engine_without_a_store_says_so_itself(tmp_path: Path) -> None:
    async with afterlife(tmp_path, keeps=False) as it:
        refused = await it.it.post(PATH, asked(10))
        assert (refused.status, refused.json["error"]["param"]) == (400, "background")
        assert "--keep-responses" in refused.json["error"]["message"]
        assert it.reasons == [EndReason.ENGINE_REFUSED]


async def test_two_of_one_name_are_judged_by_the_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the engine tells under that name is of the last one only."""
    async with afterlife(tmp_path, STALL_TIMEOUT="3s") as it:
        await it.begin(700, request_id="mine")
        await it.begin(20, request_id="mine")
        await it.until(lambda: len(it.reasons) == 2)
        assert it.reasons == [EndReason.ENGINE_IDLE] * 2
        assert it.engine.engine.scheduler.idle
        assert "given twice" in caplog.text


async def test_another_response_under_its_name_does_not_end_it(tmp_path: Path) -> None:
    """A short one in the foreground takes the name's place in the engine's store."""
    async with afterlife(tmp_path, STALL_TIMEOUT="3s") as it:
        await it.begin(700, request_id="mine")
        other = await it.it.post(PATH, asked(1, request_id="mine") | {"background": False})
        assert other.json["status"] == "completed"
        await it.until(lambda: len(it.reasons) == 2)
        assert it.reasons == [EndReason.FINISHED, EndReason.ENGINE_IDLE]
        assert it.engine.engine.scheduler.idle


async def test_a_name_that_no_path_can_hold(tmp_path: Path) -> None:
    async with afterlife(tmp_path, STALL_TIMEOUT="3s") as it:
        await it.begin(50, request_id="../models")
        await it.until(lambda: it.reasons)
        assert it.reasons == [EndReason.ENGINE_IDLE]


async def test_what_goes_on_from_it_is_counted(tmp_path: Path) -> None:
    async with afterlife(tmp_path) as it:
        name = await it.begin(30)
        await it.until(lambda: it.reasons)
        body = {"model": "sim", "input": "more", "previous_response_id": name, "sim_output_tokens": 3}
        answer = await it.it.post(PATH, body)
        await it.until(lambda: len(it.ended) == 2)
        record = it.ended[1]
        assert record.lease.claim.prompts == (answer.json["usage"]["input_tokens"],)


async def test_many_are_looked_at_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, the engine is asked at a modest rate, and none is left behind."""
    monkeypatch.setattr(watching, "LOOKS_PER_S", 50.0)
    async with afterlife(tmp_path) as it:
        for _ in range(30):
            await it.begin(20)
        await it.until(lambda: len(it.reasons) == 30)
        assert set(it.reasons) == {EndReason.FINISHED}


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_lease_ends_before_the_engine_is_done(tmp_path: Path, seed: int) -> None:
    """Callers that wait, leave, cancel, and whose responses fail, all at once."""
    rng = random.Random(seed)
    early: list[EndReason] = []

    given = afterlife(tmp_path, blocks=8001, STALL_TIMEOUT="10min", POLICY="none")
    async with given as it, aiohttp.ClientSession() as session:

        def see(_: Command) -> None:
            scheduler = it.engine.engine.scheduler
            if len(scheduler.running) + len(scheduler.waiting) > len(it.it.unit.keeper.gate.ledger):
                early.append(it.reasons[-1])

        async def call() -> None:
            await asyncio.sleep(rng.random())
            more: Body = {"sim_fails_after": rng.randint(1, 20)} if rng.random() < 0.3 else {}
            body = asked(rng.randint(1, 300), stream=rng.random() < 0.5, **more)
            async with session.post(it.it.url + PATH, json=body) as answer:
                name = (await anext(events(answer)))["response"]["id"] if body["stream"] else None
                name = name or (await answer.json())["id"]
            if rng.random() < 0.3:
                await it.it.post(f"{PATH}/{name}/cancel", {})

        it.it.unit.keeper.observe(see, LeaseEnded)
        await asyncio.gather(*(call() for _ in range(40)))
        others = 0
        while it.it.gate.leases:  # those that failed are found out as others come and go
            body = {"prompt_tokens": 5, "max_new_tokens": 3, "ignore_eos": True}
            assert (await it.it.post("/generate", body)).status == 200
            others += 1
            await asyncio.sleep(0.1)
        assert len(it.reasons) == 40 + others
        assert it.reasons.count(EndReason.CAPPED) == others
        assert not early
        assert it.engine.engine.scheduler.idle
        ends = {EndReason.FINISHED, EndReason.CALLER_CANCELLED, EndReason.ENGINE_IDLE}
        assert set(it.reasons) - {EndReason.CAPPED} == ends
