"""From the setting ``gpus`` to a source of readings."""

from collections.abc import Sequence

from kvctl.gpu.base import GpuSource
from kvctl.gpu.nvml import NvmlSource
from kvctl.gpu.select import parse_selector

NONE = "none"


def make_source(gpus: Sequence[str], *, timeout_s: float) -> GpuSource | None:
    """The source that ``gpus`` names: selectors (kvctl.gpu.select), or the word none for no source.

    ``timeout_s`` bounds one read. Raises SelectorError for what names no card. Opens nothing yet.
    """
    if list(gpus) == [NONE]:
        return None
    return NvmlSource([parse_selector(name) for name in gpus], timeout_s=timeout_s)
