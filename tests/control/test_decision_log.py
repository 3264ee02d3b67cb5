"""The decision log through a real gate, and its file on a real disk."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvctl.control.decision_documents import encoded
from kvctl.control.decision_file import KEPT, DecisionFile
from kvctl.control.decision_log import DecisionRecorder, digest
from kvctl.control.gatekeeper import Gatekeeper, LeaseHandle
from kvctl.control.hub import Hub, TooManyError
from kvctl.control.journal import Journal
from kvctl.core.claim import Shape
from kvctl.core.decisions import DecisionRecord, Story, made
from kvctl.core.events import Abandoned, Admit, Arrived, DrainChanged, Reject, Scraped, Ticked
from kvctl.core.gate import Gate
from kvctl.core.outcomes import Decision, EndReason
from kvctl.core.queue import QueueConfig
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import RankSample
from kvctl.tokens.begin import Tokens
from tests.core.test_decisions import ADMITTED, REFUSED, record

SHAPE = Shape(
    route="chat", model="m", prompts=(600,), asked_output=300, stream=True, tenant="sk-a-key-of-somebody"
)


class Office:
    """A gate on an engine of 1,300 KV tokens, its journal, and the clock."""

    def __init__(self, file: DecisionFile | None = None, queue: QueueConfig | None = None) -> None:
        self.now = 0.0
        self.journal = Journal(100, lambda: self.now, lambda: self.now + 1_000_000.0, file)
        config = GateConfig(margin_ratio=0.0, ttft_target_s=None, itl_target_s=None)
        gate = Gate(config if queue is None else replace(config, queue=queue))
        self.keeper = Gatekeeper(gate, lambda: self.now)
        self.journal.watch("e", self.keeper)
        self.page()

    def page(self) -> None:
        sample = RankSample(
            rank="0",
            at=self.now,
            kv_usage_ratio=0.0,
            running=0,
            waiting=0,
            capacity_tokens=1300,
            capacity_exact=True,
            block_size=16,
        )
        self.keeper.handle(Scraped((sample,), self.now))
        self.keeper.handle(Ticked())


async def test_a_story_from_its_arrival_to_its_end() -> None:
    office = Office()
    lease = await office.keeper.admit("l-1", SHAPE, "caller-1")
    assert isinstance(lease, LeaseHandle)
    office.now = 0.5
    lease.progress(1)
    office.now = 2.0
    lease.end(EndReason.FINISHED, output_tokens=40, prompt_tokens=600)
    told = office.journal.find("caller-1")
    assert told is not None
    assert told == office.journal.find("l-1")
    assert (told["decision"], told["reason"], told["shadow"], told["alone"]) == ("admit", None, False, False)
    assert (told["prompt_tokens"], told["asked_output"], told["allowed_output"]) == (600, 300, 300)
    assert told["claim_tokens"] == 912
    assert told["headroom_tokens"] == 1300 - told["forecast_tokens"]
    assert told["forecast_bounded"]
    assert told["ended"] == {
        "end": "finished",
        "seconds": 2.0,
        "first_token_s": 0.5,
        "output_tokens": 40,
        "engine_prompt_tokens": 600,
        "held_tokens": 640,
    }
    assert told["time"].startswith("1970-01-12T13:46:40")


async def test_a_refusal_says_what_bound() -> None:
    office = Office()
    assert isinstance(await office.keeper.admit("l-1", SHAPE), LeaseHandle)
    verdict = await office.keeper.admit("l-2", SHAPE, "caller-2")
    told = office.journal.find("caller-2")
    assert told is not None
    assert isinstance(verdict, Reject)
    assert told["free_tokens"] == verdict.headroom_tokens  # as the answer says it
    assert (told["decision"], told["reason"], told["binding_limit"]) == (
        "reject_later",
        "kv_budget",
        "kv_budget",
    )
    assert told["budget_tokens"] - told["forecast_tokens"] == told["headroom_tokens"] < 0
    assert not told["forecast_bounded"]
    assert told["retry_after_s"] > 0
    assert told["ended"] is None
    assert told["remedies"]


async def test_refused_before_it_was_weighed() -> None:
    office = Office()
    office.keeper.handle(DrainChanged(draining=True))
    await office.keeper.admit("l-1", SHAPE, "c")
    told = office.journal.find("c")
    assert told is not None
    assert (told["reason"], told["claim_tokens"], told["forecast_tokens"]) == ("draining", None, None)
    assert told["remedies"] == ["no drain: kvctl undrain ends it"]


async def test_only_refusals_where_only_those_are_asked_for() -> None:
    office = Office()
    for number in range(3):
        await office.keeper.admit(f"l-{number}", SHAPE)
    assert leases(await office.journal.select(10)) == ["l-0", "l-1", "l-2"]
    assert leases(await office.journal.select(1, refused=True)) == ["l-2"]
    assert leases(await office.journal.select(9, refused=True)) == ["l-1", "l-2"]


def leases(stories: list[Story]) -> list[str]:
    return [each.decision.asked.lease_id for each in stories]


async def test_no_key_is_in_it() -> None:
    """A tenant's key is told by a digest that leads to nobody."""
    office = Office()
    await office.keeper.admit("l-1", SHAPE, "c")
    told = json.dumps(office.journal.find("c"))
    assert "somebody" not in told
    assert digest(SHAPE.tenant) in told
    assert digest("") == ""
    assert digest("a") != digest("b")


async def test_the_outlook_charges_nothing_and_says_the_same() -> None:
    office = Office()
    gate = office.keeper.gate
    seen = gate.outlook(SHAPE, 0.0)
    assert (len(gate.ledger), len(office.journal.ring)) == (0, 0)
    lease = await office.keeper.admit("l-1", SHAPE)
    assert isinstance(lease, LeaseHandle)
    assert isinstance(seen, Admit)
    assert lease.claim == seen.claim
    before = gate.status(0.0)
    refused = gate.outlook(SHAPE, 0.0)
    assert gate.status(0.0) == before
    said = await office.keeper.admit("l-2", SHAPE)
    assert isinstance(said, Reject)
    assert isinstance(refused, Reject)
    assert (refused.claim, refused.forecast_tokens) == (said.claim, said.forecast_tokens)


async def test_one_that_waits_has_two_records() -> None:
    """A line when it begins to wait and one when it is let in; under one lease the ring keeps the last."""
    office = Office(queue=QueueConfig(max_wait_s=60.0))
    told: list[Any] = []
    office.keeper.record(DecisionRecorder("e", office.keeper.moment, [lambda kept: told.append(made(kept))]))
    first = await office.keeper.admit("l-1", SHAPE, "c-1")
    assert isinstance(first, LeaseHandle)
    office.keeper.handle(Arrived("l-2", SHAPE, "c-2"))
    office.now = 1.0
    first.end(EndReason.FINISHED, output_tokens=10)
    office.keeper.handle(Ticked())
    kinds = [(each.decision, each.waited_s) for each in told if isinstance(each, DecisionRecord)]
    assert kinds == [(Decision.ADMIT, 0.0), (Decision.QUEUE, 0.0), (Decision.ADMIT, 1.0)]
    shown = office.journal.find("c-2")
    assert shown is not None
    assert (shown["decision"], shown["waited_s"]) == ("admit", 1.0)


async def test_one_that_leaves_the_queue_is_told_and_forgotten() -> None:
    office = Office(queue=QueueConfig(max_wait_s=60.0))
    assert isinstance(await office.keeper.admit("l-1", SHAPE), LeaseHandle)
    office.keeper.handle(Arrived("l-2", SHAPE, "c-2"))
    office.now = 2.0
    office.keeper.handle(Abandoned("l-2"))
    shown = office.journal.find("c-2")
    assert shown is not None
    assert shown["decision"] == "queue"
    assert (shown["ended"]["end"], shown["ended"]["seconds"]) == ("client_gone", 2.0)


async def test_what_nobody_read_is_forgotten_with_its_names() -> None:
    office = Office()
    office.journal.resize(2)
    for number in range(4):
        lease = await office.keeper.admit(f"l-{number}", replace(SHAPE, prompts=(10,)), f"c-{number}")
        assert isinstance(lease, LeaseHandle)
        lease.end(EndReason.FINISHED, output_tokens=number)
    assert [office.journal.find(name) for name in ("l-0", "c-0", "l-1", "c-1")] == [None] * 4
    for number in (2, 3):
        told = office.journal.find(f"c-{number}")
        assert told is not None
        assert (told["lease"], told["id"], told["prompts"]) == (f"l-{number}", f"c-{number}", [10])
        assert told["ended"]["output_tokens"] == number
        assert told == office.journal.find(f"l-{number}")  # read again, it is the same


async def test_the_listed_stories_are_those_found_one_by_one() -> None:
    office = Office()
    for number in range(3):
        await office.keeper.admit(f"l-{number}", replace(SHAPE, prompts=(10,)))
    listed = [office.journal.document(story) for story in await office.journal.select(9)]
    office.now = 5.0
    assert [each["at"] for each in listed] == [0.0] * 3
    assert [each["lease"] for each in listed] == ["l-0", "l-1", "l-2"]
    assert await office.journal.select(2) == (await office.journal.select(9))[1:]
    assert office.journal.ring.ids() == ["l-2", "l-1", "l-0"]


# --- the file -------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_file(path: Path, **more: Any) -> DecisionFile:
    return DecisionFile(path, max_bytes=more.pop("max_bytes", 1 << 20), wall_offset=lambda: 1e6, **more)


async def test_a_clock_gone_mad_costs_its_records_and_no_others(tmp_path: Path) -> None:
    """The year 33,000 ended the writing for good, without a word."""
    offset = [1e12]
    file = DecisionFile(tmp_path / "d.jsonl", max_bytes=1 << 20, wall_offset=lambda: offset[0], every_s=0.01)
    office = Office(file)
    office.journal.start()
    await office.keeper.admit("l-1", SHAPE, "c-1")
    office.journal.settle()
    while not file.fault:  # noqa: ASYNC110 - a thread writes
        await asyncio.sleep(0.001)
    assert file.dropped == 1
    offset[0] = 1e6
    await office.keeper.admit("l-2", SHAPE, "c-2")
    office.journal.settle()
    while file.fault:  # noqa: ASYNC110 - a thread writes
        await asyncio.sleep(0.001)
    await office.journal.close()
    told = lines(file.path)
    assert [line["type"] for line in told] == ["decision", "dropped"]


async def test_every_decision_and_end_is_a_line(tmp_path: Path) -> None:
    file = make_file(tmp_path / "sub" / "d.jsonl", every_s=0.01)
    office = Office(file)
    office.journal.start()
    lease = await office.keeper.admit("l-1", SHAPE, "c-1")
    assert isinstance(lease, LeaseHandle)
    await office.keeper.admit("l-2", SHAPE, "c-2")
    lease.end(EndReason.CAPPED, output_tokens=300)
    await office.journal.close()
    told = lines(file.path)
    assert [(each["v"], each["type"], each["lease"]) for each in told] == [
        (1, "decision", "l-1"),
        (1, "decision", "l-2"),
        (1, "end", "l-1"),
    ]
    assert file.written == 3
    assert (file.path.stat().st_mode & 0o777) == 0o640


async def test_rotation_keeps_a_few_and_tears_no_line(tmp_path: Path) -> None:
    file = make_file(tmp_path / "d.jsonl", max_bytes=4096)
    for number in range(200):
        file.put(record(number))
        if number % 5 == 0:
            await file.close()
    await file.close()
    found = await asyncio.to_thread(lambda: sorted(tmp_path.iterdir()))
    assert len(found) == KEPT + 1
    for each in found:
        assert each.stat().st_size <= 4096 + 5 * 1024
        assert lines(each)
    assert lines(file.path)[-1]["lease"] == "l-199"


async def test_a_full_buffer_drops_counts_and_says_so(tmp_path: Path) -> None:
    file = make_file(tmp_path / "d.jsonl", buffered=3)
    for number in range(5):
        file.put(record(number))
    await file.close()
    assert file.dropped == 2
    assert lines(file.path)[-1] == {"v": 1, "type": "dropped", "records": 2}
    file.put(record(9))
    await file.close()
    assert lines(file.path)[-1]["lease"] == "l-9"


async def test_a_disk_that_takes_nothing_is_a_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "sub").touch()  # a file where the folder should be
    file = make_file(tmp_path / "sub" / "d.jsonl")
    caplog.set_level("INFO", "kvctl")
    for _ in range(3):
        file.put(ADMITTED)
        await file.close()
    assert file.dropped == 3
    assert file.fault
    (tmp_path / "sub").unlink()
    file.put(ADMITTED)
    await file.close()
    assert file.fault == ""
    assert [each.getMessage()[:40] for each in caplog.records if "decision log" in each.getMessage()] == [
        "the decision log cannot be written, reco",
        "the decision log is written again; 3 rec",
    ]


# --- listeners ------------------------------------------------------------------------------------------


async def test_a_listener_hears_what_it_asked_for() -> None:
    hub = Hub()
    every, some = hub.listen(), hub.listen(frozenset({"state"}))
    hub.tell("budget", lambda: {"n": 1})
    hub.tell("state", lambda: {"n": 2})
    assert await every.next(1.0) == [{"type": "budget", "n": 1}, {"type": "state", "n": 2}]
    assert await some.next(1.0) == [{"type": "state", "n": 2}]
    assert await some.next(0.01) == []
    hub.leave(every)
    hub.leave(every)
    assert len(hub) == 1


async def test_a_listener_hears_of_a_decision_at_once() -> None:
    office = Office()
    await office.keeper.admit("l-0", SHAPE, "before")
    listener = office.journal.hub.listen(frozenset({"decision"}))
    assert await listener.next(0.01) == [], "what was decided before is not told"
    await office.keeper.admit("l-1", SHAPE, "caller-1")
    assert [each["id"] for each in await listener.next(1.0)] == ["caller-1"]
    office.journal.hub.leave(listener)
    await office.keeper.admit("l-2", SHAPE, "caller-2")
    assert await listener.next(0.01) == []
    assert office.journal.find("caller-2") is not None


async def test_a_slow_listener_is_cut_and_the_others_are_not() -> None:
    hub = Hub(buffered=2)
    slow, quick = hub.listen(), hub.listen()
    for number in range(5):
        hub.tell("note", lambda number=number: {"n": number})  # type: ignore[misc]
        assert len(await quick.next(1.0)) == 1
    assert await slow.next(1.0) == []
    assert (slow.cut, quick.cut) == (True, False)


async def test_without_a_listener_nothing_is_made() -> None:
    def never() -> dict[str, Any]:
        raise AssertionError("made for nobody")

    Hub().tell("note", never)


async def test_listeners_are_bounded() -> None:
    hub = Hub()
    for _ in range(32):
        hub.listen()
    with pytest.raises(TooManyError):
        hub.listen()


async def test_the_stream_tells_decisions_and_changes() -> None:
    office = Office()
    listener = office.journal.hub.listen()
    await office.keeper.admit("l-1", SHAPE, "c-1")
    office.keeper.handle(Scraped((replace(_sample(), capacity_tokens=800),), 0.0))
    told = await listener.next(1.0)
    assert (told[0]["type"], told[0]["id"]) == ("decision", "c-1")
    assert {"note", "budget"} <= {each["type"] for each in told}
    json.dumps(told)


def _sample() -> RankSample:
    return RankSample(rank="0", at=0.0, kv_usage_ratio=0.0, running=0, waiting=0, block_size=16)


async def test_the_file_is_written_off_the_loop(tmp_path: Path) -> None:
    """``put`` returns at once, whatever the disk does; the loop turns while a batch is written."""
    file = make_file(tmp_path / "d.jsonl", every_s=0.005)
    file.start()
    for number in range(500):
        file.put(record(number))
        if number % 50 == 0:
            await asyncio.sleep(0.01)
    await file.close()
    assert len(lines(file.path)) == 500


async def test_counts_that_know_how_the_prompt_begins_are_numbers(tmp_path: Path) -> None:
    """As the engine's /tokenize and local tokenizers give them."""
    counted = Tokens(300, ((128, 7), (256, 8)))
    kept = record(1, REFUSED, "caller-1")
    kept = replace(kept, asked=replace(kept.asked, prompts=(counted, counted)))
    office = Office()
    office.journal.ring.add(kept)
    found = office.journal.find("caller-1")
    assert found is not None
    assert json.loads(encoded(found))["id"] == "caller-1"
    file = DecisionFile(tmp_path / "d.jsonl", max_bytes=1 << 20, wall_offset=lambda: 0.0)
    file.put(kept)
    await file.close()
    (line,) = (tmp_path / "d.jsonl").read_text().splitlines()
    assert json.loads(line)["prompts"] == [300, 300]
