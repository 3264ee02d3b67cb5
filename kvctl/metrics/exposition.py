"""Metrics as text, format 0.0.4: a line a series, and how its name is written.

The library's own way makes an object of each sample, some thousands a scrape, on the loop that also carries
the requests. Here the name of a series is written once, and a scrape puts numbers behind it.
"""

from collections.abc import Sequence
from functools import lru_cache

from kvctl.metrics.spec import Spec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[str, ...]

_NAMES_KEPT = 2**14  # more than any page has
_QUOTED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


def head(spec: Spec) -> str:
    """What stands above a metric's series."""
    return f"# HELP {spec.name} {spec.help.translate(_HELP)}\n# TYPE {spec.name} {spec.kind}\n"


@lru_cache(_NAMES_KEPT)
def series(name: str, keys: Labels, labels: Labels) -> str:
    """The name of one series, with the space before its number; ``labels`` are the values of ``keys``.

    Labels stand in the order of the alphabet, as the library writes them.
    """
    if not keys:
        return f"{name} "
    pairs = sorted(zip(keys, labels, strict=True))
    written = ",".join(f'{key}="{str(label).translate(_QUOTED)}"' for key, label in pairs)
    return f"{name}{{{written}}} "


def buckets(name: str, keys: Labels, labels: Labels, bounds: Sequence[str]) -> list[str]:
    """The names of a histogram's series: each bucket, its count, its sum."""
    edges = [series(f"{name}_bucket", (*keys, "le"), (*labels, bound)) for bound in bounds]
    return [*edges, series(f"{name}_count", keys, labels), series(f"{name}_sum", keys, labels)]


def number(value: float) -> str:
    """A value as the format has it."""
    written = repr(float(value))
    return _SPECIAL.get(written, written)


_SPECIAL = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
