"""The JSON behind the page. Its keys are described in docs/operations.md.

No prompt, no caller's name or id: whoever may read the metrics may read this.
Law 3: what is not known is null.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvctl.admin import documents
from kvctl.admin.port import DaemonStatus
from kvctl.core.status import GateStatus
from kvctl.web.recent import Recent, Sample, used_tokens

Document = dict[str, Any]

_ENGINE_KEYS = (
    "state",
    "policy",
    "draining",
    "capacity_tokens",
    "capacity_known",
    "budget_tokens",
    "budget_reason",
    "forecast_peak_tokens",
    "headroom_tokens",
    "held_tokens",
    "unattributed_tokens",
    "margin_ratio",
    "pressure",
    "binding_limit",
    "leases",
    "enforce_ratio",
    "queue",
    "sentence",
)
_RANK_KEYS = ("rank", "age_s", "capacity_tokens", "kv_usage_ratio", "running", "waiting", "preemptions_total")
_GPU_KEYS = (
    "index",
    "name",
    "total_bytes",
    "free_bytes",
    "temperature_c",
    "throttle_reasons",
    "lost",
    "age_s",
)


def page(daemon: DaemonStatus, overrides: Document, recent: Recent, wall: float) -> Document:
    """Everything that the page shows at one moment. ``wall`` is seconds since the epoch, of now.

    ``daemon`` may be of a moment ago: what was refused since then is shown at its own time.
    """
    shift = wall - recent.now()
    shown = documents.status(daemon, overrides)
    admitted, refused = recent.last_minute()
    return {
        "time": wall,
        **{key: shown[key] for key in ("version", "mode", "sentence", "uptime_s", "gpu_fault")},
        "engines": {name: _engine(gate) for name, gate in daemon.engines.items()},
        "gpus": [{key: gpu[key] for key in _GPU_KEYS} for gpu in shown["gpus"]],
        "overrides": overrides["active"],
        "drains": overrides["drains"],
        "admitted_last_minute": admitted,
        "refused_last_minute": refused,
        "refusals": [documents.plain(each) | {"at": each.at + shift} for each in recent.refusals()],
    }


def _engine(gate: GateStatus) -> Document:
    shown = documents.engine(gate)
    ranks = [{key: rank[key] for key in _RANK_KEYS} for rank in shown["ranks"]]
    used = documents.plain(used_tokens(gate))
    return {key: shown[key] for key in _ENGINE_KEYS} | {"used_tokens": used, "ranks": ranks}


def history(engines: Mapping[str, object], recent: Recent, shift: float) -> Document:
    """The curves so far, by engine; ``shift`` turns monotonic into Unix time."""
    return {name: [_point(each, shift) for each in recent.curve(name)] for name in engines}


def _point(sample: Sample, shift: float) -> Document:
    point: Document = documents.plain(asdict(sample))
    return point | {"at": round(sample.at + shift, 3)}
