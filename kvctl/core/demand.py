"""The demand side of the gate: the leases, how fast they advance, and what they will really hold.

Law 1: one lease, ended once: ``Ledger.end`` is behind ``ended``, the only way out.
Law 10: the request in hand beats the estimate: what a lease has shown conditions its curve.

What may be in flight is the supply side; the gate puts the two together.
"""

from kvctl.core.claim import Claim
from kvctl.core.curves import Curve
from kvctl.core.events import Ended
from kvctl.core.forecast import Forecast
from kvctl.core.frailty import FORGOTTEN, Frailty
from kvctl.core.guards import Guards
from kvctl.core.ledger import EndedLease, Lease, Ledger
from kvctl.core.outcomes import EndReason, Policy
from kvctl.core.progress import Pace
from kvctl.core.residuals import Residuals
from kvctl.core.sharing import Candidate, Sharing
from kvctl.core.survival import Key, SurvivalModel, Table
from kvctl.core.telemetry import RankSample

NATURAL = frozenset({EndReason.FINISHED, EndReason.CAPPED})
_FINISHED = EndReason.FINISHED  # looked up once


class Demand:
    """Ledger, survival, forecast, pace and guards of one engine, kept in step."""

    def __init__(self, guards: Guards) -> None:
        self.ledger = Ledger()
        self.guards = guards
        self._survival = SurvivalModel()
        self._forecast = Forecast()
        self._sharing = Sharing(self.ledger, self._forecast, self._survival.table)
        self._pace = Pace()
        self.residuals = Residuals()
        self.frailty = Frailty()

    # --- leases -------------------------------------------------------------------------------------

    def curve(self, asked: Claim, key: Key) -> Candidate:
        """What a request of class ``key`` would hold, and what it would add to what is in flight."""
        return self._sharing.candidate(asked, key)

    def open(self, lease: Lease, forecast: Candidate | None, now: float) -> None:
        """Charge a lease, with the curve by which it was judged; None: it was judged by ``most_with``."""
        sharing = self._sharing
        if forecast is None and lease.claim.prefixes and sharing.must_draw:
            forecast = sharing.candidate(lease.claim, lease.key)
        if forecast is not None:
            lease.cached_tokens = sharing.weigh(forecast, lease.claim).cached
        self.ledger.open(lease)
        self.guards.prefill.admitted(lease, now)
        if forecast is None:
            sharing.opened_unseen(lease)
        else:
            sharing.opened(lease, forecast)

    def share(self, *, sharing: bool) -> None:
        """Assume from now on that the engine keeps common prefixes once, or that it does not."""
        if self.ledger.share(sharing=sharing):
            self._sharing.rebuild()

    def progressed(self, lease: Lease, events: int, now: float) -> float:
        """``events`` more token events of a stream; returns the tokens that they stand for."""
        if lease.first_token_at is None:
            lease.first_token_at = now
            self._pace.first_token(now - lease.admitted_at)
            self.guards.prefill.first_token(lease, now)
            if self.ledger.sharing:
                self.ledger.prefixes.computed(lease.id, lease.claim)
        lease.last_token_at = now
        pace = self._pace
        pace.events += events
        tokens = events * pace.tokens_per_event
        lease.output_tokens += tokens
        return tokens

    def ended(self, event: Ended, now: float) -> tuple[EndedLease, float]:
        """Take a lease off; returns its record, and by how many KV tokens the forecast peak fell."""
        record = self.ledger.end(
            event.request_id,
            event.reason,
            now,
            output_tokens=event.output_tokens,
            prompt_tokens=event.prompt_tokens,
        )
        fell = self._sharing.ended(record.lease)
        self.guards.ended(record.lease, now)
        self._learn_length(record, counted=event.output_tokens is not None)
        return record, fell

    def _learn_length(self, record: EndedLease, *, counted: bool) -> None:
        """Add the answer's length to the history.

        A length that nobody counted (no usage, and a stream in an unknown form) is a guess: the answer was at
        risk that far, but does not count as one of that length.
        """
        lease, reason = record.lease, record.reason
        by_itself = reason is _FINISHED
        if lease.streaming:
            self.frailty.ended(lease, self._table, finished=by_itself)
            counted = counted or lease.first_token_at is not None
        finished = by_itself and counted
        if finished or record.output_tokens > 0:
            allowed = lease.longest if counted and reason in NATURAL else None
            self._survival.ended(lease.key, lease.output_per_sequence, finished=finished, allowed=allowed)

    # --- telemetry and time -------------------------------------------------------------------------

    def page(
        self, samples: tuple[RankSample, ...], generated: float | None, usage_ratio: float | None, now: float
    ) -> None:
        """A metrics page: ``generated`` output tokens since the last, ``usage_ratio`` of the pool in use."""
        counts = [s.running for s in samples if s.running is not None]
        running = sum(counts) if counts else None
        if running is None or running > self.ledger.sequences:
            self._pace.others_run()
        self._pace.page(generated, running, now)
        capacity = [s.waiting_for_capacity for s in samples if s.waiting_for_capacity is not None]
        self.guards.slots.page(running, sum(capacity), usage_ratio, self.ledger.without_token(), now)
        self._survival.believe([s.output_lengths for s in samples if s.output_lengths is not None])

    def tick(self, now: float) -> None:
        """Time passes: silent leases advance, the forecast is rebuilt, the guards adjust."""
        self._advance_silent(now)
        self._compare_with_history(now)
        self._rebuild_forecast()
        self.residuals.tick(self.ledger, self._forecast.sum, now, self._forecast.rho)
        self.guards.decode.adjust(self.ledger, self.ledger.sequences, now)

    def _compare_with_history(self, now: float) -> None:
        self.frailty.tick(self.ledger, self._table, now)
        self._survival.factor = self.frailty.factor
        if self.frailty.outdated(now):
            self._survival.forget(FORGOTTEN)

    def _table(self, lease: Lease) -> Table:
        return self._survival.table(lease.key, lease.longest)

    def _advance_silent(self, now: float) -> None:
        """Non-streaming leases show nothing until their end: they advance at the measured pace."""
        for lease in self.ledger:
            if lease.streaming:
                continue
            self._pace.others_run()
            most = sum(lease.claim.outputs) * lease.claim.n
            made = self._pace.silent_output(now - lease.admitted_at) * lease.claim.sequences
            lease.output_tokens = min(made, float(most))
            if made >= 1.0 and lease.first_token_at is None:
                lease.first_token_at = now
                self.guards.prefill.first_token(lease, now)
                self.ledger.prefixes.computed(lease.id, lease.claim)

    def _rebuild_forecast(self) -> None:
        in_flight: dict[Key, list[int]] = {}
        for lease in self.ledger:
            in_flight.setdefault(lease.key, []).append(lease.output_per_sequence)
        self._survival.refresh(in_flight)
        self._forecast.rho = self._survival.correlation()
        self._sharing.tick()

    # --- readings -----------------------------------------------------------------------------------

    def in_flight(self) -> Curve:
        """The curve of all that is in flight."""
        self._sharing.draw()
        return self._forecast.sum

    @property
    def rho(self) -> float:
        """How far the lengths of what is in flight vary together."""
        return self._forecast.rho

    @property
    def seconds_per_step(self) -> float:
        """Seconds that one decode step of a sequence takes."""
        return 1.0 / max(self._pace.tokens_per_s, 0.1)

    @property
    def first_token_s(self) -> float:
        """Seconds from an admission to its first token, of late."""
        return self._pace.first_token_s

    def peak(self, policy: Policy) -> float:
        """Forecast peak of what is in flight (policy static: its claims), KV tokens."""
        own = float(self.ledger.claimed_tokens)
        return own if policy is Policy.STATIC else min(own, self._sharing.peak())

    def peak_with(self, asked: Claim, candidate: Candidate, policy: Policy) -> float:
        """The same, were ``candidate`` admitted too.

        With few leases, mean and spread may pass the worst case, which is then what holds.
        """
        self._sharing.draw()  # what it shares is read off the tree, whose curves may be out of date
        self._sharing.weigh(candidate, asked)
        own = float(self.ledger.claimed_tokens + asked.tokens - candidate.saved)
        return own if policy is Policy.STATIC else min(own, self._sharing.peak_with(candidate))

    def most_with(self, asked: Claim, key: Key) -> float:
        """An upper bound of the forecast peak, were such a request admitted too; looks at no curve."""
        own = self.ledger.claimed_tokens + asked.tokens
        return self._sharing.newcomers.peak_with(asked, key, own)

    def cached(self, asked: Claim, key: Key) -> int:
        """Prompt tokens of a request that the engine has already computed for others in flight."""
        return self._sharing.cached(asked, key)

    def engine_owes(self, *, looks_empty: bool) -> bool:
        """Whether the engine has work of ours: otherwise standing still does not mean that it is wedged.

        A stream whose client stopped reading stays open long after the engine is done with it. Then the
        gauges are empty and every stream has had its first token.
        """
        if looks_empty:
            return any(lease.prefilling or not lease.streaming for lease in self.ledger)
        return len(self.ledger) > 0
