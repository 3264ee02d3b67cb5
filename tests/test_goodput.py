"""The goodput bench's own parts: arrivals, gates in the daemon's place, figures and calibration."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvctl.core.claim import Shape
from kvctl.core.events import Admit, Arrived, Ended, EngineDescribed, Reject, Scraped, Ticked
from kvctl.core.gate import Gate
from kvctl.core.outcomes import EndReason, Policy
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, RankSample
from kvctl.sim.replay import Call
from kvctl.sim.replay_policies import parse_policy
from kvctl.sim.trace import Row
from tests.bench.goodput.__main__ import of_records, planned
from tests.bench.goodput.bench import Group, Record
from tests.bench.goodput.callers import Crowd, Heard, call_id, drive, read_call_id
from tests.bench.goodput.figures import document, in_common
from tests.bench.goodput.gates import gate_maker
from tests.bench.goodput.report import best_limit, medians, standing, table
from tests.bench.goodput.stage import Page
from tests.bench.goodput.workload import BURSTS, SimTexts, arrivals, prompts, scaled


def test_bursts_keep_the_mean_rate() -> None:
    rows = arrivals(BURSTS, 20.0, 100.0, 3, 8192)
    assert len(rows) == pytest.approx(2000, rel=0.1)
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    assert rows == arrivals(BURSTS, 20.0, 100.0, 3, 8192)


def test_a_stretch_of_a_trace_comes_at_the_rate_asked_for() -> None:
    rows = arrivals("tests/bench/traces/azure2023_conv.csv.gz", 10.0, 20.0, 2, 4096)
    assert len(rows) == 200
    assert rows[-1].at_s == pytest.approx(19.9, rel=0.01)
    assert all(2 <= row.output_tokens <= 2048 for row in rows)
    assert max(row.prompt_tokens + row.output_tokens for row in rows) <= 4096


def test_prompts_begin_alike_where_they_should() -> None:
    rows = arrivals(BURSTS, 20.0, 2.0, 1, 8192)
    texts = list(prompts(SimTexts(), rows, "a", 100))
    assert len({text[:400] for text in texts}) == 1
    assert len({text[401:420] for text in texts}) == len(rows)
    assert list(prompts(SimTexts(), rows, "b", 0)) != list(prompts(SimTexts(), rows, "a", 0))


def test_prompts_of_a_trace_begin_as_its_rows_did() -> None:
    rows = [
        Row(number=0, at_s=0.0, prompt_tokens=400, output_tokens=5),
        Row(number=1, at_s=1.0, prompt_tokens=300, output_tokens=5, lineage=((200, 0),)),
        Row(number=2, at_s=2.0, prompt_tokens=300, output_tokens=5, lineage=((200, 0), (250, 1))),
    ]
    first, second, third = prompts(SimTexts(), rows, "a", 0)
    assert (first[:800], second[:1000]) == (second[:800], third[:1000])
    assert len({text[1001:1100] for text in (first, second, third)}) == 3
    assert [len(text) for text in (first, second)] == [4 * (row.prompt_tokens - 12) for row in rows[:2]]
    assert next(prompts(SimTexts(), rows, "b", 0))[:40] != first[:40]


def test_longer_prompts_are_scaled_down_with_all_others() -> None:
    rows = [
        Row(number=0, at_s=0.0, prompt_tokens=64_000, output_tokens=5),
        Row(number=1, at_s=1.0, prompt_tokens=8_000, output_tokens=5, lineage=((4_000, 0),)),
    ]
    half = scaled(rows, 32_000 + 2_048)
    assert [row.prompt_tokens for row in half] == [32_000, 4_000]
    assert half[1].lineage == ((2_000, 0),)
    assert scaled(rows[1:], 32_000) == rows[1:]


def test_an_attempt_tells_its_number_and_length() -> None:
    assert read_call_id(call_id(7, 2, 345)) == (2, 345)
    assert read_call_id("somebody-else") == (1, 1)


def up(gate: Gate) -> Gate:
    """With an engine of 16,000 tokens."""
    gate.handle(EngineDescribed(EngineInfo(models=("m",), context_tokens=8192)), 0.0)
    page(gate, 0.0, 0.0)
    return gate


def page(gate: Gate, now: float, usage: float) -> None:
    sample = RankSample(
        rank="0",
        at=now,
        kv_usage_ratio=usage,
        running=1,
        waiting=0,
        capacity_tokens=16_000,
        capacity_exact=True,
    )
    gate.handle(Scraped((sample,), asked_at=now), now)
    gate.handle(Ticked(), now)


def ask(gate: Gate, name: str, *, output: int = 100, tries: int = 1) -> Admit | Reject:
    shape = Shape(route="chat", model="m", prompts=(100,), asked_output=2000, stream=True)
    told = gate.handle(Arrived(name, shape, call_id(1, tries, output)), 1.0)
    return next(command for command in told if isinstance(command, Admit | Reject))


def made(policy: str) -> Gate:
    own = Policy.FORECAST if policy == "clairvoyant" else Policy.NONE
    return up(gate_maker(parse_policy(policy), 16_000, 8192, 1)(GateConfig(policy=own)))


def test_a_door_decides_and_the_gate_keeps_the_ledger() -> None:
    gate = made("concurrency=2")
    assert [type(ask(gate, name)) for name in "abc"] == [Admit, Admit, Reject]
    assert len(gate.ledger) == 2
    gate.handle(Ended("a", EndReason.FINISHED, 100), 2.0)
    assert isinstance(ask(gate, "d"), Admit)
    for name in "bd":
        gate.handle(Ended(name, EndReason.CLIENT_GONE), 3.0)
    assert (len(gate.ledger), gate.ledger.claimed_tokens) == (0, 0)


def test_who_is_refused_is_told_what_openai_python_would_do() -> None:
    gate = made("concurrency=1")
    ask(gate, "a")
    for tries, least, most in ((1, 0.375, 0.5), (2, 0.75, 1.0)):
        refused = ask(gate, f"b{tries}", tries=tries)
        assert isinstance(refused, Reject)
        assert least <= (refused.retry_after_s or 0.0) <= most


def test_one_that_the_gate_cannot_let_in_leaves_the_door() -> None:
    gate = gate_maker(parse_policy("concurrency=1"), 16_000, 8192, 1)(GateConfig(policy=Policy.NONE))
    assert isinstance(ask(gate, "a"), Reject)  # the engine was never seen
    assert isinstance(ask(up(gate), "b"), Admit)


def test_the_gauge_goes_by_the_engines_pages() -> None:
    gate = made("kv-gauge")
    page(gate, 0.5, 0.9)
    assert isinstance(ask(gate, "a"), Reject)
    page(gate, 0.7, 0.5)
    assert isinstance(ask(gate, "b"), Admit)


def test_who_knows_the_lengths_lets_more_in_than_who_does_not() -> None:
    admitted = {}
    for policy in ("clairvoyant", "forecast"):
        gate = made(policy) if policy == "clairvoyant" else up(Gate(GateConfig()))
        admitted[policy] = sum(isinstance(ask(gate, str(n), output=10), Admit) for n in range(200))
    assert admitted["clairvoyant"] > 1.5 * admitted["forecast"]


def call(at: float, *, good: bool) -> Call:
    """A good one takes a second, another starts four seconds late."""
    row = Row(number=0, at_s=at, prompt_tokens=10, output_tokens=10)
    return Call(
        row=row,
        cap=None,
        first_at=at + (0.5 if good else 4.5),
        ended_at=at + (1.0 if good else 5.0),
        complete=True,
        output=10,
    )


def looked(at: float, **more: Any) -> Page:
    plain = {"usage": 0.5, "running": 1, "waiting": 0, "preemptions": 0, "prompt_tokens": 0}
    return Page(at=at, **(plain | {"generation_tokens": 0, "steps": None} | more))


def test_warm_up_is_reported_beside_and_not_dropped() -> None:
    calls = [call(n * 0.1, good=n % 2 == 1) for n in range(400)]
    found = document(calls, [looked(0.0), looked(1.0), looked(90.0, preemptions=4)], Heard())
    assert found["goodput_frac"] == 0.5
    assert found["preemptions"] == 4
    assert found["kv_usage_mean"] == 0.5
    assert found["after_warm_up"]["requests"] == 400 - 130  # the hundredth ended at 12.9 s


def test_two_runs_are_compared_over_the_arrivals_that_both_served_warm() -> None:
    early = {"hundredth_s": 1.2, "good_by_second": [9, 9, 4, 6]}
    late = {"hundredth_s": 2.0, "good_by_second": [1, 1, 5, 5]}
    never = {"hundredth_s": None, "good_by_second": [1, 1, 1, 1]}
    assert in_common(early, late) == in_common(early, early) == (5.0, 5.0)
    assert in_common(early, never) == (7.0, 1.0)


def runs(**goodputs: float) -> list[dict[str, Any]]:
    plain = {
        "goodput_frac": 0.5,
        "preemptions": 1,
        "requests": 500,
        "ttft_p50_s": 0.1,
        "ttft_p99_s": 0.2,
        "kv_usage_mean": 0.5,
        "after_warm_up": None,
        "hundredth_s": 2.0,
    }
    policies = {
        name: plain | {"goodput_rps": value, "good_by_second": [value] * 9}
        for name, value in goodputs.items()
    }
    return [{"rate": 20.0, "seed": 1, "cap": "2048", "policies": policies}]


def test_targets_are_judged_against_the_best_limit_tried() -> None:
    found = standing(
        runs(**{"forecast": 9.0, "clairvoyant": 10.0, "concurrency=8": 9.5, "concurrency=4": 3.0})
    )
    told = {one.get("against"): one for one in found}
    assert told["clairvoyant"] == {
        "rate": 20.0,
        "cap": "2048",
        "against": "clairvoyant",
        "wanted": 0.9,
        "found": 0.9,
        "by_seed": [0.9],
        "evened": 0.9,
        "met": True,
    }
    assert not told["concurrency=8"]["met"]
    assert told[None]["preemptions_per_1000"] == 2.0
    assert not told[None]["met"]


def test_of_limits_tried_the_best_goes_on() -> None:
    tried = runs(**{"concurrency=4": 3.0, "concurrency=8": 9.5, "concurrency=16": 9.0})
    assert best_limit(tried, "concurrency=4") == "concurrency=8"
    assert best_limit([*tried, *runs(**{"concurrency=16": 8.0})], "concurrency=8") == "concurrency=16"
    assert best_limit(tried, "clairvoyant") == "clairvoyant"


def test_pairs_are_of_one_seed_and_rate() -> None:
    first, second = runs(forecast=9.0, clairvoyant=10.0), runs(forecast=6.0, clairvoyant=12.0)
    second[0]["seed"] = 2
    told = next(one for one in standing(first + second) if one.get("against") == "clairvoyant")
    assert told["by_seed"] == [0.9, 0.5]
    assert told["found"] == told["evened"] == 0.7


def test_a_slower_engine_is_told_beside() -> None:
    found = runs(forecast=9.0, clairvoyant=10.0)
    found[0]["policies"]["forecast"]["pace"], found[0]["policies"]["clairvoyant"]["pace"] = 1.1, 0.99
    told = next(one for one in standing(found) if one.get("against") == "clairvoyant")
    assert (told["found"], told["evened"]) == (0.9, 1.0)


def test_of_limits_and_hopeless_policies_only_the_first_seed_runs_all() -> None:
    first = Group(rate=20.0, seed=1, cap="2048", workload=BURSTS, seconds=9.0)
    policies = ["static", "forecast", "concurrency=4", "concurrency=8", "kv-gauge"]
    tried = runs(**{"concurrency=4": 3.0, "concurrency=8": 9.5})
    assert planned(policies, first, first, []) == policies
    assert planned(policies, replace(first, cap="none"), first, []) == ["static", "forecast"]
    second = replace(first, seed=2)
    assert planned(policies, second, first, tried) == ["static", "forecast", "concurrency=8", "kv-gauge"]
    assert planned(policies, replace(second, cap="none"), first, tried) == ["forecast"]


def test_kept_runs_are_told_as_they_were_made() -> None:
    group = Group(rate=20.0, seed=1, cap="2048", workload=BURSTS, seconds=9.0)
    made = [Record(group, "forecast", [], [], {"n": 1}), Record(group, "forecast", [], [], {"n": 2})]
    made.append(Record(replace(group, cap="none"), "forecast", [], [], {"n": 3}))
    first, second = of_records(made)
    assert first == {"rate": 20.0, "seed": 1, "cap": "2048", "policies": {"forecast": {"n": 2}}}
    assert second["policies"] == {"forecast": {"n": 3}}


def test_medians_pool_the_preemptions() -> None:
    made = runs(forecast=9.0) + runs(forecast=11.0)
    made[1]["policies"]["forecast"]["after_warm_up"] = {"goodput_rps": 12.0}
    found = medians(made)["forecast"]
    assert found["goodput_rps_after_warm_up"] == 12.0
    assert found["goodput_rps"] == 10.0
    assert found["preemptions"] == 2
    assert found["preemptions_per_1000"] == 2.0


def test_runs_that_the_machine_disturbed_do_not_count() -> None:
    found = runs(**{"forecast": 9.0, "clairvoyant": 10.0, "kv-gauge": 1.0})
    found[0]["policies"]["kv-gauge"]["disturbed"] = True
    assert "kv-gauge" not in {one.get("against") for one in standing(found)}
    assert "kv-gauge" not in medians(found)
    assert "1 run(s) left out" in table(found)


class Refusing:
    """An engine that refuses each caller so often, and then answers. ``inside``: in a stream."""

    def __init__(self, times: int, *, inside: bool = False) -> None:
        self.times, self.inside = times, inside
        self.asked: dict[str, int] = {}
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        _, number, tries, _ = request.headers["X-Request-Id"].split(".")
        self.asked[number] = int(tries)
        self.bodies.append(await request.json())
        refused = int(tries) <= self.times
        if refused and not self.inside:
            return web.Response(status=429, headers={"retry-after-ms": "10"})
        response = web.StreamResponse(headers={"retry-after-ms": "10"})
        await response.prepare(request)
        await response.write(
            b'data: {"error": {"code": 503}}\n\n' if refused else b'data: {"choices": []}\n\n'
        )
        await response.write(b"data: [DONE]\n\n")
        return response


async def driven(times: int, cap: int | None, *, inside: bool = False) -> tuple[Refusing, list[Call], Heard]:
    engine, rows = Refusing(times, inside=inside), arrivals(BURSTS, 50.0, 0.2, 1, 8192)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", engine.answer)
    server = TestServer(app)
    await server.start_server()
    try:
        crowd = Crowd(url=str(server.make_url("")).rstrip("/"), model="m", cap=cap, seed=1)
        calls, heard = await drive(crowd, rows, prompts(SimTexts(), rows, "x", 0))
    finally:
        await server.close()
    return engine, calls, heard


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("times", "complete"), [(0, True), (2, True), (3, False)])
def test_callers_try_three_times(times: int, *, complete: bool, inside: bool) -> None:
    engine, calls, heard = asyncio.run(driven(times, 2048, inside=inside))
    assert set(engine.asked.values()) == {min(times + 1, 3)}
    assert all(call.complete is complete and call.given_up is not complete for call in calls)
    assert all(call.retries == min(times, 2) for call in calls)
    assert len(heard.late_s) == len(calls)
    assert min(heard.late_s) >= 0.0
    assert heard.refusals.total() == len(calls) * times
    assert all(call.asked_at is not None and call.asked_at >= call.row.at_s for call in calls)
    assert all(body["max_tokens"] == 2048 and body["stream"] for body in engine.bodies)


def test_callers_without_a_cap_send_none() -> None:
    engine, _, _ = asyncio.run(driven(0, None))
    assert not any("max_tokens" in body for body in engine.bodies)
