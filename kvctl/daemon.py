"""The daemon: the only module that wires the core to the outside.

    engine /metrics -> scraper ---+
    NVML or simulated card -------+-> gatekeeper -> gate -> commands -> metrics, logs
    admin socket -> desk -> knobs-+        ^
    callers -> proxy ----------------------+--> engine

Law 8: degraded is a state, not an exit. Only settings that cannot be obeyed (an address in use, an unreadable
tokenizer) end the daemon, at its start and with one sentence.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from kvctl import __version__, logs
from kvctl.admin.desk import Desk
from kvctl.admin.listeners import BusyError, ListenError, OwnedSocket
from kvctl.admin.pace import Pace
from kvctl.admin.port import CardDetails, DaemonStatus, LastReload, Reloaded
from kvctl.admin.reloading import Reloader
from kvctl.admin.server import AdminApi, AdminServer, PublicApi, PublicServer
from kvctl.admin.state import OwnedFolder
from kvctl.card_watch import CardWatch, news_to
from kvctl.control.certificates import Certificates
from kvctl.control.gatekeeper import Gatekeeper
from kvctl.control.journal import Journal
from kvctl.control.telling import tellers
from kvctl.control.ticker import Beat, Ticker
from kvctl.core.claim import Shape
from kvctl.core.decisions import DecisionRecord
from kvctl.core.events import Admit, DrainChanged, Reject
from kvctl.core.gate import Gate
from kvctl.core.outcomes import ProxyFault
from kvctl.core.overrides import bounds
from kvctl.core.status import GateStatus
from kvctl.fleet.agent_check import AgentServer
from kvctl.fleet.face import NOBODY, Face
from kvctl.fleet.standing import standing_of
from kvctl.gpu.base import GpuReading, GpuSource
from kvctl.metrics import CONTENT_TYPE, ConfigView, Metrics
from kvctl.part_configs import decision_file, engine_settings, knob_defaults, proxy_config, route_names
from kvctl.proxy.server import Proxy
from kvctl.proxy_metrics import ProxyReports
from kvctl.settings.model import Settings
from kvctl.systemd_notify import Notifier
from kvctl.tokens.chain import ChainCounter
from kvctl.unit import MakeGate, Unit
from kvctl.unit_views import SumOfCounts, readiness_of, sentence_of, worst_source
from kvctl.web.page import StatusPage
from kvctl.web.recent import Recent

log = logs.get("daemon")

STATUS_EVERY_S = 1.0  # how often systemd is told the tick's sentence
STOP_EXTRA_S = 10.0  # beyond the drain, for closing


class Part(Protocol):
    """What runs beside the listeners."""

    def start(self) -> None:
        """Begin."""

    async def close(self) -> None:
        """End."""


class Daemon:
    """Everything around the engines' gates. Also what the admin listeners ask (``AdminPort``).

    Args:
        settings: The settings in force.
        sources: By the setting ``gpus`` of an engine, what reads its cards; None: nothing does.
        counters: By an engine's name, what counts the tokens of its prompts.
        read: Loads the settings again, for a reload; None: there is none.
        gate: Makes the gates.
        certificates: TLS on both sides; None: the settings name none.
    """

    def __init__(
        self,
        settings: Settings,
        sources: Mapping[tuple[str, ...], GpuSource | None],
        counters: Mapping[str, ChainCounter],
        read: Callable[[], Settings] | None = None,
        *,
        gate: MakeGate = Gate,
        certificates: Certificates | None = None,
    ) -> None:
        self._settings = settings
        self._certificates = certificates or Certificates()
        self._make_gate = gate
        self._clock = time.monotonic
        self._started_at = self._clock()
        self._notify = Notifier()
        self._told_at = float("-inf")
        self._sentence = "starting"
        self._recent = Recent(self._clock)
        self.admin: AdminApi | None = None
        self._pace = Pace()
        self._metrics = Metrics(version=__version__, routes=route_names(settings))
        self._reports = ProxyReports(self._metrics, access_log=settings.access_log)
        self.journal = Journal(
            settings.decision_log_size, self._clock, time.time, decision_file(settings, self._clock)
        )
        news = news_to(self._metrics, self.journal.tell)
        self.cards = CardWatch(sources, settings.gpu_interval, self._clock, news)
        self.units = {
            name: self._make_unit(name, each, counters[name])
            for name, each in engine_settings(settings).items()
        }
        for name, unit in self.units.items():
            self.cards.add(name, unit.settings.gpus, unit.settings.engine_url, unit.handle)
        self.desk = self._make_desk()
        self._reloader = Reloader(settings, read and self._certificates.along_with(read), self._adopt)
        self.ticker = Ticker(self._keepers, settings.tick_interval, self._ticked)
        self._show_on_page()
        self._page = StatusPage(self, self.desk.document, self._recent)
        self.face = Face(self._clock, NOBODY, reports=settings.load_report, view=settings.metrics_view)
        self.proxy = self._make_proxy()

    # --- making and wiring --------------------------------------------------------------------------

    def _make_desk(self) -> Desk:
        settings = self._settings
        return Desk(
            limits=bounds(settings.margin_min, settings.margin_max),
            ttl_max_s=settings.override_ttl_max,
            defaults=knob_defaults(settings),
            state_dir=settings.state_dir,
            clock=self._clock,
            wall=time.time,
            apply=lambda _: self._configure(),
            tell=self.journal.tell,
        )

    def _make_proxy(self) -> Proxy:
        return Proxy(
            backends=[unit.backend for unit in self.units.values()],
            config=replace(proxy_config(self._settings), face=self.face),
            metrics=self._reports,
            ready=self.readiness,
            ssl=self._certificates.front,
        )

    def _make_unit(self, name: str, settings: Settings, counter: ChainCounter) -> Unit:
        named = name if len(engine_settings(self._settings)) > 1 else None
        counts = self._metrics.gate(name)
        return Unit(
            name,
            settings,
            counter,
            clock=self._clock,
            observers=[*tellers(named), *counts.interests],
            on_gate=partial(self._watch, name),
            on_retry=partial(self._reports.fault, ProxyFault.UPSTREAM_RETRIED),
            card=partial(self.cards.smallest, name),
            gate=self._make_gate,
            trust=self._certificates.trusts.get(name),
        )

    def _watch(self, name: str, keeper: Gatekeeper) -> None:
        self.journal.watch(name, keeper)
        keeper.observe(partial(self._recent.observe, name), Reject)
        keeper.count(partial(self._recent.observe, name), Admit)

    def _keepers(self) -> list[Gatekeeper]:
        return [keeper for unit in self.units.values() for keeper in unit.ranks.keepers]

    def _show_on_page(self) -> None:
        page, units = self._metrics, list(self.units.values())
        for unit in units:
            page.add_engine(unit.name, unit.status)
        page.overrides = lambda: self.desk.active().values()
        page.config = self._config_view
        file = self.journal.file
        page.decisions_dropped = lambda: 0 if file is None else file.dropped
        page.background_responses = lambda: self.proxy.background_responses
        page.counting = SumOfCounts([unit.counter for unit in units])
        page.sources["engine_metrics"] = lambda: worst_source([unit.telemetry() for unit in units])
        if self.cards:
            page.gpu = self.cards.reading
            page.sources["nvml"] = lambda: worst_source(self.cards.sources())

    def _config_view(self) -> ConfigView:
        last = self._reloader.last
        ends = self._certificates.ends
        return ConfigView(last.revision, reloaded_well=not last.problems, certificate_ends=ends)

    def metrics(self) -> tuple[Iterable[bytes], str]:
        """The metrics page, in parts that are made as they are asked for, and its content type."""
        self.journal.settle()
        return self._metrics.parts(), CONTENT_TYPE

    # --- what the admin listeners ask ---------------------------------------------------------------

    def status(self) -> DaemonStatus:
        """The state of now."""
        self.journal.settle()
        now = self._clock()
        reading = self.cards.reading() or GpuReading()
        gates = {name: unit.status() for name, unit in self.units.items()}
        return DaemonStatus(
            now=now,
            started_at=self._started_at,
            sentence=self._sentence_of(gates),
            draining=all(gate.draining for gate in gates.values()),
            bypass=all(gate.enforce_ratio == 0.0 for gate in gates.values()),
            engines=gates,
            gpus=reading.samples,
            gpu_fault=reading.fault,
            counting={name: unit.counter.status() for name, unit in self.units.items()},
            cards=CardDetails(
                processes=reading.processes,
                engines=self.cards.engines_on(),
                driver=reading.driver,
                released_s=self.cards.released_s(),
            ),
        )

    def _sentence_of(self, gates: Mapping[str, GateStatus]) -> str:
        return "; ".join(filter(None, (sentence_of(gates), self.cards.remark())))

    async def release_cards(self, seconds: float) -> None:
        """Let go of the driver for so long; 0: take hold of it again."""
        await self.cards.release(seconds)

    def outlook(self, shape: Shape) -> Mapping[str, DecisionRecord]:
        """What each engine that serves the shape's model would say to it now; nothing is charged."""
        now = self._clock()
        serving = {name: unit for name, unit in self.units.items() if unit.serves(shape.model)}
        return {name: unit.outlook(shape, now) for name, unit in serving.items()}

    async def reload(self, *, dry_run: bool = False) -> Reloaded:
        """Read the settings again and put them in force. Raises SettingsError, with the old ones kept."""
        if dry_run:
            return await self._reloader.pending()
        self._notify.reloading()
        try:
            return await self._reloader.reload()
        finally:
            self._notify.ready(self._sentence)

    def last_reload(self) -> LastReload:
        """How the settings stand."""
        return self._reloader.last

    def settings(self) -> Settings:
        """The settings in force, overrides not counted."""
        return self._settings

    def drain(self, *, draining: bool, engine: str | None = None) -> None:
        """Admit nothing new from now on, or admit again; ``engine``: to that one."""
        for name, unit in self.units.items():
            if engine in (None, name):
                unit.handle(DrainChanged(draining))

    def readiness(self) -> tuple[bool, str]:
        """Whether callers are served by any engine, and why or why not."""
        return readiness_of({name: unit.readiness() for name, unit in self.units.items()})

    # --- the beat -----------------------------------------------------------------------------------

    def _configure(self) -> None:
        """Settings with the overrides over them, for every gate."""
        overridden = {knob: each.value for knob, each in self.desk.active().items()}
        own = engine_settings(self._settings)
        for name, unit in self.units.items():
            unit.reconfigure(own[name], overridden)

    def _adopt(self, settings: Settings) -> None:
        """Other settings are in force: what of them can change while kvctl runs."""
        self._certificates.adopt()
        self._settings = settings
        self.journal.resize(settings.decision_log_size)
        limits = bounds(settings.margin_min, settings.margin_max)
        self.desk.reconfigure(limits, settings.override_ttl_max, knob_defaults(settings))
        if self.admin is not None:
            self.admin.levels.settle()

    def _ticked(self, beat: Beat) -> None:
        now = self._clock()
        self.desk.expire()
        self._metrics.ticked(beat.tick_s, beat.lag_s, overrun=beat.overrun)
        self._notify.alive(now)
        due = now - self._told_at >= STATUS_EVERY_S
        if not (due or self.face.in_use):
            return
        gates = {name: unit.status() for name, unit in self.units.items()}
        self.face.update(standing_of(gates.values()))
        if due:
            self._told_at = now
            self._recent.sample(gates)
            self._sentence = self._sentence_of(gates)
            self._notify.status(self._sentence)

    # --- life ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything is up inside, and closed in reverse order behind. Raises ListenError."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            stack.callback(self._notify.close)
            stack.callback((await asyncio.to_thread(OwnedFolder, settings.state_dir)).close)
            admin = self._admin_server()
            if admin is not None:
                stack.push_async_callback(admin.close)
            public = PublicServer(PublicApi(self, self._pace, self._page), settings.admin_listen)
            stack.push_async_callback(public.close)
            await asyncio.to_thread(self.desk.open)
            for drained in self.desk.drains.standing(self.units):
                self.drain(draining=True, engine=drained)
            stack.push_async_callback(self.desk.close)
            parts: list[Part] = [self.journal, self.cards, *self.units.values(), self.ticker]
            for part in parts:
                part.start()
                stack.push_async_callback(part.close)
            await public.start()
            await self._answer_agents(stack)
            if admin is not None:
                await admin.start()
            stack.push_async_callback(self.proxy.close)
            await self._listen()
            self._notify.ready(self._sentence)
            logs.event(
                log,
                logging.INFO,
                "started",
                f"kvctl {__version__} listens on {settings.listen}, "
                f"gates {', '.join(self.units)}, policy {settings.policy}",
            )
            yield
            await self._stop()

    def _admin_server(self) -> AdminServer | None:
        """The admin socket; a place where none can be made is told, and serving goes on without it."""
        try:
            listener = OwnedSocket(self._settings.admin_socket)
        except BusyError:
            raise
        except ListenError as error:
            sentence = f"{error}: kvctl serves, but no command can reach it; set admin_socket"
            logs.event(log, logging.WARNING, "no_admin_socket", sentence)
            return None
        self.admin = AdminApi(self, self.desk, self.journal, self._pace)
        return AdminServer(self.admin, listener)

    async def _answer_agents(self, stack: AsyncExitStack) -> None:
        where = self._settings.agent_listen
        if where is None:
            return
        self.face.in_use = True
        agents = AgentServer(where.host or None, where.port, lambda: self.face.standing)
        stack.push_async_callback(agents.close)
        try:
            await agents.start()
        except OSError as error:
            raise ListenError(f"agent_listen {where}: {error.strerror or error}") from error

    async def _listen(self) -> None:
        try:
            await self.proxy.start(str(self._settings.listen), self._notify.inherited)
        except OSError as error:
            raise ListenError(f"listen {self._settings.listen}: {error.strerror or error}") from error
        self._notify.keep(self.proxy.sockets)

    async def _stop(self) -> None:
        """Nothing new is admitted; what runs has ``drain_timeout`` to end."""
        timeout = self._settings.drain_timeout
        self.drain(draining=True)
        running = self.proxy.in_flight
        sentence = f"stopping: {running} requests in flight have up to {timeout:g} s to end"
        logs.event(log, logging.INFO, "draining", sentence)
        self._notify.stopping(sentence)
        self._notify.extend_timeout(timeout + STOP_EXTRA_S)
        await self.proxy.drain(timeout)
        logs.event(log, logging.INFO, "stopped", "stopped: no request is in flight")
