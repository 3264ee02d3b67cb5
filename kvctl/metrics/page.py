"""The metrics page, and the methods through which the daemon and the data plane feed it.

Law 6: a scrape reads nothing: gate and cards are shown as their own loops last left them.
Law 9: every label value that is not the site's is of a closed set; a word from outside it is ``other``.
"""

import platform
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvctl.core.events import (
    Admit,
    BudgetChanged,
    Command,
    EngineRestarted,
    LeaseEnded,
    LeftQueue,
    Queued,
    Reject,
    StateChanged,
)
from kvctl.core.ledger import EndedLease
from kvctl.core.outcomes import ChoiceReason, Decision, EndReason, Priority, ProxyFault, SourceFault
from kvctl.core.overrides import Override
from kvctl.core.status import GateStatus
from kvctl.gpu.base import GpuReading
from kvctl.gpu.faults import CardEvent
from kvctl.metrics.catalog import CATALOG, OTHER, SOURCES, Kind
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

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNKNOWN_ROUTE = "unknown"
UNNAMED_CARD = "unknown"  # the driver did not say, or kvctl reads no such card

_ENDED_BY_ITSELF = frozenset({EndReason.FINISHED, EndReason.CAPPED})
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
    happen, on the event loop.

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
        self._counts: dict[type[Command], Callable[[str, Any], None]] = {
            Admit: self._admitted,
            Queued: self._queued,
            LeftQueue: lambda engine, command: self._waited(engine, command.priority, command.waited_s),
            Reject: self._rejected,
            LeaseEnded: lambda engine, command: self._lease_ended(engine, command.record),
            BudgetChanged: self._budget_changed,
            StateChanged: self._state_changed,
            EngineRestarted: self._restarted,
        }
        for instrument in self._instruments():
            instrument.present()
        for route in sorted(self._routes):
            self._counters["kvctl_requests_total"].present(route)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Page(self))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page, of type ``CONTENT_TYPE``."""
        return b"".join(self.parts())

    def parts(self) -> Iterator[bytes]:
        """The page, a metric at a time: what else the event loop has to do need not wait for all of it.

        A metric's series are of one moment.
        """
        return (generate_latest(_One(family)) for family in self._registry.collect())

    # --- the daemon ---

    def add_engine(self, engine: str, status: Callable[[], GateStatus]) -> None:
        """Show an engine, all of its counters at 0. ``status`` is asked at each scrape."""
        self._engines[engine] = status
        for instrument in self._instruments():
            if "engine" in instrument.spec.labels:
                instrument.present(engine)

    def observe(self, engine: str, command: Command) -> None:
        """Count a command of the engine's gate."""
        count = self._counts.get(type(command))
        if count is not None:  # a note has its line in the log
            count(engine, command)

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

    # --- the data plane ---

    def request(self, route: str, outcome: str) -> None:
        """A request was answered. ``route`` is a route's name, ``outcome`` of ``catalog.OUTCOMES``."""
        known = route if route in self._routes else UNKNOWN_ROUTE
        self._counters["kvctl_requests_total"].add(known, _closed("kvctl_requests_total", "outcome", outcome))

    def decided(self, seconds: float) -> None:
        """The gate took ``seconds`` to decide on a counted request."""
        self._histograms["kvctl_decision_seconds"].observe(seconds)

    def counted(self, method: CountMethod, seconds: float) -> None:
        """A prompt was counted."""
        self._histograms["kvctl_token_count_seconds"].observe(seconds, method)

    def first_token(self, seconds: float) -> None:
        """The first byte of an answer came ``seconds`` after its request."""
        self._histograms["kvctl_upstream_ttft_seconds"].observe(seconds)

    def next_token(self, seconds: float) -> None:
        """A stream's tokens came ``seconds`` after one another, on average."""
        self._histograms["kvctl_upstream_inter_token_seconds"].observe(seconds)

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

    # --- commands of the gate ---

    def _admitted(self, engine: str, command: Admit) -> None:
        self._counters["kvctl_admissions_total"].add(engine)
        if command.shadow is not None:
            self._counters["kvctl_shadow_rejections_total"].add(engine, command.shadow)
        self._waited(engine, command.priority, command.waited_s)
        self._of_tenant(engine, command.tenant, Decision.ADMIT)

    def _queued(self, engine: str, command: Queued) -> None:
        self._counters["kvctl_queued_total"].add(engine, command.reason)

    def _state_changed(self, engine: str, command: StateChanged) -> None:
        self._counters["kvctl_engine_state_changes_total"].add(engine, command.after)

    def _restarted(self, engine: str, command: EngineRestarted) -> None:
        del command
        self._counters["kvctl_engine_restarts_total"].add(engine)

    def _waited(self, engine: str, priority: Priority, waited_s: float | None) -> None:
        if waited_s is not None:
            self._histograms["kvctl_queue_wait_seconds"].observe(waited_s, engine, priority)

    def _of_tenant(self, engine: str, tenant: str, decision: Decision) -> None:
        if tenant:
            self._counters["kvctl_tenant_decisions_total"].add(engine, tenant, decision)

    def _rejected(self, engine: str, command: Reject) -> None:
        self._waited(engine, command.priority, command.waited_s)
        self._of_tenant(engine, command.tenant, Decision.REJECT_LATER)
        self._counters["kvctl_rejections_total"].add(engine, command.reason)
        if command.retry_after_s is not None:
            self._histograms["kvctl_retry_after_seconds"].observe(command.retry_after_s, engine)

    def _lease_ended(self, engine: str, record: EndedLease) -> None:
        self._counters["kvctl_leases_ended_total"].add(engine, record.reason)
        self._histograms["kvctl_lease_seconds"].observe(record.at - record.lease.admitted_at, engine)
        if record.reason in _ENDED_BY_ITSELF:
            self._histograms["kvctl_output_tokens"].observe(record.output_tokens, engine)
            if record.lease.claim.tokens:
                share = record.held_tokens / record.lease.claim.tokens
                self._histograms["kvctl_claim_error_ratio"].observe(share, engine)

    def _budget_changed(self, engine: str, command: BudgetChanged) -> None:
        moved = command.after_tokens - command.before_tokens
        direction = "up" if moved > 0 else "down"
        self._counters["kvctl_budget_changes_total"].add(engine, direction, command.reason)

    # --- the page ---

    def rows(self) -> Iterator[Row]:
        """Everything that is of the moment."""
        yield "kvctl_build_info", self._build, 1.0
        for engine, status in self._engines.items():
            yield from of_engine(engine, status())
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

    def families(self) -> Iterator[Metric]:
        """Every metric of the catalog, in its order."""
        snapshots: dict[str, Metric] = {}
        for name, labels, value in self.rows():
            family = snapshots.get(name) or snapshots.setdefault(name, _snapshot_family(name))
            family.add_metric(labels, value)  # type: ignore[attr-defined]
        for name in CATALOG:
            instrument = self._counters.get(name) or self._histograms.get(name)
            yield instrument.family() if instrument else snapshots.get(name) or _snapshot_family(name)

    def _instruments(self) -> Iterator[Counter | Histogram]:
        yield from self._counters.values()
        yield from self._histograms.values()


class _Page(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families()


class _One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


def _snapshot_family(name: str) -> GaugeMetricFamily | CounterMetricFamily:
    spec = CATALOG[name]
    kind = CounterMetricFamily if spec.kind is Kind.COUNTER else GaugeMetricFamily
    return kind(name, spec.help, labels=list(spec.labels))


def _closed(name: str, label: str, word: str) -> str:
    return word if word in CATALOG[name].labels[label] else OTHER
