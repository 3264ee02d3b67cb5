"""Polls the engine's metrics page and feeds the gate.

Law 6: nothing slow on the loop: one request in flight, a deadline, a bound on the size, big pages parsed in a
thread. Law 8: degraded is a state, not an exit: a fault has a name, one log line when it begins and one when
it ends, and the polls go on. A slow answer does not mean that the engine is down; a refused connection is the
only fast sign of that.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvctl import logs
from kvctl.control.poll import Answer, Poller, PollError
from kvctl.control.probe import Detector
from kvctl.core.events import EngineDescribed, Scraped, ScrapeFailed
from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import EngineInfo, RankSample, is_another_process, together
from kvctl.engines.base import Engine, PageError
from kvctl.engines.detect import engine_of_page

log = logs.get("control.scraper")

Emit = Callable[[Scraped | ScrapeFailed | EngineDescribed], object]

_INLINE_BYTES = 128 * 1024  # a millisecond to parse; two ranks have 66 kB
_GOOD_POLLS_TO_END = 5  # a fault that comes and goes counts as one fault, with one line
_RESTART_POLLS = 20
_RESTARTS_THAT_ARE_NONE = 3  # no engine restarts so often within so few polls: two processes answer in turn
# faults after which another kind of engine may answer; a slow answer is not among them
_MAYBE_ANOTHER = frozenset(
    {SourceFault.REFUSED, SourceFault.NO_SERIES, SourceFault.UNPARSABLE, SourceFault.HTTP_STATUS}
)
_WORDS = {SourceFault.REFUSED: "connection refused"}  # so that it does not read like a refused request
_ALTERNATING = "two processes with counters of their own answer in turn behind one address"


class Scraper:
    """Turns the engine's pages, and what it says of itself, into events.

    ``emit`` is called on the loop with Scraped, ScrapeFailed or EngineDescribed. Read-only attributes for
    metrics: ``polls``, ``failures`` by fault, ``fault`` (of the last poll), ``last_success_at`` (on
    ``poller.clock``), ``last_duration_s`` (of the last poll, parsing included).
    """

    def __init__(
        self,
        engine: Engine,
        poller: Poller,
        emit: Emit,
        *,
        interval_s: float = 0.2,
        info_interval_s: float = 10.0,
        detector: Detector | None = None,
    ) -> None:
        self._engine = engine
        self._poller = poller
        self._emit = emit
        self._interval_s = interval_s
        self._info_interval_s = info_interval_s
        self._detector = detector
        self._clock = poller.clock
        self._task: asyncio.Task[None] | None = None
        self._info_due_at: float | None = poller.clock()  # None: known
        self._before: Sequence[RankSample] = ()
        self._restarts: deque[bool] = deque(maxlen=_RESTART_POLLS)
        self._episode = _Episode(poller.shown_url, poller.clock)
        self._logged: set[str] = set()
        self.polls = 0
        self.failures: Counter[SourceFault] = Counter()
        self.fault: SourceFault | None = None
        self.last_success_at: float | None = None
        self.last_duration_s: float | None = None

    def start(self) -> None:
        """Poll from now on, until ``close``."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="kvctl-scraper")

    async def close(self) -> None:
        """Stop polling and close the connection. May be called more than once."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self._poller.close()

    async def _run(self) -> None:
        while True:
            began = self._clock()
            try:
                await self.poll()
            except Exception as error:  # noqa: BLE001 - the loop must outlive any defect; each kind is logged once
                self._log_once(type(error).__name__, f"defect in a poll of {self._poller.shown_url}", error)
            left = self._interval_s - (self._clock() - began)
            await asyncio.sleep(max(left, self._interval_s / 4))

    async def poll(self) -> None:
        """One poll of the metrics page, then of the engine's own description where that is due."""
        if self._detector is not None and await self._detector.settle():
            self._another_engine()
        began = self._clock()
        try:
            answer = await self._poller.get(self._engine.metrics_path, "text/plain;version=0.0.4")
            samples = await self._parse(answer)
        except (PollError, PageError) as error:
            self._failed(error.fault, str(error))
        else:
            self._succeeded(samples, answer)
        self.polls += 1
        self.last_duration_s = self._clock() - began
        await self._describe_if_due()

    def _another_engine(self) -> None:
        """Another kind of engine answers: nothing is carried over from the one before."""
        self._before = ()
        self._restarts.clear()
        self._logged.clear()
        self._info_due_at = self._clock()

    async def _parse(self, answer: Answer) -> list[RankSample]:
        if len(answer.body) > _INLINE_BYTES:
            return await asyncio.to_thread(self._read, answer)
        return self._read(answer)

    def _read(self, answer: Answer) -> list[RankSample]:
        try:
            page = answer.body.decode()
        except UnicodeDecodeError:
            raise PageError(SourceFault.UNPARSABLE, "the page is no UTF-8 text") from None
        try:
            return self._engine.parse_metrics(page, answer.answered_at)
        except PageError as error:
            other = engine_of_page(page)
            if other is None or other == self._engine.name:
                raise
            told = f"the page is of {other}, and kvctl reads it as {self._engine.name}"
            raise PageError(error.fault, told) from None

    def _succeeded(self, samples: list[RankSample], answer: Answer) -> None:
        if self.fault is not None:
            self._info_due_at = answer.asked_at  # the engine may have been loading, or be another process
        self.fault = None
        self.last_success_at = answer.answered_at
        self._episode.good()
        self._restarts.append(_restarted(self._before, samples))
        self._before = samples
        if sum(self._restarts) >= _RESTARTS_THAT_ARE_NONE:
            self._log_once(
                "alternating", f"{self._poller.shown_url}: {_ALTERNATING}; kvctl goes by its ledger"
            )
            samples = [dataclasses.replace(sample, unsupported=_ALTERNATING) for sample in samples]
        elif self._restarts[-1]:
            self._info_due_at = answer.asked_at
        self._emit(Scraped(tuple(samples), answer.asked_at))

    def _failed(self, fault: SourceFault, message: str) -> None:
        if self._detector is not None and fault in _MAYBE_ANOTHER and fault is not self.fault:
            self._detector.doubt()
        self.fault = fault
        self.failures[fault] += 1
        self._episode.bad(fault, message)
        if fault is SourceFault.REFUSED:
            self._info_due_at = self._clock()  # another process may answer next
        self._emit(ScrapeFailed(fault))

    async def _describe_if_due(self) -> None:
        """Ask for the model list; until it names one, again every ``info_interval_s``."""
        due = self._info_due_at is not None and self._clock() >= self._info_due_at
        if not due or self.fault is SourceFault.REFUSED:
            return
        self._info_due_at = self._clock() + self._info_interval_s
        paths = (self._engine.info_path, *self._engine.more_info_paths)
        answers = [await self._ask_about(path) for path in paths]
        infos = [self._engine.parse_info(answer) for answer in answers if answer is not None]
        if not infos:
            return
        info = together(infos)
        if info.models and len(infos) == len(paths) and not self._pool_is_told_by(info):
            self._info_due_at = None
        self._emit(EngineDescribed(info))

    def _pool_is_told_by(self, info: EngineInfo) -> bool:
        """Whether only the description tells the pool, and so shows a restart between two polls."""
        paged = bool(self._before) and all(sample.capacity_tokens for sample in self._before)
        return info.rank_capacity_tokens is not None and not paged

    async def _ask_about(self, path: str) -> Mapping[str, Any] | None:
        """The object that ``path`` answers, empty where it is none; None where nothing came."""
        try:
            answer = await self._poller.get(path, "application/json")
            described = await self._load(answer.body)
        except PollError as error:
            self._log_once(
                f"no model list: {path} {error.fault}", f"{self._poller.shown_url}: no model list: {error}"
            )
            return None
        except (ValueError, RecursionError):
            self._log_once(
                f"no model list: {path} json", f"{self._poller.shown_url}: {path}, its model list, is no JSON"
            )
            return None
        return described if isinstance(described, dict) else {}

    @staticmethod
    async def _load(body: bytes) -> object:
        return await asyncio.to_thread(json.loads, body) if len(body) > _INLINE_BYTES else json.loads(body)

    def _log_once(self, kind: str, message: str, error: Exception | None = None) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("%s", message, exc_info=error)


class _Episode:
    """One fault, from its first bad poll to several good ones in a row, with a log line at either end."""

    def __init__(self, source: str, clock: Callable[[], float]) -> None:
        self._source = source
        self._clock = clock
        self._kinds: dict[SourceFault, int] = {}
        self._began = 0.0
        self._good = 0

    def bad(self, fault: SourceFault, message: str) -> None:
        if not self._kinds:
            self._began = self._clock()
        if fault not in self._kinds:
            sentence = f"engine telemetry of {self._source}: {message} ({fault})"
            logs.event(log, logging.WARNING, "telemetry_lost", sentence, reason=fault)
        self._kinds[fault] = self._kinds.get(fault, 0) + 1
        self._good = 0

    def good(self) -> None:
        self._good += 1
        if not self._kinds or self._good < _GOOD_POLLS_TO_END:
            return
        lost = ", ".join(f"{polls} {_WORDS.get(fault, fault)}" for fault, polls in self._kinds.items())
        lasted = self._clock() - self._began
        sentence = f"engine telemetry of {self._source} is back after {lasted:.1f} s; readings failed: {lost}"
        logs.event(log, logging.INFO, "telemetry_back", sentence)
        self._kinds = {}


def _restarted(before: Sequence[RankSample], now: Sequence[RankSample]) -> bool:
    """Whether another process answers for any rank."""
    known = {sample.rank: sample for sample in before}
    return any(sample.rank in known and is_another_process(known[sample.rank], sample) for sample in now)
