"""Finds out which engine answers behind a URL, for ``engine = "auto"``.

Law 8: degraded is a state, not an exit: an engine that is not recognised is taken for vLLM, with one log line
that says so, and is asked again. Law 6: each question has the poller's deadline and bound.
"""

import asyncio
import logging
from collections.abc import Callable

from kvctl import logs
from kvctl.control.poll import Poller, PollError
from kvctl.core.outcomes import SourceFault
from kvctl.engines.detect import PROBED, AutoEngine, Finding, Seen, engine_of_page, find

log = logs.get("control.probe")

AGAIN_S = 10.0  # until an engine that was not recognised is asked again
SOON_S = 1.0  # until one that does not answer, or is still loading, is asked again
_SILENT = frozenset({SourceFault.REFUSED, SourceFault.TIMEOUT, SourceFault.FAILED})


async def probe(poller: Poller) -> Finding:
    """Ask everything once and say which engine it is."""
    seen: dict[str, Seen] = {}
    for path in PROBED:
        seen[path] = answer = await _ask(poller, path)
        if answer.status is None or (path == "/metrics" and engine_of_page(answer.body) is not None):
            break  # one silence is enough, and a page with known series needs no further evidence
    return await asyncio.to_thread(find, seen)


async def _ask(poller: Poller, path: str) -> Seen:
    try:
        answer = await poller.get(path, "*/*")
    except PollError as error:
        if error.fault in _SILENT:
            return Seen(None)
        return Seen(error.status or 0)
    return Seen(200, answer.body.decode(errors="replace"))


class Detector:
    """Keeps an ``AutoEngine`` on the adapter of the engine that answers; looks first and after ``doubt``."""

    def __init__(self, engine: AutoEngine, poller: Poller, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._poller = poller
        self._clock = clock
        self._due_at: float | None = clock()  # None: no doubt
        self._asked_at = float("-inf")
        self._told = ""

    def doubt(self) -> None:
        """Another engine may answer now: look again."""
        if self._due_at is None:
            self._due_at = max(self._clock(), self._asked_at + SOON_S)

    async def settle(self) -> bool:
        """Ask, if there is doubt and it is time; returns whether the adapter has changed."""
        if self._due_at is None or self._clock() < self._due_at:
            return False
        self._asked_at = self._clock()
        finding = await probe(self._poller)
        again = AGAIN_S if finding.answered else SOON_S
        self._due_at = None if finding.supported else self._clock() + again
        if not finding.answered:
            return False
        self._tell(finding)
        return self._engine.adopt(finding.engine)

    def _tell(self, finding: Finding) -> None:
        if finding.sentence != self._told:
            self._told = finding.sentence
            severity = logging.INFO if finding.supported else logging.WARNING
            logs.event(log, severity, "engine_found", f"{self._poller.shown_url}: {finding.sentence}")
