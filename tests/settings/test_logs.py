import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import pytest

from kvctl import logs

Lines = Callable[[], list[str]]


@contextmanager
def logging_to(
    stream: TextIO, form: str = "text", level: str = "info", **env: str
) -> Iterator[logs.QueuedHandler]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    root.handlers = []
    handler = logs.start(level, form, stream, env)
    try:
        yield handler
    finally:
        logs.stop(handler)
        root.handlers, root.level = before


def written(form: str = "text", level: str = "info", *, act: Callable[[logging.Logger], object]) -> list[str]:
    stream = io.StringIO()
    with logging_to(stream, form, level):
        act(logs.get("part"))
    return stream.getvalue().splitlines()


def test_a_line_of_text() -> None:
    def act(log: logging.Logger) -> None:
        logs.event(
            log,
            logging.WARNING,
            "state_changed",
            "engine up -> late",
            before="up",
            age_s=1.23456789,
            note="a b",
        )

    (line,) = written(act=act)
    stamp, level, rest = line.split(maxsplit=2)
    assert stamp.endswith("Z")
    assert level == "WARNING"
    assert rest == 'engine up -> late event=state_changed before=up age_s=1.234568 note="a b"'


def test_a_line_of_json() -> None:
    def act(log: logging.Logger) -> None:
        logs.event(
            log, logging.INFO, "budget", "b", tokens=7, share=float("nan"), none=None, level="mine", on=True
        )

    (line,) = written("json", act=act)
    shown = json.loads(line)
    assert shown.pop("time").endswith("Z")
    assert shown == {
        "level": "info",
        "event": "budget",
        "message": "b",
        "tokens": 7,
        "share": "nan",
        "none": None,
        "on": True,
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_strangers_cannot_forge_lines(form: str) -> None:
    evil = "m\n<0>forged\x1b[31m\u2028" + "x" * 1000

    def act(log: logging.Logger) -> None:
        logs.event(log, logging.INFO, "noted", f"model {evil}", model=evil)

    (line,) = written(form, act=act)
    assert line.isprintable()
    assert len(line) < 2500


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_stays_with_its_line(form: str) -> None:
    def fail() -> None:
        raise RuntimeError("first\nsecond")

    def act(log: logging.Logger) -> None:
        try:
            fail()
        except RuntimeError:
            log.exception("it broke")

    lines = written(form, act=act)
    if form == "json":
        assert "RuntimeError: first\nsecond" in json.loads(lines[0])["traceback"]
        assert len(lines) == 1
    else:
        assert all(" ERROR   " in line for line in lines)
        assert lines[-1].endswith(" second")


def test_levels() -> None:
    def act(log: logging.Logger) -> None:
        for level in (logging.DEBUG, logging.INFO, logging.ERROR):
            logs.event(log, level, "x", logging.getLevelName(level))
        logging.getLogger("library").info("chatter")
        logging.getLogger("library").warning("trouble")

    assert [line.split()[2] for line in written(level="debug", act=act)] == [
        "DEBUG",
        "INFO",
        "ERROR",
        "trouble",
    ]
    assert [line.split()[2] for line in written(level="error", act=act)] == ["ERROR", "trouble"]


SCRIPT = """
import logging, os, sys
from kvctl import logs
out = os.fstat(1)
named = f"{out.st_dev}:{out.st_ino}" if sys.argv[1] == "own" else "1:2"
handler = logs.start("info", "text", env={"JOURNAL_STREAM": named})
logs.event(logs.get("a"), logging.ERROR, "w", "bad")
logs.stop(handler)
"""


def test_journald_reads_level_prefixes() -> None:
    """A real pipe as standard output; the variable names it, or an older one."""

    def shown(which: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, which], capture_output=True, text=True, check=True
        )
        return done.stdout

    assert shown("own") == "<3>bad event=w\n"
    assert shown("other").split()[1:] == ["ERROR", "bad", "event=w"]


def test_repeats_are_counted_not_written() -> None:
    now = 0.0
    repeats = logs.Repeats(lambda: now)

    def passes(**fields: Any) -> dict[str, Any] | None:
        record = logging.makeLogRecord({"name": "kvctl.a", "levelno": 30, "msg": "m"})
        record.kvctl_event, record.kvctl_fields = "flap", fields
        return record.__dict__["kvctl_fields"] if repeats.filter(record) else None

    assert [passes(reason="a") is not None for _ in range(logs.BURST + 5)] == [True] * logs.BURST + [
        False
    ] * 5
    assert passes(reason="b") == {"reason": "b"}
    now = logs.WINDOW_S
    assert passes(reason="a") == {"reason": "a", "suppressed": 5}
    assert passes(reason="a") == {"reason": "a"}


def test_the_table_of_repeats_stays_small() -> None:
    now = 0.0
    repeats = logs.Repeats(lambda: now)
    for number in range(1000):
        now += 1.0
        record = logging.makeLogRecord({"name": "kvctl.a", "levelno": 20, "msg": f"message {number}"})
        assert repeats.filter(record)
    now += logs.WINDOW_S
    assert repeats.filter(logging.makeLogRecord({"name": "kvctl.a", "levelno": 20, "msg": "message 999"}))
    assert len(repeats._seen) < 3


def test_access_lines_are_not_limited() -> None:
    def act(_: logging.Logger) -> None:
        for number in range(200):
            logs.event(logging.getLogger(logs.ACCESS), logging.INFO, "request", "POST", status=number)

    assert len(written(act=act)) == 200


def test_a_reader_that_stalls_holds_nobody_up() -> None:
    free = threading.Event()

    class Stalled(io.StringIO):
        def write(self, text: str) -> int:
            free.wait(20)
            return super().write(text)

    stream = Stalled()
    handler = logs.QueuedHandler(stream, lines=5)
    handler.setFormatter(logs.TextFormatter(journald=True))
    for number in range(50):
        handler.handle(logging.makeLogRecord({"name": "kvctl", "levelno": 20, "msg": f"m{number}"}))
    free.set()
    handler.close()
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("<6>m0")
    assert len(lines) <= 8
    lost = 50 - sum(line.startswith("<6>m") for line in lines)
    assert lines[-1].startswith(f"<4>{lost} log lines were lost")


def test_a_reader_that_went_away_is_no_end() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    handler = logs.QueuedHandler(stream)
    handler.setFormatter(logs.TextFormatter(journald=True))
    for _ in range(3):
        handler.handle(logging.makeLogRecord({"name": "kvctl", "levelno": 20, "msg": "m"}))
    handler.close()
    assert not handler._thread.is_alive()
    with suppress(BrokenPipeError):
        stream.close()


def test_a_message_and_a_traceback_of_a_stranger_are_lines_that_print() -> None:
    """F11: escapes and line ends in what an exception says are written out, and length has an end."""

    def act(log: logging.Logger) -> None:
        try:
            float("\x1b[2J\u2028" + "y" * 100_000)
        except ValueError:
            log.exception("%s", "\x1b]0;x\x07" + "z" * 100_000)

    for form in ("text", "json"):
        lines = written(form, act=act)
        assert all(line.isprintable() for line in lines)
        assert max(map(len, lines)) < 3 * logs.MESSAGE_MAX


def test_lines_that_all_differ_are_limited_too() -> None:
    """F11: a library's messages, or reasons that somebody types, each of them new."""

    def act(log: logging.Logger) -> None:
        for number in range(20_000):
            log.warning(f"library says {number}")  # noqa: G004 - as libraries do
            logs.event(log, logging.INFO, "override_set", "set", reason=f"reason {number}")

    lines = written(act=act)
    assert len(lines) == 2 * logs.BURST_OF_LOGGER


def test_what_was_held_back_is_counted_when_it_goes_on() -> None:
    now = 0.0
    repeats = logs.Repeats(lambda: now)

    def line(word: str) -> logging.LogRecord:
        record = logging.makeLogRecord({"name": "kvctl.x", "levelno": 20, "levelname": "INFO"})
        record.__dict__.update({"kvctl_event": word, "kvctl_fields": {}})
        return record

    passed = sum(repeats.filter(line(f"word {number}")) for number in range(5000))
    assert passed == logs.BURST_OF_LOGGER
    now = 61.0
    record = line("another")
    assert repeats.filter(record)
    assert record.__dict__["kvctl_fields"] == {"suppressed": 5000 - logs.BURST_OF_LOGGER}
