"""Which processes compute on a card, as NVML says: this is how an engine's cards are found.

Law 3: what a process holds is unknown, not zero, where the driver does not say it (WSL, WDDM, MIG parents);
nothing is summed over processes. In a container NVML gives pids of the host, or none.
"""

from collections.abc import Iterable
from typing import Any

from kvctl.core.outcomes import Absence
from kvctl.gpu.base import CardProcess
from kvctl.gpu.binding import SESSION_LOST, Code, Nvml, NvmlFailure
from kvctl.gpu.select import Card, CardState

_MOST_BYTES = 1 << 60  # above: an "all ones" for "not available"

Found = dict[str, tuple[CardProcess, ...]]


def read_processes(nvml: Nvml, cards: Iterable[Card]) -> tuple[Found, dict[str, Absence]]:
    """By UUID: the compute processes, or why they cannot be told. Raises NvmlFailure if NVML is gone."""
    found: Found = {}
    absent: dict[str, Absence] = {}
    for card in cards:
        if card.state is not CardState.PRESENT:
            continue
        try:
            raw = _running(nvml, card.handle)
        except NvmlFailure as failure:
            if failure.code in SESSION_LOST:
                raise
            absent[card.uuid] = failure.absence
        else:
            found[card.uuid] = tuple(_process(each) for each in raw)
    return found, absent


def _running(nvml: Nvml, handle: object) -> Any:
    """By the call of drivers from 515 on, else by the older one."""
    try:
        return nvml.call("nvmlDeviceGetComputeRunningProcesses_v3", handle)
    except NvmlFailure as failure:
        if failure.code != Code.FUNCTION_NOT_FOUND:
            raise
    return nvml.call("nvmlDeviceGetComputeRunningProcesses_v2", handle)


def _process(raw: Any) -> CardProcess:
    used = raw.usedGpuMemory
    known = used is not None and 0 <= int(used) < _MOST_BYTES
    return CardProcess(pid=int(raw.pid), used_bytes=int(used) if known else None)
