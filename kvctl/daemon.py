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
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import uvloop

from kvctl import __version__, logs
from kvctl.admin.desk import Desk, Values
from kvctl.admin.listeners import BusyError, ListenError, OwnedSocket
from kvctl.admin.port import DaemonStatus
from kvctl.admin.server import AdminApi, AdminServer, PublicApi, PublicServer
from kvctl.control.cards import CardPoller
from kvctl.control.gatekeeper import Gatekeeper
from kvctl.control.plan_check import PlanCheck
from kvctl.control.planning import plan_source, smallest_card
from kvctl.control.poll import LoopbackResolver, Poller
from kvctl.control.scraper import Scraper
from kvctl.control.telling import tell
from kvctl.control.ticker import Beat, Ticker
from kvctl.control.tokenizer_check import TokenizerCheck
from kvctl.core.events import DrainChanged, KnobsChanged
from kvctl.core.gate import Gate
from kvctl.core.outcomes import SERVING, Policy, ProxyFault
from kvctl.core.overrides import Knob, bounds
from kvctl.core.sentence import state_means
from kvctl.engines.detect import engine_of
from kvctl.gpu.base import GpuSource
from kvctl.gpu.sources import make_source
from kvctl.metrics import CONTENT_TYPE, Metrics, SourceView
from kvctl.part_configs import gate_config, proxy_config
from kvctl.plan import Card
from kvctl.proxy.bodies import Reader
from kvctl.proxy.pool import Upstream
from kvctl.proxy.server import Proxy
from kvctl.proxy_metrics import ProxyReports
from kvctl.settings.model import Settings
from kvctl.settings.surroundings import warnings
from kvctl.systemd_notify import Notifier
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.engine import http_ask
from kvctl.tokens.load import load_counter

log = logs.get("daemon")

STATUS_EVERY_S = 1.0  # how often systemd is told the tick's sentence
PLAN_TIMEOUT_S = 5.0  # the pool is asked for once: it may take longer than a poll
STOP_EXTRA_S = 10.0  # beyond the drain, for closing


class Daemon:
    """One engine's gate with everything around it. Also what the admin listeners ask (``AdminPort``)."""

    def __init__(self, settings: Settings, gpu_source: GpuSource | None, counter: ChainCounter) -> None:
        self._settings = settings
        self._clock = time.monotonic
        self._started_at = self._clock()
        self._notify = Notifier()
        self._told_at = float("-inf")
        self._sentence = "starting"
        self._engine = engine_of(settings.engine)
        self.keeper = Gatekeeper(Gate(gate_config(settings, self._engine)), self._clock, [tell])
        self.desk = Desk(
            limits=bounds(settings.margin_min, settings.margin_max),
            ttl_max_s=settings.override_ttl_max,
            defaults={Knob.MARGIN: settings.margin, Knob.POLICY: settings.policy},
            state_dir=settings.state_dir,
            clock=self._clock,
            wall=time.time,
            apply=self._turn_knobs,
        )
        poller = Poller(
            settings.engine_url, timeout_s=settings.scrape_timeout, max_bytes=settings.scrape_max_bytes
        )
        self.scraper = Scraper(self._engine, poller, self.keeper.handle, interval_s=settings.scrape_interval)
        self.cards = (
            None if gpu_source is None else CardPoller(gpu_source, settings.gpu_interval, self.keeper.handle)
        )
        self.ticker = Ticker(self.keeper, settings.tick_interval, self._ticked)
        self._check = TokenizerCheck(counter.verify, lambda: self.keeper.gate.models)
        self.keeper.observe(self._check)
        self._plan_check = self._make_plan_check()
        self._metrics = self._make_metrics()
        self._metrics.counting = counter
        reports = ProxyReports(self._metrics, access_log=settings.access_log)
        self.upstream = Upstream(
            settings.engine_url,
            connect_timeout=settings.connect_timeout,
            read_timeout=settings.upstream_read_timeout,
            on_retry=lambda: reports.fault(ProxyFault.UPSTREAM_RETRIED),
        )
        self.proxy = Proxy(
            keeper=self.keeper,
            upstream=self.upstream,
            engine=self._engine,
            reader=self._make_reader(counter),
            config=proxy_config(settings),
            metrics=reports,
            ready=self.readiness,
        )

    def _make_reader(self, counter: ChainCounter) -> Reader:
        def context() -> int | None:
            return self.keeper.gate.context_tokens

        counter.know_context(context)
        return Reader(
            counter,
            self._engine,
            vocab_size=counter.vocab_size,
            context=context,
            max_logprobs=self._settings.max_logprobs,
        )

    def _make_plan_check(self) -> PlanCheck | None:
        """None where the settings name no model's config."""
        settings = self._settings
        source = plan_source(settings.plan_model, settings.tokenizer, settings.plan_flags)
        if source is None:
            return None
        made = PlanCheck(
            source,
            Poller(
                settings.engine_url,
                timeout_s=max(settings.scrape_timeout, PLAN_TIMEOUT_S),
                max_bytes=settings.scrape_max_bytes,
            ),
            self._smallest_card,
            self.keeper.handle,
        )
        self.keeper.observe(made)
        return made

    def _smallest_card(self) -> Card | None:
        reading = None if self.cards is None else self.cards.latest
        return None if reading is None else smallest_card(reading.samples)

    def _make_metrics(self) -> Metrics:
        made = Metrics(version=__version__, routes=[route.name for route in self._engine.routes])
        engine = self._settings.engine_url
        made.add_engine(engine, lambda: self.keeper.gate.status(self._clock()))
        self.keeper.observe(lambda command: made.observe(engine, command))
        made.overrides = lambda: self.desk.active().values()
        made.sources["engine_metrics"] = self._engine_source
        if self.cards is not None:
            cards = self.cards
            made.gpu = lambda: cards.latest
            made.sources["nvml"] = lambda: _card_source(cards)
        return made

    def _engine_source(self) -> SourceView:
        scraper = self.scraper
        return SourceView(
            up=scraper.fault is None and scraper.last_success_at is not None,
            read_at=scraper.last_success_at,
            duration_s=scraper.last_duration_s,
        )

    def metrics(self) -> tuple[bytes, str]:
        """The metrics page and its content type."""
        return self._metrics.render(), CONTENT_TYPE

    # --- what the admin listeners ask ---------------------------------------------------------------

    def status(self) -> DaemonStatus:
        """The state of now."""
        now = self._clock()
        reading = None if self.cards is None else self.cards.latest
        gate = self.keeper.gate.status(now)
        return DaemonStatus(
            now=now,
            started_at=self._started_at,
            sentence=gate.sentence,
            draining=self.keeper.gate.draining,
            engines={self._settings.engine_url: gate},
            gpus=() if reading is None else reading.samples,
            gpu_fault=None if reading is None else reading.fault,
        )

    def settings(self) -> Settings:
        """The settings in force, overrides not counted."""
        return self._settings

    def drain(self, *, draining: bool) -> None:
        """Admit nothing new from now on, or admit again."""
        self.keeper.handle(DrainChanged(draining))

    def readiness(self) -> tuple[bool, str]:
        """Whether callers are served, and why or why not."""
        state = self.keeper.gate.state
        if self.keeper.gate.draining:
            return False, "draining: nothing new is admitted"
        if state in SERVING:
            return True, f"engine {state}"
        return False, f"engine {state}: {state_means(state)}"

    # --- the beat -----------------------------------------------------------------------------------

    def _turn_knobs(self, values: Values) -> None:
        margin, policy = values[Knob.MARGIN], values[Knob.POLICY]
        self.keeper.handle(KnobsChanged(float(margin), Policy(str(policy))))

    def _ticked(self, beat: Beat) -> None:
        now = self._clock()
        self.desk.expire()
        self._metrics.ticked(beat.tick_s, beat.lag_s, overrun=beat.overrun)
        self._notify.alive(now)
        if now - self._told_at >= STATUS_EVERY_S:
            self._told_at = now
            self._sentence = self.keeper.gate.status(now).sentence
            self._notify.status(self._sentence)

    # --- life ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything is up inside, and closed in reverse order behind. Raises ListenError."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            stack.callback(self._notify.close)
            admin = self._admin_server()
            if admin is not None:
                stack.push_async_callback(admin.close)
            public = PublicServer(PublicApi(self), settings.admin_listen)
            stack.push_async_callback(public.close)
            await asyncio.to_thread(self.desk.open)
            stack.push_async_callback(self.desk.close)
            stack.push_async_callback(self._check.close)
            if self._plan_check is not None:
                stack.push_async_callback(self._plan_check.close)
            for part in (self.cards, self.scraper, self.ticker):
                if part is not None:
                    part.start()
                    stack.push_async_callback(part.close)
            await public.start()
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
                f"gates {settings.engine_url}, policy {settings.policy}",
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
        return AdminServer(AdminApi(self, self.desk), listener)

    async def _listen(self) -> None:
        try:
            await self.proxy.start(str(self._settings.listen))
        except OSError as error:
            raise ListenError(f"listen {self._settings.listen}: {error.strerror or error}") from error

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


def _card_source(cards: CardPoller) -> SourceView:
    reading = cards.latest
    if reading is None:
        return SourceView(up=False)
    return SourceView(up=reading.fault is None, read_at=cards.read_at, duration_s=reading.seconds)


async def serve(settings: Settings, *, stop: asyncio.Event, gpu_source: GpuSource | None = None) -> None:
    """Run until ``stop`` is set. ``gpu_source`` stands in for the one that the settings name.

    Raises ListenError or TokenizerError when the settings cannot be obeyed.
    """
    source = gpu_source or make_source(settings.gpus, timeout_s=settings.gpu_timeout)
    async with _counter(settings) as counter, Daemon(settings, source, counter).running():
        await stop.wait()


@asynccontextmanager
async def _counter(settings: Settings) -> AsyncIterator[ChainCounter]:
    connector = aiohttp.TCPConnector(resolver=LoopbackResolver(), limit=0, keepalive_timeout=3.0)
    async with aiohttp.ClientSession(connector=connector) as session:
        counter = await asyncio.to_thread(
            load_counter,
            settings.tokenizer,
            ask=http_ask(session, f"{settings.engine_url}/tokenize"),
            inline_bytes=settings.tokenize_inline_bytes,
            workers=settings.tokenize_workers,
            timeout_s=settings.tokenize_timeout,
        )
        try:
            yield counter
        finally:
            await counter.close()


def run(settings: Settings) -> None:
    """Serve in the foreground until SIGTERM or SIGINT. A second signal cuts the drain short."""
    handler = logs.start(settings.log_level, settings.log_format)
    for sentence in warnings(settings):
        logs.event(log, logging.WARNING, "settings", sentence)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run_until_signal(settings))
    finally:
        logs.stop(handler)


async def _run_until_signal(settings: Settings) -> None:
    stop = asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    hangup = "SIGHUP is ignored: settings are read at the start; for the margin use kvctl set"
    loop.add_signal_handler(signal.SIGHUP, lambda: logs.event(log, logging.WARNING, "sighup", hangup))

    def signalled() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, signalled)
    try:
        await serve(settings, stop=stop)
    except asyncio.CancelledError:
        logs.event(log, logging.WARNING, "cut", "a second signal cut the drain short")
