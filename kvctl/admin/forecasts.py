"""What a change of a knob would do, before it is made: ``?dry_run=1``.

Before and after per engine come from the gate's own figures; what the last decisions would have been comes
from the decision log (``core/hindsight.py``, which says in what it is an approximation).
"""

from collections.abc import Callable, Sequence
from typing import Any

from kvctl.admin import documents
from kvctl.admin.port import DaemonStatus
from kvctl.core.decisions import Scales, Story
from kvctl.core.hindsight import look_back, with_margin, with_policy
from kvctl.core.outcomes import Policy
from kvctl.core.overrides import Knob, Value
from kvctl.core.status import GateStatus

LOOK_BACK_S = 300.0

Document = dict[str, Any]


def dry_run(
    change: tuple[Knob, Value | None, Value], status: DaemonStatus, stories: Sequence[Story], revision: int
) -> Document:
    """The answer of a dry run of (knob, old, new); ``last`` is null where the log cannot tell.

    ``stories`` are those of the last ``LOOK_BACK_S``, the latest first. Slow with many of them.
    """
    knob, old, new = change
    budget = _budget(knob, new)
    seen = None
    if budget is not None:
        seen = documents.plain(look_back(stories, LOOK_BACK_S, budget))
    engines = {name: _moved(knob, new, gate) for name, gate in status.engines.items()}
    return {
        "dry_run": True,
        "knob": knob.value,
        "old": documents.plain(old),
        "new": documents.plain(new),
        "revision": revision,
        "engines": engines,
        "last": seen,
    }


def _budget(knob: Knob, new: Value) -> Callable[[Scales], float | None] | None:
    if knob is Knob.MARGIN:
        return with_margin(float(new))
    if knob is Knob.POLICY:
        return with_policy(Policy(str(new)))
    return None


def _moved(knob: Knob, new: Value, gate: GateStatus) -> Document:
    """An engine's budget and headroom, now and then; null: not known before it is tried."""
    after = None
    if knob is Knob.MARGIN:
        pressure = min(gate.pressure.values(), default=1.0)
        after = int(gate.capacity_tokens * (1.0 - float(new)) * pressure)
    elif knob is Knob.POLICY:
        after = gate.budget_tokens
    headroom = None if after is None else int(after - gate.forecast_peak_tokens)
    return {
        "before": {"budget_tokens": gate.budget_tokens, "headroom_tokens": gate.headroom_tokens},
        "after": {"budget_tokens": after, "headroom_tokens": headroom},
    }
