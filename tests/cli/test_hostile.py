"""Names that strangers chose reach a terminal as words, from every verb and in every form."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvctl.cli.terminal import as_json, harmless, shown
from kvctl.cli.top import History, frame
from kvctl.core.overrides import Knob
from tests.admin.conftest import GATE, RANK
from tests.cli.conftest import Daemon, Kvctl
from tests.core.test_decisions import REFUSED, record

HOSTILE = "a\x1b[2J\x1b]0;owned\x07\x9b31m\u202eb\r\nc|[/red]\ud800"


@pytest.fixture
def hostile(daemon: Daemon) -> Daemon:
    rank = replace(RANK, rank=HOSTILE, usage_gauge=HOSTILE)
    daemon.stand.gate = replace(GATE, sentence=HOSTILE, models=(HOSTILE,), ranks=(rank,))
    daemon.journal.ring.add(record(1, REFUSED, HOSTILE))
    daemon.journal.ring.add(record(2, REFUSED, "known"))
    return daemon


VERBS = (
    ("status",), ("engines",), ("queue",), ("gpu", "list"), ("events",), ("explain", "known"), ("check",),
    ("top", "--frames", "1"), ("show-config", "--live"), ("explain", "\x1b[2J"), ("set", "\x1b[2J", "1"),
    ("drain", "--engine", "\x1b[2J"),
)  # fmt: skip


@pytest.mark.usefixtures("hostile")
async def test_no_verb_lets_a_name_touch_the_terminal(kvctl: Kvctl) -> None:
    for verb in VERBS:
        done = await kvctl(*verb, *(("--reason", "r") if verb[0] == "set" else ()))
        assert done.out + done.err, verb
        assert all(line.isprintable() for line in (done.out + done.err).split("\n")), verb
    check = (await kvctl("check")).out
    assert check.count("|") == 1  # what comes after it are figures
    assert check.count("\n") == 1


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("verb", [("status",), ("engines",), ("events",)])
async def test_json_says_the_same_and_touches_nothing(kvctl: Kvctl, verb: tuple[str, ...]) -> None:
    done = await kvctl(*verb, "-o", "jsonl")
    assert all(line.isprintable() for line in done.out.split("\n"))
    assert HOSTILE in texts(json.loads(done.out.splitlines()[0]))


def texts(node: Any) -> list[str]:
    """Every text of a document."""
    if isinstance(node, str):
        return [node]
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [text for part in parts for text in texts(part)]


def test_what_prints_stays() -> None:
    assert harmless("größer 日本 🙂 'x'") == "größer 日本 🙂 'x'"
    assert harmless("a\x1b[1m\n\u202e\ud800") == "a\\x1b[1m\\n\\u202e\\ud800"
    assert shown({"\n": ["\t", 1, None, 2.5, True]}) == {"\\n": ["\\t", 1, None, 2.5, True]}
    document = {"a": HOSTILE, "b": [HOSTILE, "ü"], "c": "\U000e0001"}
    for indent in (None, 2):
        assert json.loads(as_json(document, indent=indent)) == document


def drawn(engines: int, width: int, height: int, *, refusals: int = 8) -> list[str]:
    """The lines of ``kvctl top`` on a screen of that size."""
    gate = {
        "budget_tokens": 45_600, "capacity_tokens": 48_000, "forecast_peak_tokens": 12_000.7,
        "held_tokens": 9_000, "leases": 3, "binding_limit": "kv_budget", "state": "up",
        "queue": {"waiting": {"high": 1, "normal": 2, "low": 0}, "oldest_s": 75.0},
        "ranks": [{"kv_usage_ratio": 0.25}],
    }  # fmt: skip
    refused = {
        "time": "2026-01-01T02:03:04.567+00:00", "id": "req-" + "x" * 60, "prompt_tokens": 12_345,
        "allowed_output": 4096, "reason": "decode_concurrency", "retry_after_s": 12.5,
    }  # fmt: skip
    document = {
        "version": "1.0", "mode": "active",
        "engines": {f"engine-{number} [/red]": gate for number in range(engines)},
        "overrides": {"active": {"margin": {"value": 0.12, "left_s": 1700.0, "reason": "long " * 40}}},
    }  # fmt: skip
    past = History()
    for _ in range(100):
        past.note(document)
    console = Console(width=width, height=height, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(frame(document, [refused] * refusals, past, (width, height)))
    return captured.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40), (80, 12)])
@pytest.mark.parametrize("engines", [1, 2, 5])
def test_top_fits_the_screen(engines: int, width: int, height: int) -> None:
    """Every engine, the override and the last refusal are on it, whole numbers and all."""
    lines = drawn(engines, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in (*(f"engine-{number}" for number in range(engines)), "margin = 0.12", "45,600", "12,345"):
        assert part in text
    assert "decode_concurrency" in text


async def test_events_follow_in_a_process(daemon: Daemon, kvctl: Kvctl) -> None:
    """kvctl events -f: what happens is shown as it happens; the end of the daemon's stream is told."""
    following = asyncio.create_task(kvctl("events", "-f", "-o", "jsonl", "--types", "override"))
    async with asyncio.timeout(30):
        while len(daemon.journal.hub) == 0:  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.01)
    daemon.journal.tell("override", {"verb": "set", "knob": Knob.MARGIN, "reason": HOSTILE, "user": "ana"})
    for number in range(2000):  # it is too slow for these
        daemon.journal.tell(
            "override", {"verb": "set", "knob": Knob.MARGIN, "reason": str(number), "user": "b"}
        )
    done = await following
    assert done.status == 1
    assert "cut this stream" in done.err
