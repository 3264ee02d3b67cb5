"""The gate itself as a policy: the very objects of the daemon, told what the daemon would tell them."""

from kvctl.core.claim import Claim, Shape
from kvctl.core.demand import Demand
from kvctl.core.events import (
    Admit,
    Arrived,
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
    Ticked,
)
from kvctl.core.gate import Gate
from kvctl.core.guards import Guards
from kvctl.core.outcomes import Decision, EndReason, Policy, SourceFault
from kvctl.core.prefixes import Node
from kvctl.core.sharing import Candidate
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, GpuSample, RankSample
from kvctl.sim.policies import ADMITTED, WAITS, Door, Offer, Verdict
from kvctl.sim.policies_past_future import peak

MODEL = "sim"


class CoreGate(Door):
    """Policies ``forecast`` and ``static``."""

    follows_tokens = True

    def __init__(self, config: GateConfig, gate: Gate | None = None) -> None:
        self.gate = gate or Gate(config)
        self._decided: list[tuple[str, Verdict]] = []

    def arrived(self, offer: Offer, now: float) -> Verdict:
        """What the gate says, as a caller hears it."""
        shape = Shape(
            route="chat",
            model=MODEL,
            prompts=(offer.prompt,),
            asked_output=offer.cap,
            stream=True,
            tenant=offer.tenant,
            prefixes=(offer.prefix,) if offer.prefix else (),
        )
        self._say(Arrived(offer.id, shape), now)
        for at, (request_id, verdict) in enumerate(self._decided):
            if request_id == offer.id:
                del self._decided[at]
                return verdict
        return WAITS

    def decided(self) -> list[tuple[str, Verdict]]:
        """What has been decided by now on those that waited."""
        decided, self._decided = self._decided, []
        return decided

    def _say(self, event: Event, now: float) -> None:
        for command in self.gate.handle(event, now):
            if isinstance(command, Admit):
                self._decided.append((command.request_id, ADMITTED))
            elif isinstance(command, Reject):
                final = command.decision is Decision.REJECT_NEVER
                verdict = Verdict(admitted=False, retry_after_s=command.retry_after_s, final=final)
                self._decided.append((command.request_id, verdict))

    def progressed(self, request_id: str, tokens: int, now: float) -> None:
        """Events of a stream."""
        self._say(Progressed(request_id, tokens), now)

    def ended(self, request_id: str, output_tokens: int, now: float, *, finished: bool, broken: bool) -> None:
        """The lease's end, with the usage figure that the engine sent."""
        reason = EndReason.FINISHED if finished else EndReason.CAPPED
        if broken:
            self._say(Ended(request_id, EndReason.ENGINE_ERROR), now)
        else:
            self._say(Ended(request_id, reason, output_tokens), now)

    def page(self, sample: RankSample, asked_at: float, now: float) -> None:
        """A metrics page."""
        self._say(Scraped((sample,), asked_at=asked_at), now)

    def page_failed(self, now: float) -> None:
        """A refused poll."""
        self._say(ScrapeFailed(SourceFault.REFUSED), now)

    def described(self, info: EngineInfo, now: float) -> None:
        """The engine's models and context."""
        self._say(EngineDescribed(info), now)

    def card(self, sample: GpuSample, now: float) -> None:
        """The card's memory."""
        self._say(GpusRead((sample,)), now)

    def tick(self, now: float) -> None:
        """The beat."""
        self._say(Ticked(), now)

    def budget(self, now: float) -> int:
        """The budget in force."""
        return self.gate.status(now).budget_tokens


class _Oracle(Demand):
    """The demand side with the very peak in place of its forecast: true lengths of what is in flight."""

    def __init__(self, guards: Guards) -> None:
        super().__init__(guards)
        self.outputs: dict[str, int] = {}  # true lengths of what is in flight, and of who asks
        self.asks = ""

    def peak_with(self, asked: Claim, candidate: Candidate, policy: Policy) -> float:
        """The peak that comes, were the request admitted that asks."""
        super().peak_with(asked, candidate, policy)  # what of it is cached, for the guards
        spare = asked.block - 1  # a sequence holds at most this much more than its tokens
        tree = self.ledger.prefixes
        begins = tree.match(candidate.key[0], asked, 0).nodes if len(tree) else []
        batch = [(asked.prompts[0] + spare, min(self.outputs[self.asks], asked.outputs[0]), begins)]
        for lease in self.ledger:
            made = lease.output_per_sequence
            most = min(self.outputs[lease.id], lease.claim.outputs[0])
            begins = [(node, node.size) for node in tree.path(lease.id, 0)]
            batch.append((lease.claim.prompts[0] + made + spare, max(most - made, 0), begins))
        return peak(_apart(batch))


def _apart(batch: list[tuple[int, int, list[tuple[Node, int]]]]) -> list[tuple[int, int]]:
    """(held, left) of each with what several hold counted for the one that stays longest."""
    counted: dict[Node, int] = {}
    apart = []
    for held, left, begins in sorted(batch, key=lambda one: -one[1]):
        own = held
        for node, tokens in begins:
            known = counted.get(node, 0)
            own -= min(tokens, known)
            counted[node] = max(tokens, known)
        apart.append((own, left))
    return apart


class OracleGate(Gate):
    """The gate that knows every length and admits, in order of arrival, whoever fits.

    ``knows`` must tell it the length of an answer before the request arrives.
    """

    def __init__(self, config: GateConfig) -> None:
        super().__init__(config, self._oracular)

    def _oracular(self, guards: Guards) -> Demand:
        self._oracle = _Oracle(guards)
        return self._oracle

    def knows(self, request_id: str, output: int) -> None:
        """The request that arrives next gets so many tokens."""
        self._oracle.outputs[request_id], self._oracle.asks = output, request_id

    def handle(self, event: Event, now: float) -> list[Command]:
        """As the gate does; what is over is forgotten."""
        told = super().handle(event, now)
        for command in told:
            if isinstance(command, Reject):
                self._oracle.outputs.pop(command.request_id, None)
            elif isinstance(command, LeaseEnded):
                del self._oracle.outputs[command.record.lease.id]
        return told


class Clairvoyant(CoreGate):
    """Knows every length: a yardstick, not an optimum."""

    def __init__(self, config: GateConfig) -> None:
        self._knowing = OracleGate(config)
        super().__init__(config, self._knowing)

    def arrived(self, offer: Offer, now: float) -> Verdict:
        """What the gate says who knows the answer's length."""
        self._knowing.knows(offer.id, offer.true_output)
        return super().arrived(offer, now)
