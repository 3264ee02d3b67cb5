"""From the setting ``gpus`` to a source of readings."""

from collections.abc import Sequence

from kvctl.gpu.base import GpuSource
from kvctl.gpu.nvml import NvmlSource
from kvctl.gpu.select import parse_selector
from kvctl.gpu.worker import Isolation

NONE = "none"
AUTO = "auto"  # every card is read; an engine's processes show which of them are its own


def make_source(
    gpus: Sequence[str], *, timeout_s: float, isolation: Isolation = Isolation.PROCESS
) -> GpuSource | None:
    """The source that ``gpus`` names: selectors (kvctl.gpu.select), auto, or none for no source.

    ``timeout_s`` bounds one read. Raises SelectorError for what names no card. Opens nothing yet.
    """
    if list(gpus) == [NONE]:
        return None
    names = ["all"] if list(gpus) == [AUTO] else gpus
    return NvmlSource([parse_selector(name) for name in names], timeout_s=timeout_s, isolation=isolation)
