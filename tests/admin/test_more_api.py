"""The night shift's part of the admin API: decisions, dry runs, traffic states, reload, levels, events."""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvctl.admin.client import RefusedError
from kvctl.control.journal import KINDS
from kvctl.core.overrides import Knob
from kvctl.settings.model import SPECS
from tests.admin.conftest import ENGINE, Office
from tests.admin.test_api import audit, raw, refused, request
from tests.core.test_decisions import ADMITTED, REFUSED, ended, record

PATIENCE_S = 60.0


# --- decisions ------------------------------------------------------------------------------------------


async def test_a_decision_by_either_id(office: Office) -> None:
    office.journal.ring.add(record(1, REFUSED, "caller-1"))
    in_bodies = ("chatcmpl-caller-1", "cmpl-caller-1")  # as vLLM names its answers
    for some_id in ("caller-1", "l-1", *in_bodies):
        told = await office.call("get", f"/v1/decisions/{some_id}")
        assert (told["id"], told["lease"], told["reason"]) == ("caller-1", "l-1", "kv_budget")
        assert told["remedies"]
        assert told["ended"] is None
    assert await refused(office, "get", "/v1/decisions/other") == (404, "unknown_request")


async def test_an_id_of_any_shape(office: Office) -> None:
    """An X-Request-Id is a stranger's text: it may hold what a path may not."""
    office.journal.ring.add(record(1, REFUSED, "a/b ?#%"))
    told = await office.call("get", "/v1/decisions/a%2Fb%20%3F%23%25")
    assert told["id"] == "a/b ?#%"


async def test_the_last_decisions(office: Office) -> None:
    for number in range(5):
        office.journal.ring.add(record(number, REFUSED if number % 2 else ADMITTED))
    office.journal.ring.add(ended(4))
    shown = await office.call("get", "/v1/decisions?limit=3")
    assert [each["lease"] for each in shown["decisions"]] == ["l-2", "l-3", "l-4"]
    assert shown["decisions"][-1]["ended"]["output_tokens"] == 50
    assert (shown["remembered"], shown["file"]) == (5, None)
    shown = await office.call("get", "/v1/decisions?refused=1")
    assert [each["lease"] for each in shown["decisions"]] == ["l-1", "l-3"]


@pytest.mark.parametrize(
    "query", ["limit=-1", "limit=x", "limit=99999999", "limit=", "limit=%D9%A1", "refused=maybe"]
)
async def test_bad_queries(office: Office, query: str) -> None:
    assert (await raw(office, request("GET", f"/v1/decisions?{query}")))[0] == 400


async def test_the_outlook(office: Office) -> None:
    office.stand.says = {ENGINE: replace(REFUSED, at=100.0)}
    shown = await office.call(
        "get", "/v1/outlook?prompt_tokens=100&max_tokens=400&n=2&model=m&route=chat&tenant=t&stream=1"
    )
    (shape,) = office.stand.asked
    assert (shape.prompts, shape.asked_output, shape.n, shape.model) == ((100,), 400, 2, "m")
    assert (shape.route, shape.tenant, shape.stream, shape.exact) == ("chat", "t", True, True)
    assert shown["engines"][ENGINE]["reason"] == "kv_budget"
    assert shown["engines"][ENGINE]["remedies"]
    assert len(office.journal.ring) == 0


async def test_outlooks_that_cannot_be_told(office: Office) -> None:
    assert await refused(office, "get", "/v1/outlook?prompt_tokens=1&model=x") == (404, "unknown_model")
    for query in ("", "?max_tokens=3", "?prompt_tokens=-3", "?prompt_tokens=1&n=0", "?prompt_tokens=1e9"):
        assert await refused(office, "get", f"/v1/outlook{query}") == (400, "bad_request")


# --- dry runs and knobs ---------------------------------------------------------------------------------


async def test_a_dry_run_changes_nothing_and_says_what_it_would(office: Office) -> None:
    office.clocks.mono = 50.0
    for number in range(40, 44):
        office.journal.ring.add(record(number, REFUSED))
    body = {"value": "2%", "reason": "r"}
    seen = await office.call("put", "/v1/overrides/margin?dry_run=1", body)
    assert (seen["dry_run"], seen["old"], seen["new"], seen["revision"]) == (True, 0.05, 0.02, 0)
    moved = seen["engines"][ENGINE]
    assert (moved["before"]["budget_tokens"], moved["after"]["budget_tokens"]) == (45_600, 47_040)
    assert seen["last"] == {
        "seconds": 300.0,
        "decisions": 4,
        "refusals": 4,
        "refusals_admitted": 1,
        "admissions_refused": 0,
    }
    assert (office.desk.revision, office.applied[1:]) == (0, [])
    assert not (office.state_dir / "audit.jsonl").exists()


async def test_a_dry_run_is_judged_like_the_change(office: Office) -> None:
    route = "/v1/overrides/margin?dry_run=1"
    assert await refused(office, "put", route, {"value": 0.9}) == (422, "out_of_bounds")
    assert await refused(office, "put", route, {"value": "x"}) == (422, "bad_value")
    assert await refused(office, "put", route, {"value": 0.1}, if_match=7) == (412, "stale_revision")
    assert await refused(office, "put", "/v1/overrides/x?dry_run=1", {"value": 1}) == (404, "unknown_knob")


async def test_what_the_log_cannot_tell_is_null(office: Office) -> None:
    seen = await office.call("put", "/v1/overrides/max_context?dry_run=1", {"value": 4096})
    assert seen["last"] is None
    assert seen["engines"][ENGINE]["after"]["budget_tokens"] is None


@pytest.mark.parametrize(
    ("knob", "value", "new"),
    [
        ("enforce", "25%", 0.25),
        ("enforce", "false", 0.0),
        ("capacity_tokens", "48000", 48_000),
        ("max_context", 4096, 4096),
        ("queue_max_wait", "1500ms", 1.5),
    ],
)
async def test_more_knobs(office: Office, knob: str, value: object, new: object) -> None:
    change = await office.call("put", f"/v1/overrides/{knob}", {"value": value, "reason": "r"})
    assert change["new"] == new
    assert office.applied[-1][Knob(knob)] == new
    change = await office.call("delete", f"/v1/overrides/{knob}")
    assert change["new"] == office.applied[-1][Knob(knob)]


@pytest.mark.parametrize(
    ("knob", "value", "word"),
    [
        ("enforce", 1.5, "out_of_bounds"),
        ("capacity_tokens", 0, "out_of_bounds"),
        ("capacity_tokens", 12.5, "bad_value"),
        ("max_context", True, "bad_value"),
        ("max_context", "none", "bad_value"),
        ("max_context", 10**12, "out_of_bounds"),
        ("queue_max_wait", "2h", "out_of_bounds"),
        ("queue_max_wait", [], "bad_value"),
    ],
)
async def test_bounds_of_more_knobs(office: Office, knob: str, value: object, word: str) -> None:
    body = {"value": value, "reason": "r"}
    assert await refused(office, "put", f"/v1/overrides/{knob}", body) == (422, word)


# --- traffic states -------------------------------------------------------------------------------------


async def test_bypass_and_resume(office: Office) -> None:
    done = await office.call("post", "/v1/bypass", {"ttl_s": 600, "reason": "refusals on an idle engine"})
    assert done["left_s"] == 600
    assert office.applied[-1][Knob.ENFORCE] == 0.0
    (line,) = audit(office)
    assert (line["verb"], line["knob"], line["new"], line["reason"]) == (
        "set",
        "enforce",
        0.0,
        "refusals on an idle engine",
    )
    await office.call("post", "/v1/resume")
    assert office.applied[-1][Knob.ENFORCE] == 1.0
    assert await refused(office, "post", "/v1/resume") == (404, "not_set")


async def test_a_bypass_ends_by_itself(office: Office) -> None:
    await office.call("post", "/v1/bypass", {"ttl_s": 600, "reason": "r"})
    office.clocks.advance(601)
    office.desk.expire()
    assert office.applied[-1][Knob.ENFORCE] == 1.0


async def test_a_bypass_needs_a_reason(office: Office) -> None:
    assert await refused(office, "post", "/v1/bypass", {"ttl_s": 600}) == (422, "no_reason")
    assert await refused(office, "post", "/v1/bypass") == (422, "no_reason")
    assert await refused(office, "post", "/v1/bypass", {"for": 1}) == (422, "bad_request")


# --- reload ---------------------------------------------------------------------------------------------


async def test_a_reload_says_what_it_did(office: Office, tmp_path: Path) -> None:
    office.stand.config = tmp_path / "kvctl.toml"
    office.stand.config.write_text("margin = '8%'\nlisten = '127.0.0.1:9999'\n")
    done = await office.call("post", "/v1/reload")
    assert done == {
        "revision": 2,
        "applied": [{"key": "margin", "old": "5%", "new": "8%"}],
        "needs_restart": [{"key": "listen", "old": "127.0.0.1:8080", "new": "127.0.0.1:9999"}],
        "kept": True,
    }
    config = (await office.call("get", "/v1/config"))["settings"]
    assert (config["margin"]["text"], config["listen"]["text"]) == ("8%", "127.0.0.1:8080")
    assert config["margin"]["where"] == f"{office.stand.config}:1"
    assert (config["margin"]["live"], config["listen"]["live"]) == (True, False)
    (line,) = audit(office)
    assert (line["verb"], line["applied"], line["needs_restart"]) == ("reload", "margin", "listen")


async def test_a_bad_reload_keeps_the_old(office: Office, tmp_path: Path) -> None:
    """F23: the result says file, line, key and remedy, status shows it, and the next good one clears it."""
    office.stand.config = tmp_path / "kvctl.toml"
    office.stand.config.write_text("margin = '8%'\nmargn = 1\n")
    with pytest.raises(RefusedError) as caught:
        await office.call("post", "/v1/reload")
    where = f"{office.stand.config}:2: margn is not a setting; did you mean margin?"
    assert (caught.value.status, caught.value.code, str(caught.value)) == (422, "bad_settings", where)
    shown = (await office.call("get", "/v1/status"))["config"]
    assert shown == {"revision": 1, "problems": [where]}
    assert office.stand.given.margin == 0.05
    assert audit(office)[-1]["result"] == "bad_settings"
    office.stand.config.write_text("margin = '8%'\n")
    assert (await office.call("post", "/v1/reload"))["revision"] == 2
    assert (await office.call("get", "/v1/status"))["config"] == {"revision": 2, "problems": []}


async def test_an_unchanged_reload(office: Office) -> None:
    done = await office.call("post", "/v1/reload")
    assert (done["revision"], done["applied"], done["needs_restart"]) == (1, [], [])


async def test_what_would_not_go_together_until_a_restart(office: Office, tmp_path: Path) -> None:
    office.stand.config = tmp_path / "kvctl.toml"
    office.stand.config.write_text("scrape_interval = '50ms'\nstale_after = '300ms'\n")
    with pytest.raises(RefusedError, match=r"stale_after is 300ms.*until a restart"):
        await office.call("post", "/v1/reload")
    assert office.stand.given.stale_after == 10.0


def test_live_settings_are_settings() -> None:
    live = [key for key, spec in SPECS.items() if spec.live]
    assert {"margin", "policy", "enforce", "log_level"} <= set(live)
    assert not {"listen", "engine_url", "admin_socket", "state_dir"} & set(live)


# --- log level ------------------------------------------------------------------------------------------


@pytest.fixture
def level() -> Iterator[None]:
    before = logging.getLogger("kvctl").level
    yield
    logging.getLogger("kvctl").setLevel(before)


@pytest.mark.usefixtures("level")
async def test_the_level_goes_back_by_itself(office: Office) -> None:
    done = await office.call("post", "/v1/loglevel", {"level": "debug", "ttl_s": 600, "reason": "r"})
    assert (done["level"], done["kept"]) == ("debug", True)
    assert 500 < done["left_s"] <= 600
    assert logging.getLogger("kvctl").level == logging.DEBUG
    await office.call("post", "/v1/loglevel", {"level": "debug", "ttl_s": 1, "reason": "r"})
    async with asyncio.timeout(PATIENCE_S):
        while logging.getLogger("kvctl").level == logging.DEBUG:  # noqa: ASYNC110 - a timer has no event
            await asyncio.sleep(0.05)
    assert (await office.call("get", "/v1/loglevel")) == {"level": "info", "left_s": None}
    assert audit(office)[-1]["verb"] == "loglevel"


@pytest.mark.usefixtures("level")
async def test_levels_that_are_refused(office: Office) -> None:
    assert await refused(office, "post", "/v1/loglevel", {"level": "loud"}) == (422, "out_of_bounds")
    for ttl in (0, 1e9, "1h", True):
        assert await refused(office, "post", "/v1/loglevel", {"level": "info", "ttl_s": ttl}) == (
            422,
            "bad_ttl",
        )
    assert await refused(office, "post", "/v1/loglevel", {}) == (422, "bad_request")


# --- other readings -------------------------------------------------------------------------------------


async def test_queue_engines_and_cards(office: Office) -> None:
    assert (await office.call("get", "/v1/queue"))["engines"][ENGINE] == {
        "queue": None,
        "tenants": [],
        "engine_waiting": 0,
    }
    gate = (await office.call("get", "/v1/engines"))["engines"][ENGINE]
    assert gate["ranks"][0]["usage_gauge"] == "vllm:kv_cache_usage_perc"  # C01
    assert (await office.call("get", "/v1/gpus"))["gpus"][0]["uuid"] == "GPU-1"
    answer = await raw(office, request("GET", "/v1/metrics"))
    assert (answer[0], answer[2]) == (200, b"kvctl_leases 3\n")


# --- the stream -----------------------------------------------------------------------------------------


class Reader:
    """A listener on the socket."""

    def __init__(self, office: Office) -> None:
        self._office = office

    async def open(self, query: str = "") -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(self._office.socket)
        self.writer.write(f"GET /v1/events{query} HTTP/1.1\r\nHost: k\r\n\r\n".encode())
        await self.reader.readuntil(b"\r\n\r\n")
        assert (await self.next())["type"] == "hello"

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while not (line := await self.reader.readline()).startswith(b"{"):
                assert line, "the stream ended"
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        self.writer.close()


async def test_events_as_they_happen(office: Office) -> None:
    reader = Reader(office)
    await reader.open("?types=override,traffic")
    office.journal.tell("state", {"sentence": "not asked for"})
    await office.call("put", "/v1/overrides/margin", {"value": 0.12, "reason": "r"})
    await office.call("post", "/v1/drain")
    first, second = await reader.next(), await reader.next()
    assert (first["type"], first["verb"], first["knob"], first["new"]) == ("override", "set", "margin", 0.12)
    assert (second["type"], second["verb"]) == ("traffic", "drain")
    reader.close()
    async with asyncio.timeout(PATIENCE_S):
        while len(office.journal.hub):  # noqa: ASYNC110 - the server notices in its own time
            await asyncio.sleep(0.05)


async def test_a_reader_that_falls_behind_is_cut_with_a_word(office: Office) -> None:
    reader = Reader(office)
    await reader.open()
    for _ in range(2000):  # all at once: the server has no turn to send any of it
        office.journal.tell("note", {"text": "x" * 50})
    told = await reader.next()
    assert (told["type"], "too slow" in told["reason"]) == ("cut", True)
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.reader.read() in (b"", b"\r\n0\r\n\r\n")
    reader.close()


async def test_types_that_there_are_not(office: Office) -> None:
    assert await refused(office, "get", "/v1/events?types=decision,weather") == (400, "bad_request")
    assert "decision" in KINDS


async def test_a_client_reads_the_stream(office: Office) -> None:
    def first_two() -> list[str]:
        stream = AdminLines(office)
        return [next(stream)["type"], next(stream)["type"]]

    reading = asyncio.create_task(asyncio.to_thread(first_two))
    async with asyncio.timeout(PATIENCE_S):
        while not len(office.journal.hub):  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)
    office.journal.tell("note", {"text": "x"})
    assert await reading == ["hello", "note"]


def AdminLines(office: Office) -> Any:  # noqa: N802 - a maker
    from kvctl.admin.client import AdminClient  # noqa: PLC0415 - beside its only use

    return AdminClient(office.socket, PATIENCE_S).lines("/v1/events")


async def test_many_callers_and_one_that_hangs(office: Office) -> None:
    """A hundred at once are all answered, one after the other; who hangs holds up nobody."""
    hung = await asyncio.open_unix_connection(office.socket)
    hung[1].write(b"GET /v1/status HTTP/1.1\r\nHost")
    slowest = 0.0
    loop = asyncio.get_running_loop()

    async def lag() -> None:
        nonlocal slowest
        while True:
            before = loop.time()
            await asyncio.sleep(0.001)
            slowest = max(slowest, loop.time() - before)

    watch = asyncio.create_task(lag())
    answers = await asyncio.gather(*(raw(office, request("GET", "/v1/status")) for _ in range(100)))
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    assert {status for status, _, _ in answers} == {200}
    hung[1].close()


@pytest.mark.parametrize("seconds", [-1, 3601, "5m", True, None, float("inf")])
async def test_a_release_of_no_good_time(office: Office, seconds: object) -> None:
    """D16: the driver is let go of for a time that ends."""
    status, word = await refused(office, "post", "/v1/gpu/release", {"for_s": seconds})
    assert (status, word) in {(422, "bad_value"), (400, "bad_request")}


async def test_a_release_is_audited(office: Office) -> None:
    """D16: who let go of the driver, for how long and why."""
    done = await office.call("post", "/v1/gpu/release", {"for_s": 60, "reason": "reset"})
    assert done == {"released_s": 60.0, "kept": True}
    line = audit(office)[-1]
    assert (line["verb"], line["for_s"], line["reason"]) == ("gpu_release", 60.0, "reset")
