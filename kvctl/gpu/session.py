"""NVML from init to shutdown, as its own thread sees it: blocking calls, nothing shared.

A session starts when it is first read, and again, with growing pauses, whenever NVML is not usable: no
library yet, a driver upgraded under a running process, device access removed by a cgroup change, device nodes
that appear after boot. A card that was seen once and is missing now is reported as lost; the others are still
read.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvctl.core.outcomes import Absence
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.base import Backoff, GpuReading
from kvctl.gpu.binding import LOST, SESSION_LOST, Code, Nvml, NvmlFailure
from kvctl.gpu.enumerate import enumerate_cards, find_instance
from kvctl.gpu.faults import CardEvent
from kvctl.gpu.processes import Found, read_processes
from kvctl.gpu.readings import MemoryReader, read_card
from kvctl.gpu.select import Card, CardState, Kind, Selection, Selector, select
from kvctl.gpu.watch import EventWatch

log = logging.getLogger("kvctl.gpu")

PROCESSES_EVERY_S = 5.0  # they change when an engine starts or ends


class NvmlSession:
    """Reads the selected cards. Use from one thread only.

    Args:
        nvml: The binding.
        selectors: Which cards.
        clock: Monotonic seconds; dates the samples and paces the retries.
    """

    def __init__(self, nvml: Nvml, selectors: Sequence[Selector], clock: Callable[[], float]) -> None:
        self._nvml = nvml
        self._selectors = tuple(selectors)
        self._clock = clock
        self._backoff = Backoff()
        self._open = False
        self._selection = Selection(cards=(), missing=())
        self._seen: dict[Selector, tuple[Card, ...]] = {}  # by UUID from the first sight on: indexes shift
        self._memory = MemoryReader(nvml)
        self._last_fault: GpuReading | None = None
        self._watch: EventWatch | None = None
        self._processes: Found = {}
        self._process_absent: dict[str, Absence] = {}
        self._processes_at = float("-inf")
        self.driver_version: str | None = None

    def read(self) -> GpuReading:
        """Read the selected cards once. Never raises; during a pause it reports the last fault again."""
        now = self._clock()
        if self._last_fault is not None and not self._backoff.due(now):
            return self._last_fault
        started = now
        try:
            self._ensure_started(now)
            samples = self._read_cards()
            self._read_processes(now)
        except NvmlFailure as failure:
            return self._failed(failure)
        self._last_fault = None
        if not self._incomplete(samples):
            self._backoff.reset()
        self._listen({sample.uuid for sample in samples if not sample.lost})
        return GpuReading(
            samples=tuple(self._with_words(sample) for sample in samples),
            detail=self._detail(),
            seconds=self._clock() - started,
            processes=self._processes,
            driver=self.driver_version,
        )

    def wait(self, timeout_ms: int) -> tuple[CardEvent, ...] | None:
        """Messages of the driver within the time; None, at once: it sends none now."""
        if self._watch is None or not self._watch.usable:
            return None
        return self._watch.wait(timeout_ms)

    def _listen(self, there: set[str]) -> None:
        """Register for events; again when that broke off, or when a lost card is back."""
        if self._watch is None or self._watch.broken or there & self._watch.lost:
            if self._watch is not None:
                self._watch.close()
            self._watch = EventWatch(self._nvml, self._selection.cards)

    def _read_processes(self, now: float) -> None:
        if now - self._processes_at >= PROCESSES_EVERY_S:
            self._processes, self._process_absent = read_processes(self._nvml, self._selection.cards)
            self._processes_at = now

    def _with_words(self, sample: GpuSample) -> GpuSample:
        """``sample`` with the absences of what is read separately."""
        beside = {
            "events": {} if self._watch is None else self._watch.absent,
            "processes": self._process_absent,
        }
        words = {name: absent[sample.uuid] for name, absent in beside.items() if sample.uuid in absent}
        return replace(sample, absent={**sample.absent, **words}) if words else sample

    def close(self) -> None:
        """Release every handle. A later read starts anew and selects afresh."""
        self._shut()
        self._seen.clear()
        self._backoff.reset()
        self._last_fault = None

    def _shut(self) -> None:
        was_open, self._open = self._open, False
        self._selection = Selection(cards=(), missing=())
        self._processes, self._process_absent, self._processes_at = {}, {}, float("-inf")
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if was_open:
            try:
                self._nvml.call("nvmlShutdown")
            except NvmlFailure as failure:
                log.debug("shutdown: %s", failure)  # what went away needs no shutdown

    def _failed(self, failure: NvmlFailure) -> GpuReading:
        self._shut()
        self._backoff.failed(self._clock())
        self._last_fault = GpuReading(fault=failure.fault, detail=str(failure))
        return self._last_fault

    def _ensure_started(self, now: float) -> None:
        """Start, or start again to look for what is missing once the pause is over."""
        if self._open and not self._incomplete_selection():
            return
        if self._open and not self._backoff.due(now):
            return
        if self._open:
            self._backoff.failed(now)
            self._shut()
        self._start()

    def _start(self) -> None:
        """Initialise, enumerate, select. Raises NvmlFailure."""
        self._nvml.call("nvmlInit")
        self._open = True
        self._memory = MemoryReader(self._nvml, announced=self._memory.announced)
        self.driver_version = self._driver_version()
        cards = enumerate_cards(self._nvml)
        self._selection = self._choose(cards)
        if not self._selection.cards:
            wanted = ", ".join(self._selection.missing)
            raise NvmlFailure(Code.NOT_FOUND, "select", f"no card is {wanted}; {_census(cards)}")

    def _driver_version(self) -> str | None:
        try:
            return str(self._nvml.call("nvmlSystemGetDriverVersion"))
        except NvmlFailure:
            return None

    def _choose(self, cards: Sequence[Card]) -> Selection:
        """The selection among ``cards``; a card once selected stays so, by UUID, present or not."""
        chosen: list[Card] = []
        missing: list[str] = []
        for selector in self._selectors:
            found = self._found(selector, cards)
            if not found:
                missing.append(selector.text)
            known = {card.uuid for card in chosen if card.uuid}
            chosen += [card for card in found if card.uuid not in known]
        return Selection(cards=tuple(chosen), missing=tuple(missing))

    def _found(self, selector: Selector, cards: Sequence[Card]) -> tuple[Card, ...]:
        seen = self._seen.get(selector, ())
        by_uuid = {card.uuid: card for card in cards if card.uuid}
        kept = tuple(by_uuid.get(card.uuid, _lost(card)) for card in seen)
        if seen and selector.kind is not Kind.ALL:
            return kept
        fresh = select([selector], cards).cards or find_instance(self._nvml, selector)
        known = {card.uuid for card in seen}
        gone = any(card.state is CardState.LOST for card in kept)
        fresh = tuple(c for c in fresh if c.uuid not in known and not (gone and not c.uuid))
        self._seen[selector] = seen + tuple(card for card in fresh if card.uuid)
        _tell(selector, fresh)
        return kept + fresh

    def _read_cards(self) -> tuple[GpuSample, ...]:
        """One sample per card. Raises NvmlFailure when NVML, and not just a card, is gone."""
        samples: list[GpuSample] = []
        failures: list[NvmlFailure] = []
        for card in self._selection.cards:
            sample, failure = read_card(self._nvml, card, self._memory, self._clock())
            if failure is not None and failure.code in SESSION_LOST:
                raise failure
            if failure is not None and failure.code not in LOST:
                failures.append(failure)
            samples.append(sample)
        broken = [f for f in failures if f.absence is Absence.FAILED or f.code == Code.OPERATING_SYSTEM]
        if broken and all(sample.free_bytes is None for sample in samples):
            raise broken[0]  # no card answers: device access was taken away
        return tuple(samples)

    def _incomplete_selection(self) -> bool:
        cards = self._selection.cards
        return bool(self._selection.missing) or all(card.state is not CardState.PRESENT for card in cards)

    def _incomplete(self, samples: Sequence[GpuSample]) -> bool:
        """Whether a new start may bring more. One lost card among good ones is no reason for it."""
        if all(sample.lost for sample in samples):
            lost = tuple(replace(card, state=CardState.LOST) for card in self._selection.cards)
            self._selection = replace(self._selection, cards=lost)
        return self._incomplete_selection()

    def _detail(self) -> str:
        return f"not found: {', '.join(self._selection.missing)}" if self._selection.missing else ""


def _lost(card: Card) -> Card:
    return replace(card, handle=None, parent=None, state=CardState.LOST)


def _census(cards: Sequence[Card]) -> str:
    if not cards:
        return "NVML shows no card"
    return "NVML shows " + ", ".join(f"{card.index}={card.uuid or card.state}" for card in cards)


def _tell(selector: Selector, cards: Sequence[Card]) -> None:
    """Log once which cards a selector means: its index is not CUDA's."""
    for card in cards:
        if card.uuid:
            log.info("watching card %s: %s, %s (gpus = %s)", card.index, card.uuid, card.name, selector.text)
