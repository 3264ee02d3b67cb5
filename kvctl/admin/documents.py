"""The JSON documents of the admin API. Their keys are described in docs/admin-api.md and are stable.

Law 3: unknown is not zero. What is not known is null, as is a number that JSON cannot express.
"""

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any

from kvctl import __version__
from kvctl.admin.port import DaemonStatus
from kvctl.core.overrides import Override, Overrides
from kvctl.core.status import GateStatus
from kvctl.core.telemetry import GpuSample

Document = dict[str, Any]


def plain(value: object) -> Any:
    """JSON values of anything frozen: dataclasses, mappings, enums, tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int):
        return value
    if dataclasses.is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | AbstractSet):
        return [plain(item) for item in value]
    raise TypeError(f"no JSON form of {type(value).__name__}")


def status(daemon: DaemonStatus, overrides: Document) -> Document:
    """The whole daemon in one document."""
    return {
        "version": __version__,
        "mode": mode(daemon),
        "sentence": daemon.sentence,
        "uptime_s": round(daemon.now - daemon.started_at, 3),
        "engines": {name: engine(gate) for name, gate in daemon.engines.items()},
        "gpus": [gpu(sample, daemon.now) for sample in daemon.gpus],
        "gpu_fault": plain(daemon.gpu_fault),
        "counting": plain(daemon.counting),
        "overrides": overrides,
    }


def mode(daemon: DaemonStatus) -> str:
    """Whether on-call lets traffic in, in the words of the metric ``kvctl_mode``."""
    if daemon.draining:
        return "draining"
    return "bypass" if daemon.bypass else "active"


def engine(gate: GateStatus) -> Document:
    """One engine's gate, without ``at``, which is of this process's own clock and means nothing outside."""
    shown: Document = plain(gate)
    del shown["at"]
    return shown | {"headroom_tokens": gate.headroom_tokens}


def engines(daemon: DaemonStatus) -> Document:
    """Every engine's gate."""
    return {"engines": {name: engine(gate) for name, gate in daemon.engines.items()}}


def gpu(sample: GpuSample, now: float) -> Document:
    """One card, with the age of its reading."""
    shown: Document = plain(sample)
    del shown["at"]
    return shown | {"age_s": round(now - sample.at, 3)}


def gpus(daemon: DaemonStatus) -> Document:
    """Every card, with the engines that it counts for and the processes that compute on it."""
    details = daemon.cards

    def around(uuid: str) -> Document:
        engines = [name for name, cards in details.engines.items() if uuid in cards]
        return {"engines": engines, "processes": plain(details.processes.get(uuid))}

    return {
        "gpus": [gpu(sample, daemon.now) | around(sample.uuid) for sample in daemon.gpus],
        "gpu_fault": plain(daemon.gpu_fault),
        "driver": details.driver,
        "released_s": None if details.released_s is None else round(details.released_s, 3),
    }


_BUDGET_KEYS = (
    "policy",
    "capacity_tokens",
    "capacity_known",
    "capacity_source",
    "margin_ratio",
    "pressure",
    "budget_tokens",
    "budget_reason",
    "forecast_peak_tokens",
    "headroom_tokens",
    "held_tokens",
    "claimed_tokens",
    "unattributed_tokens",
    "shared_prefix_tokens",
    "leases",
)


def budget(daemon: DaemonStatus) -> Document:
    """How each engine's budget comes about, from capacity to headroom."""
    engines = {name: engine(gate) for name, gate in daemon.engines.items()}
    return {"engines": {name: {key: shown[key] for key in _BUDGET_KEYS} for name, shown in engines.items()}}


def queue(daemon: DaemonStatus) -> Document:
    """Who waits: before kvctl's gates, and in the engines behind them."""
    shown = {}
    for name, gate in daemon.engines.items():
        known = [rank.waiting for rank in gate.ranks if rank.waiting is not None]
        shown[name] = {
            "queue": plain(gate.queue),
            "tenants": plain(gate.tenants),
            "engine_waiting": sum(known) if known else None,
        }
    return {"engines": shown}


def overrides(held: Overrides, now_mono: float) -> Document:
    """The overrides in force and the revision to name in If-Match."""
    return {
        "revision": held.revision,
        "active": {knob.value: override(each, now_mono) for knob, each in held.active(now_mono).items()},
    }


def override(each: Override, now_mono: float) -> Document:
    """One override, with the time that it has left."""
    shown: Document = plain(each)
    del shown["expires_mono"]
    return shown | {"left_s": round(each.left_s(now_mono), 3)}
