"""What stands in front of the engine in a replay, as seen by the callers: it lets in or sends away.

The gates that people run today, each as good as it gets: no gate, a limit of requests in flight (a proxy's,
or the engine's own ``--max-num-queued-reqs``, which counts waiting and running), and the usual rule of
inference gateways on the KV gauge. None of these says when to come back, so callers fall back on their own
backoff. ``Verdict`` and ``Door`` are the words between a policy and the replay.
"""

from dataclasses import dataclass

from kvctl.core.claim import Prefix
from kvctl.core.telemetry import EngineInfo, GpuSample, RankSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One attempt. ``true_output`` is for the clairvoyant alone. ``cap`` None: the caller sent none."""

    id: str
    tenant: str
    prompt: int
    cap: int | None
    true_output: int
    prefix: Prefix = ()  # how its prompt begins


@dataclass(frozen=True, slots=True)
class Verdict:
    """``retry_after_s`` None: sent away without a hint; ``final``: another try is senseless.

    ``waits``: nothing is decided yet; ``Door.decided`` will tell.
    """

    admitted: bool
    retry_after_s: float | None = None
    final: bool = False
    waits: bool = False


ADMITTED = Verdict(admitted=True)
REFUSED = Verdict(admitted=False)
WAITS = Verdict(admitted=False, waits=True)


class Door:
    """A policy at work. Every method may be left as it is: an open door. ``now`` is seconds."""

    follows_tokens = False
    """Whether ``progressed`` is worth calling."""

    def arrived(self, offer: Offer, now: float) -> Verdict:  # noqa: ARG002 - one signature
        """An attempt: let in, unless a policy knows better."""
        return ADMITTED

    def decided(self) -> list[tuple[str, Verdict]]:
        """What has been decided by now on those that waited."""
        return []

    def progressed(self, request_id: str, tokens: int, now: float) -> None:
        """``tokens`` more of an answer came, the first token by itself."""

    def ended(self, request_id: str, output_tokens: int, now: float, *, finished: bool, broken: bool) -> None:
        """An admitted request is over. ``finished``: by itself; ``broken``: the engine failed."""

    def page(self, sample: RankSample, asked_at: float, now: float) -> None:
        """A metrics page came."""

    def page_failed(self, now: float) -> None:
        """The engine refused the connection."""

    def described(self, info: EngineInfo, now: float) -> None:
        """The engine told its models and context."""

    def card(self, sample: GpuSample, now: float) -> None:
        """The card was read."""

    def tick(self, now: float) -> None:
        """The control loop's beat."""

    def budget(self, now: float) -> int | None:  # noqa: ARG002 - most have none
        """KV tokens that may be in flight, where the policy knows such a thing."""
        return None


class Concurrency(Door):
    """At most ``limit`` requests in flight."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_flight = 0

    def arrived(self, offer: Offer, now: float) -> Verdict:  # noqa: ARG002 - one signature
        """Admit while there is a place."""
        if self._in_flight >= self._limit:
            return REFUSED
        self._in_flight += 1
        return ADMITTED

    def ended(self, request_id: str, output_tokens: int, now: float, *, finished: bool, broken: bool) -> None:  # noqa: ARG002
        """A place is free."""
        self._in_flight -= 1


USAGE_ABOVE = 0.8
WAITING_ABOVE = 5


class KvGauge(Door):
    """The usual rule of an inference gateway: refuse while the last page says full or queueing."""

    def __init__(self) -> None:
        self._full = False

    def arrived(self, offer: Offer, now: float) -> Verdict:  # noqa: ARG002 - one signature
        """As the last page says."""
        return REFUSED if self._full else ADMITTED

    def page(self, sample: RankSample, asked_at: float, now: float) -> None:  # noqa: ARG002 - one signature
        """What the gateway goes by until the next page."""
        self._full = (sample.kv_usage_ratio or 0.0) > USAGE_ABOVE or (sample.waiting or 0) > WAITING_ABOVE
