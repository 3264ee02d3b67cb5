"""What a metric of the catalog is, how its three kinds are made, and the bucket edges they share.

Units are base units; a share is a ratio, never percent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """The Prometheus type."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One metric. ``labels`` maps a label to all of its values, or to () where the site decides them."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()  # upper bounds, without +Inf


OPEN: tuple[str, ...] = ()  # label values that the site decides

# Bucket edges stand on the objectives that people set: TTFT 0.5 s and 2 s, inter-token 30 ms and 100 ms.
OWN_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
LATENCY_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
GAP_SECONDS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LEASE_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
RETRY_SECONDS = (1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0)
TOKENS = (
    1.0,
    8.0,
    32.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
    32768.0,
    131072.0,
)
RATIO = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def gauge(name: str, text: str, labels: Mapping[str, tuple[str, ...]] | None = None) -> Spec:
    """A value of the moment."""
    return Spec(name=name, kind=Kind.GAUGE, help=text, labels=labels or {})


def counter(name: str, text: str, labels: Mapping[str, tuple[str, ...]] | None = None) -> Spec:
    """A count since the start; its name ends in ``_total``."""
    return Spec(name=name, kind=Kind.COUNTER, help=text, labels=labels or {})


def histogram(
    name: str, text: str, buckets: tuple[float, ...], labels: Mapping[str, tuple[str, ...]] | None = None
) -> Spec:
    """Observations by size; ``buckets`` are upper bounds without +Inf."""
    return Spec(name=name, kind=Kind.HISTOGRAM, help=text, labels=labels or {}, buckets=buckets)
