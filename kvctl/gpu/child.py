"""``python -m kvctl.gpu.child SELECTOR...``: NVML in a process of its own, asked over pipes.

It ends only when nobody can ask any more (end of stdin, or its parent's death): a stop signal to the whole
service is for its parent to act upon. What the driver's library prints goes to stderr.
"""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

from kvctl.core.outcomes import SourceFault
from kvctl.gpu.base import GpuReading
from kvctl.gpu.binding import Nvml, load_binding
from kvctl.gpu.select import parse_selector
from kvctl.gpu.session import NvmlSession
from kvctl.gpu.wire import Answer, Question, question, written

_PR_SET_PDEATHSIG = 1


class Lines(logging.Handler):
    """Keeps the session's log lines until an answer carries them."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self._kept.append((record.levelno, record.getMessage()))

    def taken(self) -> tuple[tuple[int, str], ...]:
        """The lines since the last call."""
        kept, self._kept = tuple(self._kept), []
        return kept


def answers(session: NvmlSession, asked: BinaryIO, said: Lines) -> Iterator[Answer]:
    """An answer to each line of ``asked``, until there are no more or the session is closed."""
    for line in asked:
        each = question(line)
        yield _answer(session, each, said)
        if each.what == "close":
            return


def _answer(session: NvmlSession, asked: Question, said: Lines) -> Answer:
    if asked.what == "read":
        return Answer(number=asked.number, reading=session.read(), said=said.taken())
    if asked.what == "wait":
        return Answer(number=asked.number, events=session.wait(asked.wait_ms), said=said.taken())
    session.close()
    return Answer(number=asked.number, said=said.taken())


def _say(out: BinaryIO, answer: Answer) -> None:
    out.write(written(answer))
    out.flush()


def main() -> None:
    """Serve until stdin ends."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before this took effect
        return
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        _say(out, Answer(number=0))  # tells that it runs: from here on delays are the driver's
        said = Lines()
        logger = logging.getLogger("kvctl.gpu")
        logger.setLevel(logging.INFO)
        logger.addHandler(said)
        try:
            binding = load_binding()
        except ImportError as error:
            reading = GpuReading(fault=SourceFault.LIBRARY_MISSING, detail=str(error))
            _say(out, Answer(number=question(sys.stdin.buffer.readline()).number, reading=reading))
            return
        if binding.shadowed:
            logger.warning("%s", binding.shadowed)
        selectors = [parse_selector(text) for text in sys.argv[1:]]
        session = NvmlSession(Nvml(binding.module), selectors, time.monotonic)
        for answer in answers(session, sys.stdin.buffer, said):
            _say(out, answer)


if __name__ == "__main__":
    main()
