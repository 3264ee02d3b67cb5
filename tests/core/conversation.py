"""A conversation with the gate: events in, commands out, time moved by hand."""

from collections.abc import Sequence
from dataclasses import replace

from kvctl.core.claim import Shape
from kvctl.core.events import (
    Admit,
    Arrived,
    BudgetChanged,
    Command,
    Ended,
    EngineDescribed,
    Event,
    GpusRead,
    LeaseEnded,
    Progressed,
    Reject,
    Scraped,
    ScrapeFailed,
    StateChanged,
    Ticked,
)
from kvctl.core.gate import Gate
from kvctl.core.outcomes import Decision, EndReason, EngineState, RejectReason, SourceFault
from kvctl.core.status import GateStatus
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, GpuSample, RankSample

GIB = 1 << 30
MODEL = "tiny"

PAGE = RankSample(
    rank="0",
    at=0.0,
    model=MODEL,
    kv_usage_ratio=0.0,
    running=0,
    waiting=0,
    preemptions_total=0.0,
    prompt_tokens_total=0.0,
    generation_tokens_total=0.0,
    awake=True,
    block_size=16,
    capacity_tokens=48_000,
    capacity_exact=True,
    started_at=1000.0,
)


def shape(
    prompt: int | Sequence[int] = 100,
    output: int | None = 100,
    *,
    n: int = 1,
    stream: bool = True,
    exact: bool = True,
    tenant: str = "",
    default: int | None = None,
) -> Shape:
    """A chat request."""
    prompts = (prompt,) if isinstance(prompt, int) else tuple(prompt)
    return Shape(
        route="chat",
        model=MODEL,
        prompts=prompts,
        n=n,
        asked_output=output,
        default_output=default,
        stream=stream,
        exact=exact,
        tenant=tenant,
    )


class Conversation:
    """One gate; ``now`` is its clock. Every command is kept in ``told``."""

    def __init__(self, config: GateConfig | None = None, *, context: int | None = 32_768) -> None:
        self.gate = Gate(config or GateConfig())
        self.now = 100.0
        self.told: list[Command] = []
        self.last_page: tuple[RankSample, ...] = (PAGE,)
        self._context = context
        self._asked = 0

    def up(self, *pages: RankSample) -> "Conversation":
        """The engine is seen for the first time."""
        self.say(EngineDescribed(EngineInfo(models=(MODEL,), context_tokens=self._context)))
        self.page(*(pages or (PAGE,)))
        return self

    def say(self, event: Event) -> list[Command]:
        commands = self.gate.handle(event, self.now)
        self.told += commands
        return commands

    def page(self, *samples: RankSample, late_s: float = 0.0, **fields: object) -> list[Command]:
        """A metrics page; ``fields`` change the first rank of the last one."""
        pages = samples or self.last_page
        pages = (replace(pages[0], **fields), *pages[1:])  # type: ignore[arg-type]
        self.last_page = tuple(replace(page, at=self.now) for page in pages)
        return self.say(Scraped(self.last_page, self.now - late_s))

    def no_page(self, fault: SourceFault = SourceFault.TIMEOUT) -> list[Command]:
        return self.say(ScrapeFailed(fault))

    def cards(self, *free_bytes: int | None) -> list[Command]:
        cards = (
            GpuSample(uuid=f"GPU-{i}", at=self.now, total_bytes=80 * GIB, free_bytes=free)
            for i, free in enumerate(free_bytes)
        )
        return self.say(GpusRead(tuple(cards)))

    def tick(self, seconds: float = 0.2) -> list[Command]:
        """Time passes, then a tick."""
        self.now += seconds
        return self.say(Ticked())

    def live(self, seconds: float, *, moving: bool = False) -> None:
        """Time passes with ticks and fresh pages at 5 Hz; ``moving``: the engine's token counter grows."""
        for _ in range(round(seconds * 5)):
            self.tick()
            before = self.last_page[0].generation_tokens_total
            grown = before + 1.0 if moving and before is not None else before
            self.page(generation_tokens_total=grown)

    def starve(self, seconds: float, fault: SourceFault = SourceFault.TIMEOUT) -> None:
        """Time passes with ticks and failing polls."""
        for _ in range(round(seconds * 5)):
            self.tick()
            self.no_page(fault)

    def ask(self, request: Shape | None = None, request_id: str | None = None) -> Admit | Reject:
        """A request arrives; its verdict."""
        self._asked += 1
        wanted = request_id or f"r{self._asked}"
        commands = self.say(Arrived(wanted, request or shape()))
        verdicts = [command for command in commands if isinstance(command, Admit | Reject)]
        assert len(verdicts) == 1
        assert verdicts[0].request_id == wanted
        return verdicts[0]

    def admit(self, request: Shape | None = None) -> str:
        """A request that must get in; its id."""
        verdict = self.ask(request)
        assert isinstance(verdict, Admit), verdict
        return verdict.request_id

    def refuse(self, request: Shape | None = None) -> Reject:
        """A request that must not get in."""
        verdict = self.ask(request)
        assert isinstance(verdict, Reject), verdict
        return verdict

    def admitted_of(self, count: int, request: Shape) -> int:
        """How many of ``count`` equal requests get in."""
        return sum(isinstance(self.ask(request), Admit) for _ in range(count))

    def tokens(self, request_id: str, tokens: int) -> list[Command]:
        return self.say(Progressed(request_id, tokens))

    def end(
        self, request_id: str, reason: EndReason = EndReason.FINISHED, output: int | None = None
    ) -> LeaseEnded:
        (ended,) = self.say(Ended(request_id, reason, output_tokens=output))
        assert isinstance(ended, LeaseEnded)
        return ended

    @property
    def status(self) -> GateStatus:
        return self.gate.status(self.now)

    @property
    def state(self) -> EngineState:
        return self.gate.status(self.now).state

    @property
    def budget(self) -> int:
        return self.gate.status(self.now).budget_tokens

    def changes(self) -> list[BudgetChanged]:
        return [command for command in self.told if isinstance(command, BudgetChanged)]

    def states(self) -> list[EngineState]:
        return [command.after for command in self.told if isinstance(command, StateChanged)]


def is_refused(verdict: Reject, decision: Decision, reason: RejectReason) -> bool:
    return verdict.decision is decision and verdict.reason is reason
