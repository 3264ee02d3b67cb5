"""The verbs of the night: explain, events, check, bypass, reload, loglevel, support and the rest."""

import asyncio
import json
import signal
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.cli.card_remedies import CARD_REMEDIES, no_reading
from kvctl.cli.events import line
from kvctl.cli.main import VERBS
from kvctl.cli.top import History, frame
from kvctl.control.decision_file import DecisionFile
from kvctl.core.outcomes import DECISION_OF, Decision, EngineState, RejectReason, SourceFault
from kvctl.core.overrides import Knob
from tests.admin.conftest import ENGINE, GATE
from tests.cli.conftest import MAIN, Daemon, Kvctl
from tests.core.test_decisions import ADMITTED, REFUSED, ended, record


async def test_explain_a_refusal(daemon: Daemon, kvctl: Kvctl) -> None:
    daemon.journal.ring.add(record(1, REFUSED, "caller-1"))
    done = await kvctl("explain", "caller-1")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("caller-1  1970-01-01T")
    assert lines[1:] == [
        "asked   100 prompt tokens, max_tokens 400, 400 allowed",
        "said    reject_later: kv_budget, with it the forecast peak would pass the KV budget",
        "weighed forecast peak with it 9,700 against a budget of 9,500",
        "        (capacity 10,000, margin 5%; 3 in flight)",
        "        by itself it needed up to 500, 290 were free; short by 200 with it",
        "needed  200 KV tokens fewer in flight, or a request smaller by that",
        "    or  a margin of at most 3% (it was 5%)",
        "told    to come back after 1 s",
    ]


async def test_explain_has_words_for_every_reason(daemon: Daemon, kvctl: Kvctl) -> None:
    reasons = [each for each in RejectReason if DECISION_OF[each] is not Decision.UNAVAILABLE]
    daemon.stand.says = {
        each.value: replace(REFUSED, reason=each, decision=DECISION_OF[each]) for each in reasons
    }
    said = (await kvctl("explain", "--prompt-tokens", "100")).out
    words = [line.partition(", ")[2] for line in said.splitlines() if line.startswith("said ")]
    assert len(set(words)) == len(reasons)
    assert not {"a limit", "the engine served nobody"} & set(words)


async def test_explain_one_that_ended(daemon: Daemon, kvctl: Kvctl) -> None:
    daemon.journal.ring.add(record(2, replace(ADMITTED, forecast_bounded=True)))
    said = (await kvctl("explain", "l-2")).out
    assert "weighed forecast peak with it at most " in said
    assert "        at least 500 left with it\n" in said
    daemon.journal.ring.add(record(1, ADMITTED))
    assert "ended   not yet: it runs" in (await kvctl("explain", "l-1")).out
    daemon.journal.ring.add(ended(1))
    done = await kvctl("explain", "l-1")
    assert "ended   finished after 2.0 s: 50 output tokens, 160 KV tokens held of 512 claimed" in done.out
    assert json.loads((await kvctl("explain", "l-1", "-o", "jsonl")).out)["ended"]["end"] == "finished"


@pytest.mark.parametrize(
    ("free", "peak", "said"),
    [
        (5_632, 4_456.0, "5,632 were free; 5,044 left with it"),  # of another limit than the budget
        (0, 9_700.0, "none was free; short by 200 with it"),
        (None, 9_700.0, "500; short by 200 with it"),  # by a daemon that does not tell
    ],
)
async def test_what_was_free_is_what_the_caller_was_told(
    daemon: Daemon, kvctl: Kvctl, free: int | None, peak: float, said: str
) -> None:
    daemon.journal.ring.add(record(1, replace(REFUSED, free_tokens=free, forecast_tokens=peak), "caller-1"))
    assert said in (await kvctl("explain", "caller-1")).out


async def test_explain_what_is_only_thought_of(daemon: Daemon, kvctl: Kvctl) -> None:
    daemon.stand.says = {ENGINE: replace(REFUSED, retry_after_s=4.2)}
    done = await kvctl("explain", "--prompt-tokens", "100", "--max-tokens", "400", "--n", "2", "--stream")
    (shape,) = daemon.stand.asked
    assert (shape.prompts, shape.asked_output, shape.n, shape.stream) == ((100,), 400, 2, True)
    assert done.out.splitlines()[0] == f"{ENGINE}  now"
    assert done.out.splitlines()[-1] == "when    in about 4.2 s, at the pace of the last seconds"


@pytest.mark.usefixtures("daemon")
async def test_explain_what_nobody_knows(kvctl: Kvctl) -> None:
    done = await kvctl("explain", "never-seen")
    assert done.status == 4
    assert "decision_log_file, which would keep more of them, is not set" in done.err
    assert "the ID is the answer's X-Request-Id" in done.err
    assert (await kvctl("explain")).status == 2
    assert (await kvctl("explain", "x", "--prompt-tokens", "1")).status == 2


async def test_explain_one_of_before_the_restart(daemon: Daemon, kvctl: Kvctl, tmp_path: Path) -> None:
    file = DecisionFile(tmp_path / "d.jsonl", max_bytes=1 << 20, wall_offset=lambda: 0.0)
    file.put(record(1, REFUSED, "caller-1"))
    await file.close()
    daemon.journal.file = file
    done = await kvctl("explain", "caller-1")
    assert (done.status, done.err) == (0, "")
    assert (await kvctl("explain", "chatcmpl-caller-1")).out == done.out
    daemon.journal.ring.add(record(1, REFUSED, "caller-1"))
    daemon.journal.file = None
    said = (await kvctl("explain", "caller-1")).out.splitlines()
    assert done.out.splitlines()[1:] == said[1:]
    daemon.journal.file = file
    done = await kvctl("explain", "never-seen")
    assert (done.status, f"nor in the last 64 MiB of decision_log_file ({file.path})" in done.err) == (
        4,
        True,
    )


async def test_bypass_and_resume(daemon: Daemon, kvctl: Kvctl) -> None:
    done = await kvctl("bypass", "--for", "15m", "--reason", "refusals on an idle engine")
    assert (done.status, done.out) == (0, "active for 15 min\n")  # the stand-in's gate has no say in it
    assert daemon.desk.values()[Knob.ENFORCE] == 0.0
    assert "enforce = 0% for 15 min more" in (await kvctl("overrides")).out
    done = await kvctl("resume")
    assert (done.status, done.out) == (0, "active: its limits are enforced again\n")
    done = await kvctl("resume")
    assert (done.status, "no bypass is in force" in done.err) == (4, True)
    assert (await kvctl("bypass")).status == 2


async def test_a_dry_run(daemon: Daemon, kvctl: Kvctl) -> None:
    for number in range(3):
        daemon.journal.ring.add(record(number, REFUSED))
    done = await kvctl("set", "margin", "2%", "--dry-run")  # changes nothing: needs no reason
    assert done.out.splitlines() == [
        "margin: 5% -> 2% would mean",
        f"  {ENGINE}:",
        "    budget 45,600 -> 47,040 KV tokens",
        "    headroom 33,599 -> 35,039 KV tokens",
        "  of 3 refusals of the last 5 min about 1 would have been admitted,",
        "  of 0 other decisions about 0 refused",
    ]
    assert daemon.desk.revision == 0
    assert (await kvctl("set", "margin", "2%", "--dry-run", "--reason", "r")).out == done.out
    done = await kvctl("set", "margin", "2%")
    assert (done.status, "Missing option '--reason'" in done.err) == (2, True)


async def test_a_reload_that_is_only_thought_of(daemon: Daemon, kvctl: Kvctl, tmp_path: Path) -> None:
    same = "the settings in force are those that a reload would find\n"
    assert (await kvctl("reload", "--dry-run")).out == same
    config = daemon.stand.config = tmp_path / "kvctl.toml"
    config.write_text("margin = '8%'\nlisten = '127.0.0.1:9'\n")
    done = await kvctl("reload", "--dry-run")
    assert (done.status, done.out.splitlines()) == (
        0,
        [
            "margin: 5% -> 8% after a reload (kvctl reload)",
            "listen: 127.0.0.1:8080 -> 127.0.0.1:9 after a restart (systemctl restart kvctl)",
        ],
    )
    assert daemon.stand.given.margin == 0.05
    config.write_text("margn = '8%'\n")
    done = await kvctl("reload", "--dry-run")
    assert (done.status, "did you mean margin?" in done.err) == (1, True)
    assert "the old settings stay in force; a reload would say the same" in done.err
    assert json.loads((await kvctl("status", "-o", "json")).out)["config"]["problems"] == []


async def test_reload(daemon: Daemon, kvctl: Kvctl, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F23: exit 1 with file, line, key and remedy on a bad file; what waits for a restart is named."""
    config = daemon.stand.config = tmp_path / "kvctl.toml"
    config.write_text("margin = '8%'\nlisten = '127.0.0.1:9'\n")
    assert (await kvctl("reload")).out.splitlines() == [
        "margin: 5% -> 8%",
        "listen: 127.0.0.1:8080 -> 127.0.0.1:9 after a restart (systemctl restart kvctl)",
        "settings revision 2",
    ]
    config.write_text("margin = '800%'\n")
    done = await kvctl("reload")
    assert (done.status, done.out) == (1, "")
    assert done.err.splitlines()[0].startswith(f"kvctl: {config}:1: margin = '800%' is more than the whole")
    assert "the old settings stay in force" in done.err
    config.write_text("margin = '800%'\nretry_after_max = 'soon'\n")
    assert (await kvctl("reload")).status == 1
    (logged,) = [each.getMessage() for each in caplog.records if "not reloaded" in each.getMessage()][-1:]
    assert "margin = '800%'" in logged
    assert "retry_after_max = 'soon'" in logged  # for SIGHUP and systemctl reload the log is all there is
    assert "the last reload was refused" in (await kvctl("status")).out


@pytest.mark.usefixtures("daemon")
async def test_loglevel(kvctl: Kvctl) -> None:
    done = await kvctl("loglevel", "debug", "--for", "10m", "--reason", "r")
    assert (done.status, done.out) == (0, "debug for 10 min\n")
    assert (await kvctl("loglevel", "loud")).status == 2
    assert (await kvctl("loglevel", "info", "--for", "1s")).status == 0


async def test_check(daemon: Daemon, kvctl: Kvctl) -> None:
    done = await kvctl("check")
    assert done.status == 0
    assert done.out.startswith("KVCTL OK - ")
    assert "| budget=45600 forecast=12001 headroom=33599 leases=3" in done.out
    assert (await kvctl("check", "-w", "0.9")).status == 1
    assert (await kvctl("check", "-w", "0.9", "-c", "0.8")).status == 2
    daemon.stand.gate = replace(daemon.stand.gate, state=EngineState.STALE, telemetry_age_s=99.0)
    assert (await kvctl("check")).status == 1
    daemon.stand.gate = replace(daemon.stand.gate, state=EngineState.UNREACHABLE)
    done = await kvctl("check")
    assert (done.status, "requests get 503" in done.out) == (2, True)
    daemon.stand.gate = GATE
    daemon.stand.draining = True
    assert "kvctl is in mode draining: kvctl undrain ends it |" in (await kvctl("check")).out
    daemon.stand.draining, daemon.stand.bypass = False, True
    assert "kvctl is in mode bypass: kvctl resume ends it |" in (await kvctl("check")).out
    done = await kvctl("check", "--socket", "/nowhere/x")
    assert (done.status, done.out.startswith("KVCTL UNKNOWN - ")) == (3, True)


async def test_drain_waits_until_nothing_runs(daemon: Daemon, kvctl: Kvctl) -> None:
    done = await kvctl("drain", "--wait", "--timeout", "0.3")
    while "no answer within" in done.err:  # the daemon of this test stood still for as long
        done = await kvctl("drain", "--wait", "--timeout", "0.3")
    assert (done.status, "3 requests still run" in done.err) == (6, True)
    waiting = asyncio.create_task(kvctl("drain", "--wait"))
    await asyncio.sleep(0.1)
    daemon.stand.gate = replace(daemon.stand.gate, leases=0)
    done = await waiting
    said = "draining: new requests get 503, and nothing runs any more; kvctl undrain ends it\n"
    assert (done.status, done.out) == (0, said)


async def test_the_last_events(daemon: Daemon, kvctl: Kvctl) -> None:
    daemon.journal.ring.add(record(1, REFUSED, "caller-1"))
    assert "refuse  caller-1  100+400 tokens  kv_budget  retry after 1 s" in (await kvctl("events")).out
    assert json.loads((await kvctl("events", "-o", "jsonl")).out)["id"] == "caller-1"


async def test_events_of_some_kinds(daemon: Daemon, kvctl: Kvctl) -> None:
    """Decisions alone are remembered: who asks for others gets none of those, and hears how to see these."""
    daemon.journal.ring.add(record(1, REFUSED, "caller-1"))
    assert "caller-1" in (await kvctl("events", "--types", "decision,state")).out
    done = await kvctl("events", "-n", "6", "--types", "budget,state")
    assert (done.status, done.out, "with -f" in done.err) == (2, "", True)


def test_a_line_for_every_kind() -> None:
    state = {"type": "state", "time": "2026-01-01T02:10:00.000+00:00", "sentence": "engine up -> stale"}
    assert line(state) == "02:10:00.000  state   engine up -> stale"
    change = {"type": "override", "verb": "set", "knob": "margin", "old": 0.05, "new": 0.1, "user": "ana"}
    assert line(change).strip() == "set margin: 0.05 -> 0.1 by ana"
    drain = {"type": "traffic", "verb": "drain", "engine": "a", "user": "ana", "reason": "new driver"}
    assert line(drain).strip() == "drain of a by ana (new driver)"
    assert line({"type": "restart", "rank": "0"}).strip() == "restart  rank=0"


async def test_queue_and_engines(daemon: Daemon, kvctl: Kvctl) -> None:
    shown = (await kvctl("queue")).out.splitlines()
    assert shown[1].split()[:4] == [ENGINE, "off", "off", "off"]
    assert shown[2] == "the queue is off: what does not fit is refused at once (queue_max_wait)"
    assert (await kvctl("engines")).out.splitlines()[1].split()[:4] == [ENGINE, "up", "0", "48,000"]
    assert daemon.stand.gate.queue is None


async def test_cards_that_cannot_be_read(daemon: Daemon, kvctl: Kvctl) -> None:
    assert "no reading of cards" not in (await kvctl("status")).out
    for fault in (each for each in SourceFault if each in CARD_REMEDIES):
        assert no_reading(fault) == f"no reading of cards: {fault}; {CARD_REMEDIES[fault]}"
    daemon.stand.gpu_fault = SourceFault.LIBRARY_MISSING
    for verb in (("status",), ("gpu", "list")):
        said = " ".join((await kvctl(*verb)).out.split())
        assert "no reading of cards: library_missing; install the NVIDIA driver, or set gpus = none" in said


async def test_doctor_without_settings_beside_a_daemon(daemon: Daemon, kvctl: Kvctl) -> None:
    done = await kvctl("doctor", KVCTL_CONFIG="/dev/null")
    assert done.status == 1
    assert "engine_url is not set" in done.out
    assert f"one runs all the same, in front of {daemon.stand.given.engine_url}" in done.out
    assert "kvctl doctor --live goes by its settings, kvctl show-config --live shows them" in done.out
    done = await kvctl("doctor", KVCTL_CONFIG="/dev/null", KVCTL_ADMIN_SOCKET="/nowhere")
    assert (done.status, "runs all the same" in done.out) == (1, False)


@pytest.mark.parametrize("verb", sorted(VERBS))
async def test_no_help_shows_how_it_was_written(kvctl: Kvctl, verb: str) -> None:
    done = await kvctl(verb, "--help")
    assert done.status == 0
    assert "\\" not in done.out


async def test_top_without_a_terminal(daemon: Daemon, kvctl: Kvctl) -> None:
    daemon.journal.ring.add(record(1, REFUSED, "caller-1"))
    done = await kvctl("top", "--frames", "1")
    assert (done.status, done.err) == (0, "")
    assert "budget" in done.out
    assert "caller-1" in done.out


def test_the_curve_of_top_stays_in_its_bounds() -> None:
    past = History()
    for peak in (0, 50, 1000):
        past.note({"engines": {"e": {"forecast_peak_tokens": peak, "budget_tokens": 100}}})
    assert past.curve("e") == " ▄█"
    assert past.curve("other") == ""
    empty = {"version": "1", "mode": "active", "engines": {}, "overrides": {"active": {}}}
    assert frame(empty, [], past) is not None


async def test_support(daemon: Daemon, kvctl: Kvctl, tmp_path: Path) -> None:
    daemon.journal.ring.add(record(1, REFUSED, "caller-1"))
    target = tmp_path / "it.tar.gz"
    done = await kvctl("support", "--file", str(target))
    assert (done.status, done.out) == (0, f"{target}\n")
    with tarfile.open(target) as archive:
        names = {name.removeprefix("kvctl-support/") for name in archive.getnames()}
        member = archive.extractfile("kvctl-support/decisions.json")
        assert member is not None
        assert b"caller-1" in member.read()
    assert {"README.txt", "versions.json", "status.json", "config.json", "metrics.prom"} <= names
    assert {"decisions.json", "audit.jsonl", "engine-0.prom"} <= names
    assert (await kvctl("support", "--file", str(target))).status == 1  # nothing is overwritten


async def test_support_without_a_daemon(kvctl: Kvctl, tmp_path: Path) -> None:
    target = tmp_path / "it.tar.gz"
    done = await kvctl("support", "--file", str(target), KVCTL_ENGINE_URL="http://127.0.0.1:1")
    assert (done.status, done.out) == (0, f"{target}\n")
    assert done.err.startswith("kvctl: without what the daemon knows: ")
    with tarfile.open(target) as archive:
        member = archive.extractfile("kvctl-support/status.json")
        assert member is not None
        assert b"not to be had" in member.read()
        settings = archive.extractfile("kvctl-support/config-of-file.json")
        assert settings is not None
        assert json.load(settings)["engine_url"]["value"] == "http://127.0.0.1:1"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_completion(kvctl: Kvctl, shell: str) -> None:
    done = await kvctl("completion", shell)
    assert (done.status, "kvctl" in done.out) == (0, True)


async def test_verbs_complete(kvctl: Kvctl) -> None:
    done = await kvctl(_KVCTL_COMPLETE="bash_complete", COMP_WORDS="kvctl by", COMP_CWORD="1")
    assert done.out == "plain,bypass\n"
    assert "bypass" in VERBS


async def test_watch_shows_again(daemon: Daemon) -> None:
    """Until somebody has seen enough; Ctrl-C is no failure."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MAIN, "status", "-o", "jsonl", "--watch", "0.1"),
        *("--socket", str(daemon.socket)),
        stdout=asyncio.subprocess.PIPE,
        # a suite in a shell's background was told to ignore it, and so would be whatever it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    async with asyncio.timeout(120):
        for _ in range(3):
            assert json.loads(await process.stdout.readline())["mode"] == "active"
        process.send_signal(signal.SIGINT)
        await process.stdout.read()
        assert await process.wait() == 0


async def test_cards_and_letting_go_of_them(daemon: Daemon, kvctl: Kvctl) -> None:
    done = await kvctl("gpu", "list")
    assert done.status == 0
    assert done.out.splitlines()[0].split()[:3] == ["GPU", "UUID", "FREE"]
    assert "GPU-1" in done.out
    done = await kvctl("gpu", "release", "--for", "10m", "--reason", "MIG layout")
    assert (done.status, done.out) == (0, "no card is held, for up to 10 min\n")
    assert (await kvctl("gpu", "acquire")).out == "the cards are read again\n"
    assert daemon.stand.released == [600.0, 0.0]
    assert (await kvctl("gpu", "release", "--for", "2h")).status != 0
