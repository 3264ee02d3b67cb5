"""The commands of one engine's gate, counted.

Each request brings an admission and an end, so what they count is looked up once, and not per request.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvctl.core.events import (
    Admit,
    BudgetChanged,
    Command,
    EngineRestarted,
    LeaseEnded,
    LeftQueue,
    Queued,
    Reject,
    StateChanged,
)
from kvctl.core.outcomes import Decision, EndReason, Priority
from kvctl.metrics.instruments import Counter, Histogram

_ENDED_BY_ITSELF = frozenset({EndReason.FINISHED, EndReason.CAPPED})


class GateCounts:
    """One engine's. ``interests``: what counts the commands of each kind."""

    def __init__(
        self, engine: str, counters: Mapping[str, Counter], histograms: Mapping[str, Histogram]
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._histograms = histograms
        self._count_admission = counters["kvctl_admissions_total"].adder(engine)
        ends = counters["kvctl_leases_ended_total"]
        self._count_end = {reason: ends.adder(engine, reason) for reason in EndReason}
        self._lease_seconds = histograms["kvctl_lease_seconds"].observer(engine)
        self._output_tokens = histograms["kvctl_output_tokens"].observer(engine)
        self._claim_error = histograms["kvctl_claim_error_ratio"].observer(engine)
        counts: Mapping[type[Command], Callable[[Any], None]] = {
            Admit: self._admitted,
            Queued: self._queued,
            LeftQueue: lambda command: self._waited(command.priority, command.waited_s),
            Reject: self._rejected,
            LeaseEnded: self._lease_ended,
            BudgetChanged: self._budget_changed,
            StateChanged: self._state_changed,
            EngineRestarted: lambda _: counters["kvctl_engine_restarts_total"].add(engine),
        }
        self.interests = [(count, (kind,)) for kind, count in counts.items()]

    def _admitted(self, command: Admit) -> None:
        self._count_admission()
        if command.shadow is not None:
            self._counters["kvctl_shadow_rejections_total"].add(self._engine, command.shadow)
        if command.waited_s is not None:
            self._waited(command.priority, command.waited_s)
        if command.tenant:
            self._of_tenant(command.tenant, Decision.ADMIT)

    def _queued(self, command: Queued) -> None:
        self._counters["kvctl_queued_total"].add(self._engine, command.reason)

    def _state_changed(self, command: StateChanged) -> None:
        self._counters["kvctl_engine_state_changes_total"].add(self._engine, command.after)

    def _waited(self, priority: Priority, waited_s: float) -> None:
        self._histograms["kvctl_queue_wait_seconds"].observe(waited_s, self._engine, priority)

    def _of_tenant(self, tenant: str, decision: Decision) -> None:
        self._counters["kvctl_tenant_decisions_total"].add(self._engine, tenant, decision)

    def _rejected(self, command: Reject) -> None:
        if command.waited_s is not None:
            self._waited(command.priority, command.waited_s)
        if command.tenant:
            self._of_tenant(command.tenant, Decision.REJECT_LATER)
        self._counters["kvctl_rejections_total"].add(self._engine, command.reason)
        if command.retry_after_s is not None:
            self._histograms["kvctl_retry_after_seconds"].observe(command.retry_after_s, self._engine)

    def _lease_ended(self, command: LeaseEnded) -> None:
        record = command.record
        lease, reason = record.lease, record.reason
        self._count_end[reason]()
        self._lease_seconds(record.at - lease.admitted_at)
        if reason in _ENDED_BY_ITSELF:
            self._output_tokens(record.output_tokens)
            claimed = lease.claim.tokens
            if claimed:
                self._claim_error(record.held_tokens / claimed)

    def _budget_changed(self, command: BudgetChanged) -> None:
        moved = command.after_tokens - command.before_tokens
        direction = "up" if moved > 0 else "down"
        self._counters["kvctl_budget_changes_total"].add(self._engine, direction, command.reason)
