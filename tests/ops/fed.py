"""A metrics page with something behind every series: a real gate, driven through everything that it tells."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from kvctl.control.gatekeeper import Gatekeeper
from kvctl.core.claim import Shape
from kvctl.core.events import (
    Arrived,
    Ended,
    EngineDescribed,
    Event,
    GpusRead,
    KnobsChanged,
    LeaseEnded,
    Progressed,
    Scraped,
    ScrapeFailed,
    Ticked,
)
from kvctl.core.gate import Gate
from kvctl.core.outcomes import ChoiceReason, EndReason, Policy, SourceFault
from kvctl.core.overrides import Overrides, bounds
from kvctl.core.residuals import AHEAD, FEWEST_LOOKS
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, GpuSample, RankSample
from kvctl.core.tenants import TenantRule
from kvctl.gpu.base import GpuReading
from kvctl.gpu.faults import CardEvent, EventKind
from kvctl.metrics import ConfigView, Metrics, SourceView
from kvctl.metrics.catalog import DISCONNECT_PHASES, OUTCOMES, UPSTREAM_ERRORS
from kvctl.tokens.base import CountMethod
from kvctl.tokens.calibration import Witness
from kvctl.tokens.source import Why

ENGINE = "http://127.0.0.1:8000"
WALL = 1_700_000_000.0
GIB = 1 << 30


@dataclass
class Counting:
    """A token counter that has compared and fallen back."""

    waiting: int = 1
    doubted: bool = False
    error_ratio: float | None = 0.002
    samples: Mapping[tuple[Witness, bool], int] = field(
        default_factory=lambda: dict.fromkeys(product(Witness, (True, False)), 3)
    )
    characters: tuple[int, int] = (20_000, 5_000)
    fallbacks: Mapping[tuple[CountMethod, Why], int] = field(
        default_factory=lambda: dict.fromkeys(product(CountMethod, Why), 2)
    )


class Fed:
    """A gate, its metrics, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.arrived = self.output_tokens = 0
        self.gate = Gate(GateConfig(max_num_seqs=256, tenants=(TenantRule(name="team-a"),)))
        self.keeper = Gatekeeper(self.gate, lambda: self.now)
        self.overrides = Overrides(bounds(0.0, 0.5), 86400.0)
        self.reading = GpuReading()
        self.rank = RankSample(
            rank="0",
            at=self.now,
            model="tiny",
            kv_usage_ratio=0.4,
            running=3,
            waiting=1,
            preemptions_total=0.0,
            generation_tokens_total=0.0,
            block_size=16,
            capacity_tokens=16_000,
            capacity_exact=True,
        )
        self.metrics = Metrics(
            version="0.0.test",
            routes=("chat_completions", "completions"),
            monotonic=lambda: self.now,
            wall=lambda: self.now - 1000.0 + WALL,
        )
        self.metrics.add_engine(ENGINE, lambda: self.gate.status(self.now))
        self.metrics.gpu = lambda: self.reading
        self.metrics.overrides = lambda: self.overrides.active(self.now).values()
        self.metrics.config = lambda: ConfigView(
            certificate_ends={("listen", ""): WALL + 40 * 86400, ("engine_ca", ENGINE): WALL + 400 * 86400}
        )
        self.metrics.counting = Counting()
        self.metrics.sources["nvml"] = lambda: SourceView(up=self.reading.fault is None, read_at=self.now - 1)
        self.metrics.sources["engine_metrics"] = lambda: SourceView(
            up=True, read_at=self.now - 0.1, duration_s=0.004
        )
        for count, kinds in self.metrics.gate(ENGINE).interests:
            self.keeper.observe(count, *kinds)

    def step(self, *events: Event, seconds: float = 0.2) -> None:
        for event in events:
            self.arrived += isinstance(event, Arrived)
            ended = [c.record for c in self.keeper.handle(event) if isinstance(c, LeaseEnded)]
            self.output_tokens += sum(record.output_tokens for record in ended)
        self.now += seconds

    def scrape(self, **changes: object) -> None:
        self.rank = replace(self.rank, at=self.now, **changes)  # type: ignore[arg-type]
        self.step(Scraped((self.rank,), self.now), Ticked())

    def card(self, **changes: object) -> None:
        fields: dict[str, object] = {
            "uuid": "GPU-0",
            "at": self.now,
            "index": 0,
            "name": "NVIDIA H200",
            "total_bytes": 140 * GIB,
            "free_bytes": 10 * GIB,
            "used_bytes": 129 * GIB,
            "reserved_bytes": GIB,
            "temperature_c": 61.0,
            "throttle_reasons": ("sw_power_cap",),
            "ecc_uncorrected_total": 0,
        }
        sample = GpuSample(**(fields | changes))  # type: ignore[arg-type]
        self.reading = GpuReading(samples=(sample,), seconds=0.002)
        self.metrics.card_seen(sample.uuid)
        self.step(GpusRead((sample,)))

    def answers(self, count: int, output: int, *, prompt: int = 64) -> None:
        """``count`` requests that stream ``output`` tokens and end."""
        names = [f"{self.now}-{number}" for number in range(count)]
        for name in names:
            shape = Shape(route="completions", model="tiny", prompts=(prompt,), asked_output=512, stream=True)
            self.step(Arrived(name, shape), seconds=0.01)
        self.step(*(Progressed(name, output) for name in names if name in self.gate.ledger))
        self.step(*(Ended(n, EndReason.FINISHED, output, prompt) for n in names if n in self.gate.ledger))

    def prompts(self, count: int) -> None:
        """Prompts whose first tokens come a second apart, the next one always waiting."""
        shape = Shape(route="completions", model="tiny", prompts=(64,), asked_output=64, stream=True)
        names = [f"prompt-{self.now}-{number}" for number in range(count)]
        for number, name in enumerate(names):
            self.step(Arrived(name, shape), seconds=1.0)
            if number:
                self.step(Progressed(names[number - 1], 1), seconds=0.01)
        self.step(*(Ended(name, EndReason.FINISHED, 1, 64) for name in names if name in self.gate.ledger))

    def looked_at(self, looks: int) -> None:
        """A few answers for so long that as many forecasts come due."""
        names = [f"looked at {n}" for n in range(5)]
        shape = Shape(route="chat", model="tiny", prompts=(64,), asked_output=4000, stream=True)
        self.step(*(Arrived(name, shape) for name in names))
        for _ in range(2 * looks):
            self.step(*(Progressed(name, AHEAD) for name in names), Ticked(), seconds=4.0)
            self.scrape()
        self.step(*(Ended(name, EndReason.FINISHED, 99, 64) for name in names if name in self.gate.ledger))

    def slow_answer(self) -> None:
        """A stream far below the target between tokens."""
        shape = Shape(route="completions", model="tiny", prompts=(64,), asked_output=64, stream=True)
        self.step(Arrived("slow", shape))
        for _ in range(12):
            self.step(Progressed("slow", 1), Ticked(), seconds=0.5)
        self.step(Ended("slow", EndReason.FINISHED, 12, 64))


def fed() -> Fed:
    """Everything that can happen, once or more."""
    made = Fed()
    made.scrape()
    made.step(EngineDescribed(EngineInfo(models=("tiny",), context_tokens=8192)))
    made.card()
    made.answers(4, 100)
    made.answers(60, 30, prompt=1000)  # past the budget: some are refused
    made.step(Arrived("never", Shape(route="completions", model="tiny", prompts=(9000,), stream=True)))
    made.step(KnobsChanged(0.2, Policy.FORECAST))
    made.scrape(preemptions_total=3.0, kv_usage_ratio=0.6)
    made.card(free_bytes=GIB // 4)
    made.step(*([ScrapeFailed(SourceFault.TIMEOUT)] * 3), Ticked(), seconds=60)
    made.scrape(preemptions_total=0.0, kv_usage_ratio=0.1)
    for _ in range(5):
        made.answers(4, 40)
    made.overrides.set(
        "margin", 0.12, ttl_s=600, reason="night", actor="me", now_mono=made.now, now_wall=WALL
    )
    made.looked_at(FEWEST_LOOKS)
    made.prompts(10)
    made.slow_answer()
    _data_plane(made.metrics, (0.00002, 0.0007, 0.004, 0.4, 90.0, 900.0))
    return made


def _data_plane(metrics: Metrics, seconds: Iterable[float]) -> None:
    for reason in ChoiceReason:
        metrics.chosen(ENGINE, reason)
    metrics.cards_failing(SourceFault.HUNG)
    metrics.card_seen("GPU-0")
    for kind_of_event in EventKind:
        metrics.card_event(CardEvent(uuids=("GPU-0",), kind=kind_of_event))
    for outcome in OUTCOMES:
        metrics.request("chat_completions", outcome)
    for kind in UPSTREAM_ERRORS:
        metrics.upstream_error(kind)
    for phase in DISCONNECT_PHASES:
        metrics.client_gone(phase)
    for value in seconds:
        metrics.decided(value)
        metrics.counted(CountMethod.LOCAL, value)
        metrics.first_token(value)
        metrics.next_token(value)
        metrics.ticked(value, value, overrun=value > 1)
