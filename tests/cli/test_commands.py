import asyncio
import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl import __version__
from kvctl.cli.main import VERBS
from kvctl.core.outcomes import CapacitySource, EngineState
from kvctl.core.overrides import Knob
from kvctl.settings.model import SPECS
from tests.cli.conftest import Daemon, Kvctl

HEAVY = (
    "aiohttp",
    "http.client",
    "ssl",
    "pydantic",
    "tokenizers",
    "rich",
    "asyncio",
    "prometheus_client",
    "jinja2",
    "msgspec",
    "uvloop",
)


async def test_status_page(daemon: Daemon, kvctl: Kvctl) -> None:
    daemon.stand.gate = replace(
        daemon.stand.gate, capacity_known=False, capacity_source=CapacitySource.FALLBACK
    )
    done = await kvctl("status")
    first, _, *page = done.out.splitlines()
    assert (done.status, done.err) == (0, "")
    assert first == daemon.stand.gate.sentence
    cells = {name: text for line in page[1:6] for name, text in pairs(line)}
    assert page[0] == "http://127.0.0.1:8000  up, policy forecast"
    assert cells == {
        "capacity": "48,000 (assumed)",
        "margin": "5%",
        "budget": "45,600",
        "pressure": "1.00",
        "forecast": "12,001",
        "headroom": "33,599",
        "held": "9,000",
        "claimed": "30,000",
        "in flight": "3",
        "nearest limit": "kv_budget",
    }
    assert page[6].split() == ["budget", "is", "steady"]
    assert page[10].split() == ["0", "0.1", "s", "48,000", "25%", "3", "0", "?"]
    assert page[13].split()[:3] == ["0", "card", "?"]


def pairs(line: str) -> list[tuple[str, str]]:
    """The two names and values of a line of the engine's block."""
    return [
        (line[2:14].strip(), line[14:36].strip()),
        (line[36:51].strip(), line[51:].strip()),
    ]


async def test_status_names_the_gauge_in_use(daemon: Daemon, kvctl: Kvctl) -> None:
    """C01: of the names that an engine's gauge has had, status shows which one is read."""
    assert "  usage gauge vllm:kv_cache_usage_perc" in (await kvctl("status")).out.splitlines()
    rank = replace(daemon.stand.gate.ranks[0], usage_gauge="vllm:gpu_cache_usage_perc")
    daemon.stand.gate = replace(daemon.stand.gate, ranks=(rank,))
    assert "vllm:gpu_cache_usage_perc" in (await kvctl("status")).out
    assert "vllm:gpu_cache_usage_perc" in (await kvctl("engines")).out


async def test_status_fits_80_columns(daemon: Daemon, kvctl: Kvctl) -> None:
    daemon.stand.gate = replace(
        daemon.stand.gate,
        capacity_tokens=123_456_789,
        budget_tokens=123_456_789,
        sentence="a long sentence " * 12,
        guards=daemon.stand.gate.guards,
    )
    await kvctl("set", "margin", "12%", "--reason", "a reason of some length " * 6)
    for line in (await kvctl("status")).out.splitlines():
        assert len(line) <= 80, line


async def test_status_json(daemon: Daemon, kvctl: Kvctl) -> None:
    done = await kvctl("status", "-o", "json", KVCTL_ADMIN_SOCKET="/nowhere/x")
    assert done.status == 3
    done = await kvctl("status", "-o", "json", "--socket", str(daemon.socket))
    (gate,) = json.loads(done.out)["engines"].values()
    assert gate["budget_tokens"] == 45_600


async def test_status_of_an_engine_that_is_down(daemon: Daemon, kvctl: Kvctl) -> None:
    daemon.stand.gate = replace(
        daemon.stand.gate, state=EngineState.UNREACHABLE, ranks=(), context_tokens=None, telemetry_age_s=None
    )
    done = await kvctl("status")
    assert done.status == 0
    assert "unreachable" in done.out
    assert "\x1b" not in done.out


async def test_set_show_unset(daemon: Daemon, kvctl: Kvctl) -> None:
    done = await kvctl("set", "margin", "12%", "--for", "1h30m", "--reason", "preemptions since 02:10")
    assert (done.status, done.out, done.err) == (0, "margin: 5% -> 12% for 1 h 30 min (revision 1)\n", "")
    assert daemon.desk.values()[Knob.MARGIN] == 0.12
    line = "margin = 12% for 1 h 30 min more, by root: preemptions since 02:10".replace(
        "root", daemon.desk.active()[Knob.MARGIN].actor
    )
    assert (await kvctl("overrides")).out == f"{line}\nrevision 1\n"
    assert (await kvctl("status")).out.splitlines()[-1] == line
    assert set(json.loads((await kvctl("overrides", "-o", "json")).out)) == {
        "revision",
        "active",
        "drains",
        "kept",
    }
    done = await kvctl("unset", "margin", "-o", "json")
    assert (done.status, json.loads(done.out)["new"]) == (0, 0.05)
    assert (await kvctl("overrides")).out == "no override is in force\nrevision 2\n"


async def test_one_override_in_the_place_of_another(daemon: Daemon, kvctl: Kvctl) -> None:
    assert "replaces" not in (await kvctl("set", "margin", "12%", "--for", "1h", "--reason", "before")).out
    actor = daemon.desk.active()[Knob.MARGIN].actor
    done = await kvctl("set", "margin", "8%", "--reason", "r")
    assert done.out.splitlines() == [
        "margin: 12% -> 8% for 30 min (revision 2)",
        f"it replaces an override by {actor} (before), 1 h of it left",
    ]
    assert json.loads((await kvctl("set", "margin", "9%", "--reason", "r", "-o", "json")).out)["new"] == 0.09


async def test_policy_and_the_default_life(daemon: Daemon, kvctl: Kvctl) -> None:
    done = await kvctl("set", "policy", "static", "--reason", "r")
    assert done.out == "policy: forecast -> static for 30 min (revision 1)\n"
    assert daemon.desk.values()[Knob.POLICY] == "static"


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("set", "margin", "90%", "--reason", "r"), 4, "90% is outside 0% to 50% (margin_min to margin_max)"),
        (("set", "margin", "0,12", "--reason", "r"), 4, "write a share such as 8%"),
        (
            ("set", "margin", "12%", "--for", "25h", "--reason", "r"),
            4,
            "is outside 1 s to 24 h (override_ttl_max)",
        ),
        (("set", "margin", "12%", "--reason", " "), 4, "needs a reason"),
        (("set", "margin", "12%", "--reason", "r", "--if-match", "7"), 4, "revision 7 is stale"),
        (("set", "mar/gin", "12%", "--reason", "r"), 4, "no knob; there are margin, policy, enforce"),
        (("unset", "margin"), 4, "no override of margin is in force"),
        (("set", "margin", "12%"), 2, "Missing option '--reason'"),
        (("set", "margin", "12%", "--for", "soon", "--reason", "r"), 2, "write 90s, 30m or 2h"),
        (("frobnicate",), 2, "No such command"),
        (("statsu",), 2, "Did you mean status?"),
        (("status", "-o", "xml"), 2, "is not one of"),
    ],
)
async def test_refusals(kvctl: Kvctl, arguments: tuple[str, ...], status: int, text: str) -> None:
    done = await kvctl(*arguments)
    assert (done.status, done.out) == (status, "")
    assert text in done.err
    assert "Traceback" not in done.err


async def test_drain(daemon: Daemon, kvctl: Kvctl) -> None:
    said = "draining: new requests get 503, and what runs goes on; kvctl undrain ends it\n"
    assert (await kvctl("drain", "--reason", "new driver")).out == said
    assert daemon.stand.draining
    told = "new driver; holds over restarts, kvctl undrain ends it"
    for verb in ("status", "overrides"):
        assert told in " ".join((await kvctl(verb)).out.split()), verb
    assert json.loads((await kvctl("undrain", "-o", "json")).out) == {"mode": "active", "kept": True}
    assert not daemon.stand.draining
    assert (await kvctl("undrain")).out == "active: nothing was drained\n"
    assert (await kvctl("drain")).status == 0
    assert (await kvctl("undrain")).out == "active: requests are admitted again\n"
    assert "undrain" not in (await kvctl("status")).out


async def test_status_says_once_that_all_is_drained(daemon: Daemon, kvctl: Kvctl) -> None:
    sentence = f"{daemon.stand.gate.sentence}, draining"
    daemon.stand.gate = replace(daemon.stand.gate, sentence=sentence)
    daemon.stand.draining = True
    page = (await kvctl("status")).out
    assert page.startswith("draining: ")
    assert page.count("draining") == 1


async def test_a_change_that_would_not_outlive_a_restart(
    daemon: Daemon, kvctl: Kvctl, tmp_path: Path
) -> None:
    (tmp_path / "state").touch()  # a file where the folder should be
    done = await kvctl("set", "margin", "12%", "--reason", "r")
    assert (done.status, daemon.desk.values()[Knob.MARGIN]) == (0, 0.12)
    assert "a restart would undo it" in done.err
    assert "a restart would undo it" in (await kvctl("drain")).err


async def test_nobody_answers(kvctl: Kvctl, tmp_path: Path) -> None:
    done = await kvctl("status")
    assert done.status == 3
    assert "is the daemon running" in done.err
    (tmp_path / "kvctl.sock").write_text("")
    assert (await kvctl("status")).status == 3


async def test_an_answer_that_never_comes(kvctl: Kvctl, tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(silent, tmp_path / "kvctl.sock"):
        done = await kvctl("status", "--timeout", "0.2")
        assert (done.status, "no answer within 0.2 s; the daemon hangs or is very busy" in done.err) == (
            6,
            True,
        )
        done = await kvctl("drain", "--timeout", "0.2")
        assert (done.status, "whether it was done is not known (kvctl status, kv" in done.err) == (6, True)
        target = tmp_path / "it.tar.gz"
        done = await kvctl("support", "--timeout", "0.2", "--file", str(target))
        assert (done.status, done.err.count("no answer within 0.2 s")) == (0, 1)
        done = await kvctl(
            "doctor", "--timeout", "0.2", KVCTL_ENGINE_URL="http://127.0.0.1:1", KVCTL_GPUS="none"
        )
        assert "    -> see its log; restart it if it hangs" in done.out
    with tarfile.open(target) as archive:
        members = {name.removeprefix("kvctl-support/") for name in archive.getnames()}
    assert {"status.json", "config-of-file.json", "audit.jsonl"} <= members


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-x\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", b"HTTP/1.1 200 OK\r\n\r\n<"],
)
async def test_somebody_else_answers(kvctl: Kvctl, tmp_path: Path, answer: bytes) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(other, tmp_path / "kvctl.sock"):
        done = await kvctl("status")
    assert done.status in (1, 3)
    assert done.err.startswith("kvctl: ")


async def test_check_config(kvctl: Kvctl, tmp_path: Path) -> None:
    config = tmp_path / "kvctl.toml"
    config.write_text("margn = 1\nlisten = '8080'\n")
    done = await kvctl("check-config", "--config", str(config))
    assert (done.status, done.out) == (1, "")
    assert done.err.splitlines() == [
        f"kvctl: {config}:2: listen = '8080' is not host:port; write host:port, [::1]:port or :port",
        f"kvctl: {config}:1: margn is not a setting; did you mean margin?",
    ]
    done = await kvctl("check-config", "--config", str(config), "-o", "json")
    assert (done.status, len(json.loads(done.out)["problems"])) == (1, 2)
    config.write_text(f"engine_url = 'http://h:1'\nstate_dir = '{tmp_path}'\ntokenizer = '/nowhere'\n")
    done = await kvctl("check-config", "--config", str(config))
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("kvctl: tokenizer '/nowhere' cannot be used")
    done = await kvctl("check-config", "-o", "json", KVCTL_CONFIG=str(config))
    assert (done.status, json.loads(done.out)["ok"]) == (1, False)
    config.write_text(f"engine_url = 'http://h:1'\nstate_dir = '{tmp_path}'\n")
    done = await kvctl("check-config", "--config", str(config))
    assert (done.status, done.out.splitlines()[-1]) == (0, "the settings are good")


async def test_show_config(daemon: Daemon, kvctl: Kvctl, tmp_path: Path) -> None:
    config = tmp_path / "kvctl.toml"
    config.write_text("engine_url = 'http://h:1'\n")
    done = await kvctl("show-config", KVCTL_CONFIG=str(config), KVCTL_MARGIN="7%")
    rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines()}
    assert set(rows) == {"SETTING", *SPECS}
    assert rows["engine_url"] == ["http://h:1", "file", f"{config}:1"]
    assert rows["margin"] == ["7%", "env", "KVCTL_MARGIN"]
    live = await kvctl("show-config", "--live", "-o", "json")
    assert json.loads(live.out)["settings"]["engine_url"]["value"] == daemon.stand.given.engine_url
    assert (await kvctl("show-config")).status == 1


async def test_serve_judges_before_it_starts(kvctl: Kvctl) -> None:
    done = await kvctl("serve", "--margin", "12", "--tick-interval", "1ms")
    assert done.status == 2
    assert "command line: --margin = '12' is more than the whole: for 12 percent write 12%" in done.err
    assert "command line: --tick-interval = '1ms' is below the least allowed, 10ms" in done.err
    assert "environment: KVCTL_MARGN is not a setting" in (await kvctl("serve", KVCTL_MARGN="1")).err


async def test_serve_has_a_flag_for_every_setting(kvctl: Kvctl) -> None:
    done = await kvctl("serve", "--help")
    for spec in SPECS.values():
        assert (f"  {spec.flag} " in done.out) is not spec.secret, spec.flag


async def test_help_and_version(kvctl: Kvctl) -> None:
    done = await kvctl("--help")
    assert [line.split()[0] for line in done.out.partition("Commands:\n")[2].splitlines()] == list(VERBS)
    for spelling in ("version", "--version"):
        assert (await kvctl(spelling)).out == f"kvctl {__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
async def test_every_verb_has_help(kvctl: Kvctl, verb: str) -> None:
    assert (await kvctl(verb, "--help")).status == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("version",),
        ("status",),
        ("set", "margin", "8%", "--for", "1h", "--reason", "r", "--socket", "/nowhere"),
        ("drain", "--help"),
        ("explain", "x", "--socket", "/nowhere"),
        ("check", "--socket", "/nowhere"),
        ("events", "--socket", "/nowhere"),
        ("top", "--help"),
        ("reload", "--socket", "/nowhere"),
        ("bypass", "--for", "1h", "--reason", "r", "--socket", "/nowhere"),
    ],
)
def test_commands_import_little(arguments: tuple[str, ...]) -> None:
    """What makes a start slow is what it imports; a clock would measure the machine."""
    probe = (
        "import sys\nfrom kvctl.cli.main import cli\n"
        f"try: cli({list(arguments)!r}, prog_name='kvctl')\n"
        "except SystemExit: pass\n"
        f"print('imported:', *sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported:"
