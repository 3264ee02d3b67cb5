"""One engine behind the daemon, with everything that belongs to it alone. Only the daemon makes it.

    its /metrics -> scraper --+
    its cards ----------------+-> gatekeeper -> gate -> commands -> metrics, logs
    proxy (backend) ----------+

Law 1 and law 2 are kept per gate: each engine has one gate and one ledger (one for each rank where requests
can be pinned to ranks), and no lease is in two of them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kvctl.control.certificates import Trust
from kvctl.control.decision_log import record_of
from kvctl.control.gatekeeper import Gatekeeper, Interest, Observer
from kvctl.control.plan_check import PlanCheck
from kvctl.control.planning import plan_source
from kvctl.control.poll import Poller
from kvctl.control.probe import Detector
from kvctl.control.scraper import Scraper
from kvctl.control.tokenizer_check import TokenizerCheck
from kvctl.core.choice import choose
from kvctl.core.claim import Shape
from kvctl.core.decisions import DecisionRecord
from kvctl.core.events import Arrived, Command, EngineRestarted, Event, Noted, Reconfigured, StateChanged
from kvctl.core.gate import Gate
from kvctl.core.outcomes import SERVING, Note
from kvctl.core.overrides import Knob, Value
from kvctl.core.sentence import state_means
from kvctl.core.status import GateStatus
from kvctl.core.supply import GateConfig
from kvctl.engines.detect import AutoEngine, engine_of
from kvctl.metrics import SourceView
from kvctl.part_configs import authorization, gate_config, with_overrides
from kvctl.plan import Card
from kvctl.proxy.bodies import Reader
from kvctl.proxy.pool import Upstream
from kvctl.proxy.seams import Backend
from kvctl.rank_lanes import RankLanes, whole
from kvctl.settings.model import Settings
from kvctl.tokens.chain import ChainCounter

MakeGate = Callable[[GateConfig], Gate]

PLAN_TIMEOUT_S = 5.0  # the pool is asked for once: it may take longer than a poll


class Unit:
    """One engine. ``settings`` are those of this engine, inherited ones included.

    Args:
        name: What the engine is called in metrics, logs and commands.
        settings: The settings in force for it.
        counter: Counts the tokens of its prompts; closed by its owner.
        clock: Monotonic seconds.
        observers: Count the commands of its gate, of the kinds that they name.
        on_gate: Told of each gate that the engine comes to have.
        on_retry: Told of each request that the keep-alive race made to be sent again.
        card: The smallest of its cards, None while none was read.
        gate: Makes its gate of what the settings say.
        trust: TLS towards it, where its address is https.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        counter: ChainCounter,
        *,
        clock: Callable[[], float],
        observers: Iterable[Interest],
        on_gate: Callable[[Gatekeeper], None],
        on_retry: Callable[[], None],
        card: Callable[[], Card | None],
        gate: MakeGate = Gate,
        trust: Trust | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.counter = counter
        self.engine = engine_of(settings.engine)
        self._trust = trust
        self._clock = clock
        self._observers = tuple(observers)
        self._on_gate = on_gate
        self._make_gate = gate
        self._overridden: Mapping[Knob, Value] = {}
        self.keeper = self._gatekeeper(self._observers)
        self.ranks = RankLanes(self.keeper, self._rank_keeper, self._pins, self._settle)
        poller = self._poller()
        self.scraper = Scraper(
            self.engine,
            poller,
            self.handle,
            interval_s=settings.scrape_interval,
            detector=self._detector(poller),
        )
        self.upstream = Upstream(
            settings.engine_url,
            connect_timeout=settings.connect_timeout,
            read_timeout=settings.upstream_read_timeout,
            trust=self._trust,
            on_retry=on_retry,
        )
        self.backend = self._make_backend()
        self._tokenizer_check = TokenizerCheck(counter, lambda: self.keeper.gate.models, name)
        self.keeper.observe(self._tokenizer_check, Noted, EngineRestarted)
        self._plan_check = self._make_plan_check(card)

    def _make_backend(self) -> Backend:
        entry = next((each for each in self.settings.engines if each.name == self.name), None)
        return Backend(
            self.upstream,
            self.engine,
            self._reader(),
            self.ranks.lanes,
            name=self.name,
            models=() if entry is None else entry.models,
            aliases={} if entry is None else entry.aliases,
            tokenizer=self.settings.tokenizer,
            drains=self.settings.engine_drain_on_abort,
            authorization=authorization(self.settings),
        )

    def _gatekeeper(self, observers: Iterable[Interest]) -> Gatekeeper:
        keeper = Gatekeeper(self._make_gate(gate_config(self.settings, self.engine)), self._clock)
        for observer, kinds in observers:
            keeper.count(observer, *kinds)
        keeper.observe(lambda command: self._restarted(keeper, command), EngineRestarted)
        self._on_gate(keeper)
        return keeper

    def _rank_keeper(self) -> Gatekeeper:
        """The keeper of a further rank; what concerns the whole engine the first one alone reports."""
        return self._gatekeeper([(_of_rank(observer), kinds) for observer, kinds in self._observers])

    def _pins(self) -> bool:
        return self.settings.rank_pinning == "auto" and self.engine.pins_ranks

    def _restarted(self, keeper: Gatekeeper, command: Command) -> None:
        if isinstance(command, EngineRestarted):
            self.ranks.forget_prefixes(keeper)

    def _poller(self, at_least_s: float = 0.0) -> Poller:
        settings = self.settings
        return Poller(
            settings.engine_url,
            timeout_s=max(settings.scrape_timeout, at_least_s),
            max_bytes=settings.scrape_max_bytes,
            authorization=authorization(settings),
            trust=self._trust,
        )

    def _detector(self, poller: Poller) -> Detector | None:
        """None where the settings name the engine."""
        engine = self.engine
        return Detector(engine, poller, self._clock) if isinstance(engine, AutoEngine) else None

    def _reader(self) -> Reader:
        def context() -> int | None:
            return self.keeper.gate.context_tokens

        self.counter.know_context(context)
        self.counter.know_engine(lambda: self.engine.name)
        self.counter.know_sharing(self._shares_prefixes)
        return Reader(
            self.counter,
            self.engine,
            vocab_size=self.counter.vocab_size,
            context=context,
            max_logprobs=self.settings.max_logprobs,
            media=self.counter.media,
            begins=self._shares_prefixes,
            learn=self.counter.learn,
        )

    def _shares_prefixes(self) -> bool:
        return any(keeper.gate.sharing for keeper in self.ranks.keepers)

    def _make_plan_check(self, card: Callable[[], Card | None]) -> PlanCheck | None:
        """None where the settings name no model's config."""
        settings = self.settings
        source = plan_source(settings.plan_model, settings.tokenizer, settings.plan_flags)
        if source is None:
            return None
        made = PlanCheck(source, self._poller(PLAN_TIMEOUT_S), card, self.handle)
        self.keeper.observe(made, Noted, EngineRestarted)
        return made

    def handle(self, event: Event) -> None:
        """Hand an event to the engine's gates."""
        self.ranks.handle(event)

    def reconfigure(self, settings: Settings, overridden: Mapping[Knob, Value]) -> None:
        """Put other settings in force, with on-call's overrides applied."""
        self.settings, self._overridden = settings, overridden
        self._settle()

    def _settle(self) -> None:
        """Divide among its ranks what the settings say of the engine as a whole."""
        config = gate_config(with_overrides(self.settings, self._overridden), self.engine)
        share = max(config.fallback_budget_tokens // len(self.ranks.lanes), 1)
        self.handle(Reconfigured(replace(config, fallback_budget_tokens=share)))

    def serves(self, model: str) -> bool:
        """Whether it serves a model of that name; "": any model."""
        return not model or not self.backend.known_models() or self.backend.serves(model)

    def outlook(self, shape: Shape, now: float) -> DecisionRecord:
        """What its gate (the best of several) would say to that shape now; nothing is charged."""
        gates = [keeper.gate for keeper in self.ranks.keepers]
        best, _ = choose([gate.offer(shape, now) for gate in gates], [0.0] * len(gates))
        gate = gates[best]
        return record_of(self.name, Arrived("", shape), gate.moment(), gate.outlook(shape, now), now)

    def start(self) -> None:
        """Begin to watch the engine."""
        self.scraper.start()

    async def close(self) -> None:
        """Stop watching it. Connections of the data plane are the proxy's to close."""
        await self.scraper.close()
        if self._plan_check is not None:
            await self._plan_check.close()
        await self._tokenizer_check.close()

    # --- what is shown ------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether nothing new is admitted."""
        return self.keeper.gate.draining

    def status(self) -> GateStatus:
        """Everything worth showing, now; of several ranks their sum."""
        now = self._clock()
        return whole([keeper.gate.status(now) for keeper in self.ranks.keepers])

    def telemetry(self) -> SourceView:
        """The state of the readings of the engine's metrics page."""
        scraper = self.scraper
        return SourceView(
            up=scraper.fault is None and scraper.last_success_at is not None,
            read_at=scraper.last_success_at,
            duration_s=scraper.last_duration_s,
        )

    def readiness(self) -> tuple[bool, str]:
        """Whether it serves callers, and why or why not."""
        state = self.keeper.gate.state
        if self.draining:
            return False, "draining: nothing new is admitted"
        if state in SERVING:
            return True, f"engine {state}"
        return False, f"engine {state}: {state_means(state)}"


def _of_rank(observer: Observer) -> Observer:
    def observe(command: Command) -> None:
        described = isinstance(command, Noted) and command.word is Note.ENGINE_DESCRIBED
        if not (described or isinstance(command, StateChanged)):
            observer(command)

    return observe
