"""A data-parallel engine gated rank by rank: one gate and one ledger each, requests pinned to their rank.

A request lives in one rank, with one rank's pool. Where the engine takes a pin (``X-data-parallel-rank``),
each rank has its own forecast and its own budget, and the request goes where most is left. Where it takes
none, one gate sees the ranks as one pool, and the pressure term ``ranks`` holds its budget down as far as
they fill unevenly: the budget is spent when the fullest rank is.

Law 1: the gate of a rank that is gone gets nothing new, but still ends the leases that it opened. Requests
that waited for it are refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvctl.control.gatekeeper import Gatekeeper
from kvctl.core.events import (
    CapacityPlanned,
    DrainChanged,
    EngineDescribed,
    Event,
    GpusRead,
    Reconfigured,
    Scraped,
)
from kvctl.core.status import GateStatus, RankStatus
from kvctl.core.telemetry import RankSample
from kvctl.proxy.seams import Lane

_LASTING = (EngineDescribed, CapacityPlanned, GpusRead, DrainChanged, Reconfigured)


class RankLanes:
    """The gates of one engine. ``lanes`` has the first gate always first, and is changed in place.

    Args:
        first: The gate of the whole engine, and of its first rank where there are several.
        another: Makes the gate of a further rank, which is then told what the first one was told.
        pins: Whether a request can be pinned to a rank now.
        changed: Called when the set of gates has changed.
    """

    def __init__(
        self,
        first: Gatekeeper,
        another: Callable[[], Gatekeeper],
        pins: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        self.lanes = [Lane(first)]
        self._first = first
        self._another = another
        self._pins = pins
        self._changed = changed
        self._told: dict[type, Event] = {}
        self._by_rank: dict[str, Lane] = {}

    @property
    def keepers(self) -> list[Gatekeeper]:
        """The gates that requests go through now."""
        return [lane.keeper for lane in self.lanes]

    def handle(self, event: Event) -> None:
        """Hand an event of the engine to the gates: to each its part of a page, and everything else whole."""
        if isinstance(event, Scraped):
            self._scraped(event)
        else:
            if isinstance(event, _LASTING):
                self._told[type(event)] = event
            for lane in self.lanes:
                lane.keeper.handle(event)

    def _scraped(self, event: Scraped) -> None:
        samples = event.samples
        if len(samples) == 1 or any(sample.unsupported for sample in samples) or not self._pins():
            self._as_one()
            self._first.handle(event)
            return
        self._split(samples)
        for lane, sample in zip(self.lanes, samples, strict=True):
            lane.keeper.handle(Scraped((sample,), event.asked_at))

    def _as_one(self) -> None:
        if len(self.lanes) > 1:
            self._by_rank.clear()
            self._take([replace(self.lanes[0], rank=None)])

    def _split(self, samples: Sequence[RankSample]) -> None:
        ranks = [sample.rank for sample in samples]
        if [lane.rank for lane in self.lanes] == ranks:
            return
        before = self._by_rank
        lanes = [Lane(self._first, ranks[0], self.lanes[0].warm)]
        lanes += [before.get(rank) or Lane(self._made(), rank) for rank in ranks[1:]]
        self._by_rank = dict(zip(ranks[1:], lanes[1:], strict=True))
        self._take(lanes)

    def _take(self, lanes: Sequence[Lane]) -> None:
        before = self.keepers
        self.lanes[:] = lanes
        left = self.keepers
        for keeper in before:
            if keeper not in left:
                keeper.retire()
        self._changed()

    def _made(self) -> Gatekeeper:
        keeper = self._another()
        for event in self._told.values():
            keeper.handle(event)
        return keeper

    def forget_prefixes(self, keeper: Gatekeeper) -> None:
        """The engine behind this gate restarted."""
        for lane in self.lanes:
            if lane.keeper is keeper:
                lane.warm.forget()


def whole(gates: Sequence[GateStatus]) -> GateStatus:
    """The gates of an engine's ranks as one: sums, and the rank that is nearest to its limit for the rest."""
    if len(gates) == 1:
        return gates[0]
    tightest = min(gates, key=lambda gate: gate.headroom_tokens / max(gate.budget_tokens, 1))
    budget, peak = sum(g.budget_tokens for g in gates), sum(g.forecast_peak_tokens for g in gates)
    rates = [g.drain_rate_tokens_per_s for g in gates if g.drain_rate_tokens_per_s is not None]
    return replace(
        tightest,
        capacity_tokens=sum(g.capacity_tokens for g in gates),
        budget_tokens=budget,
        forecast_peak_tokens=peak,
        held_tokens=sum(g.held_tokens for g in gates),
        claimed_tokens=sum(g.claimed_tokens for g in gates),
        unattributed_tokens=sum(g.unattributed_tokens for g in gates),
        shared_prefix_tokens=sum(g.shared_prefix_tokens for g in gates),
        leases=sum(g.leases for g in gates),
        drain_rate_tokens_per_s=sum(rates) if rates else None,
        ranks=tuple(_with_gate(rank, gate) for gate in gates for rank in gate.ranks),
        sentence=(
            f"{len(gates)} ranks, budget {budget:,} KV tokens, forecast peak {round(peak):,}, "
            f"{sum(g.leases for g in gates)} in flight; the tightest: {tightest.sentence}"
        ),
    )


def _with_gate(rank: RankStatus, gate: GateStatus) -> RankStatus:
    return replace(
        rank,
        budget_tokens=gate.budget_tokens,
        forecast_peak_tokens=gate.forecast_peak_tokens,
        leases=gate.leases,
    )
