"""Log lines: one per state change, structured, with journald's level prefixes where journald reads them.

Law 6: nothing slow on the loop. Lines go through a bounded queue to a thread, so that a stalled journal or an
unread pipe never holds the daemon up; lines that do not fit are counted, and the count is logged. Repeats of
one event are limited. No prompt or answer text is ever logged; what strangers chose (such as model names) is
cut and escaped.
"""

import json
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

ROOT = "kvctl"
ACCESS = "kvctl.access"  # one line per request, where the operator wants that: not limited
VALUE_MAX = 300  # characters of one field
MESSAGE_MAX = 2000  # characters of one sentence
QUEUE_LINES = 10_000
BURST, WINDOW_S = 10, 60.0  # lines of one event that pass in a window
BURST_OF_LOGGER = 100  # of one part of kvctl, or of a library, whatever its lines say
MOST_KEYS = 1000  # events whose repeats are counted separately

_SYSLOG = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_FIELDS = "kvctl_fields"
_EVENT = "kvctl_event"


def get(name: str) -> logging.Logger:
    """The logger of a part of kvctl."""
    return logging.getLogger(f"{ROOT}.{name}")


def event(logger: logging.Logger, level: int, word: str, sentence: str, /, **fields: object) -> None:
    """Log one happening: a word of a closed set, a sentence for people, and fields for machines."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", sentence, extra={_EVENT: word, _FIELDS: fields})


def plain(value: object) -> object:
    """A field's value as it may stand in a log line: short, one line, no repr with a memory address."""
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value.bit_length() < 64):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return round(value, 6)
    text = _one_line(f"{value:x}" if isinstance(value, int) else str(value))  # hex has no limit of digits
    return text if len(text) <= VALUE_MAX else f"{text[:VALUE_MAX]}..."


class TextFormatter(logging.Formatter):
    """``sentence event=word key=value``; with journald's ``<level>`` or else time and level before it."""

    def __init__(self, *, journald: bool) -> None:
        super().__init__()
        self._journald = journald

    def format(self, record: logging.LogRecord) -> str:
        """Several lines only where there is a traceback, each with its prefix."""
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        pairs = {"event": getattr(record, _EVENT, record.name), **fields}
        line = " ".join(
            [_one_line(_message(record)), *(f"{key}={_quote(value)}" for key, value in pairs.items())]
        )
        trace = _trace(self.formatException(record.exc_info)) if record.exc_info else []
        prefix = self._prefix(record)
        return "\n".join(prefix + each for each in [line, *trace])

    def _prefix(self, record: logging.LogRecord) -> str:
        if self._journald:
            return f"<{_SYSLOG.get(record.levelno, 5)}>"
        return f"{_stamp(record.created)} {record.levelname:<7} "


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, event, message, the fields, and traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON; fields cannot replace the four keys that every line has."""
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        line: dict[str, Any] = {key: plain(value) for key, value in fields.items()}
        line |= {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "event": getattr(record, _EVENT, record.name),
            "message": _message(record),
        }
        if record.exc_info:
            line["traceback"] = "\n".join(_trace(self.formatException(record.exc_info)))
        return json.dumps(line, allow_nan=False, default=str)


def _stamp(created: float) -> str:
    return datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    return text if len(text) <= MESSAGE_MAX else f"{text[:MESSAGE_MAX]}..."


def _trace(text: str) -> list[str]:
    """The lines of a traceback, escaped: the exception's text may quote a stranger."""
    return [_one_line(line[:MESSAGE_MAX]) for line in text.split("\n")]


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _quote(value: object) -> str:
    text = str(plain(value))
    bare = text and text.isprintable() and not set(' "=') & set(text)
    return text if bare else json.dumps(text, ensure_ascii=not text.isprintable())


class Repeats(logging.Filter):
    """Lets ``BURST`` lines of one event pass in ``WINDOW_S``; the next line after that counts the others.

    Of one logger and level ``BURST_OF_LOGGER`` lines pass, so that lines that all differ (a library's, or
    with a reason that somebody typed) do not fill the log either.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, ...], tuple[float, int]] = {}
        self._forgot_at = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line may pass."""
        if record.name == ACCESS:
            return True
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        part = (record.name, record.levelname)
        word = str(getattr(record, _EVENT, record.msg))[:VALUE_MAX]
        event_key = (*part, word, str(fields.get("reason", ""))[:VALUE_MAX])
        passes, held = self._count(event_key, BURST)
        if passes:
            passes, more = self._count(part, BURST_OF_LOGGER)
            held += more
        if passes and held:
            record.__dict__[_FIELDS] = dict(fields) | {"suppressed": held}
        return passes

    def _count(self, key: tuple[str, ...], most: int) -> tuple[bool, int]:
        """Whether one more of the kind may pass, and how many were held back before its window began."""
        now, held = self._clock(), 0
        began, count = self._seen.get(key, (now, 0))
        if now - began >= WINDOW_S:
            held, began, count = max(count - most, 0), now, 0
            self._forget(now)
        elif key not in self._seen and len(self._seen) >= MOST_KEYS:
            if now - self._forgot_at >= 1.0:
                self._forget(now)
            if len(self._seen) >= MOST_KEYS:
                return True, 0  # its logger's limit holds for it all the same
        self._seen[key] = (began, count + 1)
        return count < most, held

    def _forget(self, now: float) -> None:
        """Drop windows that are over, unless they held lines back: the table covers the last minute."""
        self._forgot_at = now
        for key, (began, count) in list(self._seen.items()):
            over, most = now - began, BURST_OF_LOGGER if len(key) == 2 else BURST
            if over >= 10 * WINDOW_S or (over >= WINDOW_S and count <= most):
                del self._seen[key]


class QueuedHandler(logging.Handler):
    """Formats where the line is made, writes in a thread of its own."""

    def __init__(self, stream: TextIO, lines: int = QUEUE_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._queue: queue.Queue[str | None] = queue.Queue(lines)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="kvctl-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits and never raises."""
        try:
            self._queue.put_nowait(self.format(record))
        except queue.Full:
            self._lost += 1
        except Exception:  # noqa: BLE001 - a line that cannot be formatted must not stop what it tells of
            self.handleError(record)

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            self._write(line)
            if self._lost and self._queue.empty():
                lost, self._lost = self._lost, 0
                record = logging.makeLogRecord(
                    {"name": ROOT, "levelno": logging.WARNING, "levelname": "WARNING"}
                )
                record.msg = f"{lost} log lines were lost: whoever reads them was too slow"
                self._write(self.format(record))

    def _write(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._lost += 1  # the reader went away, or the stream is closed

    def close(self) -> None:
        """Write out what waits; a reader that stalls gets two seconds."""
        try:
            self._queue.put(None, timeout=2)
            self._thread.join(2)
        except queue.Full:
            pass
        super().close()


def is_journald(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether journald reads ``stream``: $JOURNAL_STREAM names its device and inode, and all inherit it."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return env.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def start(
    level: str, form: str, stream: TextIO | None = None, env: Mapping[str, str] = os.environ
) -> QueuedHandler:
    """Send all log lines to ``stream`` (standard output); close the handler at the end.

    ``level`` applies to kvctl; of libraries only warnings and worse are logged.
    """
    target = sys.stdout if stream is None else stream
    handler = QueuedHandler(target)
    handler.setFormatter(
        JsonFormatter() if form == "json" else TextFormatter(journald=is_journald(target, env))
    )
    handler.addFilter(Repeats())
    logging.captureWarnings(capture=True)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(ROOT).setLevel(level.upper())
    return handler


def stop(handler: QueuedHandler) -> None:
    """Undo ``start``, with everything written."""
    logging.getLogger().removeHandler(handler)
    logging.captureWarnings(capture=False)
    handler.close()
