"""The gate itself as a policy: the very objects of the daemon, told what the daemon would tell them."""

from kvctl.core.claim import Claim, Shape
from kvctl.core.events import (
    Admit,
    Arrived,
    Ended,
    EngineDescribed,
    GpusRead,
    Progressed,
    Reject,
    Scraped,
    ScrapeFailed,
    Ticked,
)
from kvctl.core.forecast import Curve
from kvctl.core.gate import Gate
from kvctl.core.outcomes import Decision, EndReason, SourceFault
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, GpuSample, RankSample
from kvctl.sim.policies import ADMITTED, Door, Offer, Verdict
from kvctl.sim.policies_past_future import peak

MODEL = "sim"


class CoreGate(Door):
    """Policies ``forecast`` and ``static``."""

    follows_tokens = True

    def __init__(self, config: GateConfig) -> None:
        self.gate = self._make(config)

    def _make(self, config: GateConfig) -> Gate:
        return Gate(config)

    def arrived(self, offer: Offer, now: float) -> Verdict:
        """What the gate says, as a caller hears it."""
        shape = Shape(
            route="chat",
            model=MODEL,
            prompts=(offer.prompt,),
            asked_output=offer.cap,
            stream=True,
            tenant=offer.tenant,
        )
        for command in self.gate.handle(Arrived(offer.id, shape), now):
            if isinstance(command, Admit):
                return ADMITTED
            if isinstance(command, Reject):
                final = command.decision is Decision.REJECT_NEVER
                return Verdict(admitted=False, retry_after_s=command.retry_after_s, final=final)
        raise AssertionError("the gate answers every arrival")

    def progressed(self, request_id: str, tokens: int, now: float) -> None:
        """Events of a stream."""
        self.gate.handle(Progressed(request_id, tokens), now)

    def ended(self, request_id: str, output_tokens: int, now: float, *, finished: bool, broken: bool) -> None:
        """The lease's end, with the usage figure that the engine sent."""
        reason = EndReason.FINISHED if finished else EndReason.CAPPED
        if broken:
            self.gate.handle(Ended(request_id, EndReason.ENGINE_ERROR), now)
        else:
            self.gate.handle(Ended(request_id, reason, output_tokens), now)

    def page(self, sample: RankSample, asked_at: float, now: float) -> None:
        """A metrics page."""
        self.gate.handle(Scraped((sample,), asked_at=asked_at), now)

    def page_failed(self, now: float) -> None:
        """A refused poll."""
        self.gate.handle(ScrapeFailed(SourceFault.REFUSED), now)

    def described(self, info: EngineInfo, now: float) -> None:
        """The engine's models and context."""
        self.gate.handle(EngineDescribed(info), now)

    def card(self, sample: GpuSample, now: float) -> None:
        """The card's memory."""
        self.gate.handle(GpusRead((sample,)), now)

    def tick(self, now: float) -> None:
        """The beat."""
        self.gate.handle(Ticked(), now)

    def budget(self, now: float) -> int:
        """The budget in force."""
        return self.gate.status(now).budget_tokens


class _Oracle(Gate):
    """The gate with the very peak in place of its forecast; budget, guards and hints are its own."""

    def __init__(self, config: GateConfig) -> None:
        super().__init__(config)
        self.outputs: dict[str, int] = {}  # true lengths of what is in flight, and of who asks
        self.asks = ""

    def _peak_with(self, asked: Claim, candidate: Curve) -> float:  # noqa: ARG002 - the gate's signature
        spare = asked.block - 1  # a sequence holds at most this much more than its tokens
        batch = [(asked.prompts[0] + spare, min(self.outputs[self.asks], asked.outputs[0]))]
        for lease in self.ledger:
            made = lease.output_per_sequence
            most = min(self.outputs[lease.id], lease.claim.outputs[0])
            batch.append((lease.claim.prompts[0] + made + spare, max(most - made, 0)))
        return peak(batch) + self._supply.unattributed


class Clairvoyant(CoreGate):
    """Knows every length and admits, in order of arrival, whoever fits: a yardstick, not an optimum."""

    def _make(self, config: GateConfig) -> Gate:
        self._oracle = _Oracle(config)
        return self._oracle

    def arrived(self, offer: Offer, now: float) -> Verdict:
        """What the gate says who knows the answer's length."""
        self._oracle.outputs[offer.id], self._oracle.asks = offer.true_output, offer.id
        verdict = super().arrived(offer, now)
        if not verdict.admitted:
            del self._oracle.outputs[offer.id]
        return verdict

    def ended(self, request_id: str, output_tokens: int, now: float, *, finished: bool, broken: bool) -> None:
        """The lease's end."""
        super().ended(request_id, output_tokens, now, finished=finished, broken=broken)
        del self._oracle.outputs[request_id]
