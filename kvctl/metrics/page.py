"""The metrics page, and the methods through which the daemon and the data plane feed it.

Law 6: a scrape reads nothing: gate and cards are shown as their own loops last left them.
Law 9: every label value that is not the site's is of a closed set; a word from outside it is ``other``.
"""

import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from kvctl.core.outcomes import ChoiceReason, ProxyFault, SourceFault
from kvctl.core.overrides import Override
from kvctl.core.status import GateStatus
from kvctl.gpu.base import GpuReading
from kvctl.gpu.faults import CardEvent
from kvctl.metrics.catalog import CATALOG, OTHER, SOURCES, Kind
from kvctl.metrics.exposition import head, number, series
from kvctl.metrics.gate_counts import GateCounts
from kvctl.metrics.instruments import Counter, Histogram
from kvctl.metrics.views import (
    ConfigView,
    CountingView,
    Row,
    SourceView,
    of_card,
    of_config,
    of_counting,
    of_engine,
    of_overrides,
    of_source,
)
from kvctl.tokens.base import CountMethod

UNKNOWN_ROUTE = "unknown"
UNNAMED_CARD = "unknown"  # the driver did not say, or kvctl reads no such card

_LINES_AT_ONCE = 64
_KEYS = {name: tuple(spec.labels) for name, spec in CATALOG.items()}
_HEADS = {name: head(spec) for name, spec in CATALOG.items()}
_SNAPSHOT = frozenset(
    {
        "kvctl_engine_preemptions_total",
        "kvctl_gpu_ecc_uncorrected_errors_total",
        "kvctl_token_count_fallbacks_total",
        "kvctl_token_count_samples_total",
        "kvctl_token_count_characters_total",
        "kvctl_decision_log_dropped_total",
    }
)  # counted elsewhere, shown here


class Metrics:
    """Everything that kvctl exports, on a registry of its own.

    What is of the moment is asked for at each scrape, of what the daemon sets: ``gpu`` (the last reading),
    ``overrides`` (those in force), ``counting`` (the token counter) and ``sources`` (by ``nvml`` and
    ``engine_metrics``; one that is not configured stays out). The other methods are called as things
    happen, on the event loop. So are these, with seconds: ``decided`` (the gate's time for a request),
    ``first_token`` (from a request to its answer's first byte) and ``next_token`` (between a stream's tokens,
    on average).

    Args:
        version: kvctl's.
        routes: Names of the engine's routes, shown from the start.
        monotonic: The clock of the samples.
        wall: Unix time.
    """

    def __init__(
        self,
        *,
        version: str,
        routes: Iterable[str] = (),
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.gpu: Callable[[], GpuReading | None] = lambda: None
        self.overrides: Callable[[], Iterable[Override]] = tuple
        self.config: Callable[[], ConfigView] = ConfigView
        self.decisions_dropped: Callable[[], int] = int
        self.background_responses: Callable[[], int] = int
        self.counting: CountingView | None = None
        self.sources: dict[str, Callable[[], SourceView]] = {}
        self._engines: dict[str, Callable[[], GateStatus]] = {}
        self._build = (version, platform.python_version())
        self._monotonic = monotonic
        self._wall = wall
        self._routes = frozenset({*routes, UNKNOWN_ROUTE})
        self._counters = {
            name: Counter(spec)
            for name, spec in CATALOG.items()
            if spec.kind is Kind.COUNTER and name not in _SNAPSHOT
        }
        self._histograms = {
            name: Histogram(spec) for name, spec in CATALOG.items() if spec.kind is Kind.HISTOGRAM
        }
        self._gates: dict[str, GateCounts] = {}
        for instrument in self._instruments():
            instrument.present()
        for route in sorted(self._routes):
            self._counters["kvctl_requests_total"].present(route)
        self._requests: dict[tuple[str, str], Callable[[], None]] = {}
        self.decided = self._histograms["kvctl_decision_seconds"].observer()
        self.first_token = self._histograms["kvctl_upstream_ttft_seconds"].observer()
        self.next_token = self._histograms["kvctl_upstream_inter_token_seconds"].observer()
        counts = self._histograms["kvctl_token_count_seconds"]
        self._counted = {method: counts.observer(method) for method in CountMethod}
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)

    def render(self) -> bytes:
        """The page, of type ``CONTENT_TYPE``."""
        return b"".join(self.parts())

    def parts(self) -> Iterator[bytes]:
        """The page in small parts: what else the event loop has to do need not wait for all of it.

        What is told of one engine is of one moment, and so are the buckets of a histogram.
        """
        snapshots: defaultdict[str, list[str]] = defaultdict(list)
        for rows in self._snapshots():
            for name, labels, value in rows:
                snapshots[name].append(f"{series(name, _KEYS[name], labels)}{number(value)}\n")
            yield b""
        lines = self._lines(snapshots)
        while some := list(islice(lines, _LINES_AT_ONCE)):
            yield "".join(some).encode()
        yield generate_latest(self._process)

    # --- the daemon ---

    def add_engine(self, engine: str, status: Callable[[], GateStatus]) -> None:
        """Show an engine, all of its counters at 0. ``status`` is asked at each scrape."""
        self._engines[engine] = status
        for instrument in self._instruments():
            if "engine" in instrument.spec.labels:
                instrument.present(engine)

    def gate(self, engine: str) -> GateCounts:
        """What counts the commands of the engine's gate."""
        if engine not in self._gates:
            self._gates[engine] = GateCounts(engine, self._counters, self._histograms)
        return self._gates[engine]

    def card_seen(self, uuid: str) -> None:
        """A card is read for the first time: its counters at 0, and those of events that name no card."""
        for gpu in (uuid, UNNAMED_CARD):
            self._counters["kvctl_gpu_events_total"].present(gpu)

    def card_event(self, event: CardEvent) -> None:
        """The driver told of something."""
        for uuid in event.uuids or (UNNAMED_CARD,):
            self._counters["kvctl_gpu_events_total"].add(uuid, event.kind)

    def cards_failing(self, fault: SourceFault) -> None:
        """Reading the cards began to fail."""
        name = "kvctl_gpu_read_faults_total"
        self._counters[name].add(_closed(name, "fault", fault))

    def ticked(self, tick_s: float, lag_s: float, *, overrun: bool) -> None:
        """A control tick took ``tick_s`` and began ``lag_s`` late."""
        self._histograms["kvctl_tick_seconds"].observe(tick_s)
        self._histograms["kvctl_event_loop_lag_seconds"].observe(lag_s)
        if overrun:
            self._counters["kvctl_ticks_overrun_total"].add()
        for histogram in self._histograms.values():
            histogram.settle()

    # --- the data plane ---

    def request(self, route: str, outcome: str) -> None:
        """A request was answered. ``route`` is a route's name, ``outcome`` of ``catalog.OUTCOMES``."""
        known = route if route in self._routes else UNKNOWN_ROUTE
        count = self._requests.get((known, outcome))
        if count is None:
            word = _closed("kvctl_requests_total", "outcome", outcome)
            count = self._counters["kvctl_requests_total"].adder(known, word)
            if word == outcome:
                self._requests[known, outcome] = count
        count()

    def counted(self, method: CountMethod, seconds: float) -> None:
        """A prompt was counted."""
        self._counted[method](seconds)

    def upstream_error(self, kind: str) -> None:
        """The engine failed. ``kind`` is of ``catalog.UPSTREAM_ERRORS``."""
        name = "kvctl_upstream_errors_total"
        self._counters[name].add(_closed(name, "kind", kind))

    def fault(self, word: ProxyFault) -> None:
        """Something went wrong on the data plane."""
        self._counters["kvctl_proxy_faults_total"].add(word)

    def chosen(self, engine: str, reason: ChoiceReason) -> None:
        """A request was sent to one of several gates."""
        self._counters["kvctl_choices_total"].add(engine, reason)

    def client_gone(self, phase: str) -> None:
        """A client left. ``phase`` is of ``catalog.DISCONNECT_PHASES``."""
        name = "kvctl_client_disconnects_total"
        self._counters[name].add(_closed(name, "phase", phase))

    # --- the page ---

    def _snapshots(self) -> Iterator[Iterable[Row]]:
        """Everything that is of the moment, engine by engine, and what is of none."""
        yield [("kvctl_build_info", self._build, 1.0)]
        for engine, status in self._engines.items():
            yield of_engine(engine, status())
        yield self._of_no_engine()

    def _of_no_engine(self) -> Iterator[Row]:
        reading = self.gpu()
        for sample in reading.samples if reading is not None else ():
            yield from of_card(sample)
        wall_offset = self._wall() - self._monotonic()
        for source in SOURCES:
            if source in self.sources:
                yield from of_source(source, self.sources[source](), wall_offset)
        if self.counting is not None:
            yield from of_counting(self.counting)
        yield from of_overrides(self.overrides())
        yield from of_config(self.config())
        yield "kvctl_decision_log_dropped_total", (), float(self.decisions_dropped())
        yield "kvctl_background_responses", (), float(self.background_responses())

    def _lines(self, snapshots: Mapping[str, list[str]]) -> Iterator[str]:
        """Every metric of the catalog, in its order."""
        for name in CATALOG:
            yield _HEADS[name]
            instrument = self._counters.get(name) or self._histograms.get(name)
            yield from instrument.lines() if instrument else snapshots.get(name, ())

    def _instruments(self) -> Iterator[Counter | Histogram]:
        yield from self._counters.values()
        yield from self._histograms.values()


def _closed(name: str, label: str, word: str) -> str:
    return word if word in CATALOG[name].labels[label] else OTHER
