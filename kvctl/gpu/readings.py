"""One card's readings, each a value or a named absence.

Law 3: unknown is not zero. A total of 0 that the driver calls a success, free above total, and the
all-ones word that some drivers hand out for "not available" are absences, never numbers.

Memory: the versioned call (v2) gives the driver's own reserve separately, the plain one (v1) counts it as
used; ``free`` is the same in both. On some drivers v2 exists and fails: v1 is then used from there on. Cards
that share the system's memory have neither: for them /proc/meminfo's MemAvailable is what an allocation can
get.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.core.outcomes import Absence
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.binding import LOST, SESSION_LOST, Code, Nvml, NvmlFailure
from kvctl.gpu.select import Card, CardState

log = logging.getLogger("kvctl.gpu")

UNIFIED = "unified memory: system MemAvailable"
_BYTES = ("total_bytes", "free_bytes", "used_bytes", "reserved_bytes")
_STATE_ABSENCE = {
    CardState.LOST: Absence.LOST,
    CardState.DENIED: Absence.NO_PERMISSION,
    CardState.PARTITIONED: Absence.NO_PERMISSION,
}
_MOST_BYTES = 1 << 60  # above: not a size but an "all ones" for "not available"
_HOTTEST_C = 200

# Clocks-event bits (nvml.h, nvmlClocksEventReason*). Idle (0x1) is no throttling and has no word.
THROTTLE_WORDS: Mapping[int, str] = {
    0x0002: "applications_clocks",
    0x0004: "sw_power_cap",
    0x0008: "hw_slowdown",
    0x0010: "sync_boost",
    0x0020: "sw_thermal",
    0x0040: "hw_thermal",
    0x0080: "hw_power_brake",
    0x0100: "display_clock",
    0x0200: "board_limit",
    0x0400: "reliability",
}
THROTTLE_OTHER = "other"
_IDLE = 0x0001


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A card's memory in bytes; ``absent`` says why a value is missing. ``failure``: of the last call."""

    values: Mapping[str, Any] = field(default_factory=dict)  # int by field name
    absent: Mapping[str, Absence] = field(default_factory=dict)
    unified: bool = False
    failure: NvmlFailure | None = None


class MemoryReader:
    """Reads memory by v2 while that works, and by v1 once that was seen to work where v2 does not."""

    def __init__(self, nvml: Nvml, meminfo: Path = Path("/proc/meminfo"), *, announced: bool = False) -> None:
        self._nvml = nvml
        self._meminfo = meminfo
        self._v1_only = False
        self.announced = announced

    def read(self, handle: object) -> Memory:
        """The memory behind ``handle``; never raises."""
        failures: list[NvmlFailure] = []
        if not self._v1_only:
            try:
                return _split(self._v2(handle), has_reserved=True)
            except NvmlFailure as failure:
                failures.append(failure)
                if failure.code in LOST | SESSION_LOST:
                    return _unknown(failure)
        try:
            memory = _split(self._nvml.call("nvmlDeviceGetMemoryInfo", handle), has_reserved=False)
        except NvmlFailure as failure:
            failures.append(failure)
            return self._neither(failures)
        self._remember(failures)
        return memory

    def _v2(self, handle: object) -> Any:
        version = getattr(self._nvml.module, "nvmlMemory_v2", None)
        if version is None:
            raise NvmlFailure(Code.FUNCTION_NOT_FOUND, "nvmlDeviceGetMemoryInfo_v2", "not in this binding")
        return self._nvml.call("nvmlDeviceGetMemoryInfo", handle, version)

    def _remember(self, failures: list[NvmlFailure]) -> None:
        if failures:
            self._v1_only = True
            if not self.announced:
                log.info("memory is read with NVML's older call from now on: %s", failures[0])
            self.announced = True

    def _neither(self, failures: list[NvmlFailure]) -> Memory:
        """Neither call answered. On a card without memory of its own both say Not Supported."""
        if all(failure.code == Code.NOT_SUPPORTED for failure in failures):
            return self._system() or _unknown(failures[-1])
        return _unknown(failures[-1])

    def _system(self) -> Memory | None:
        """The host's memory, which a unified card allocates from."""
        try:
            lines = (line.split() for line in self._meminfo.read_text().splitlines())
            kib = {words[0]: int(words[1]) for words in lines if words[0] in ("MemTotal:", "MemAvailable:")}
            values = {"total_bytes": kib["MemTotal:"] * 1024, "free_bytes": kib["MemAvailable:"] * 1024}
        except (OSError, ValueError, KeyError, IndexError):
            return None
        absent = dict.fromkeys(("used_bytes", "reserved_bytes"), Absence.NOT_SUPPORTED)
        return Memory(values=values, absent=absent, unified=True)


def _unknown(failure: NvmlFailure) -> Memory:
    return Memory(absent=dict.fromkeys(_BYTES, failure.absence), failure=failure)


def _split(info: Any, *, has_reserved: bool) -> Memory:
    """The values of a memory struct, each checked."""
    total, free = int(info.total), int(info.free)
    if not 0 < total < _MOST_BYTES or free > total:
        return Memory(absent=dict.fromkeys(_BYTES, Absence.OUT_OF_RANGE))
    values = {"total_bytes": total, "free_bytes": free}
    absent: dict[str, Absence] = {}
    _put("used_bytes", int(info.used), total, values, absent)
    if has_reserved:
        _put("reserved_bytes", int(info.reserved), total, values, absent)
    else:
        absent["reserved_bytes"] = Absence.NOT_SUPPORTED
    return Memory(values=values, absent=absent)


def _put(name: str, value: int, most: int, values: dict[str, int], absent: dict[str, Absence]) -> None:
    if 0 <= value <= most:
        values[name] = value
    else:
        absent[name] = Absence.OUT_OF_RANGE


def read_card(
    nvml: Nvml, card: Card, memory: MemoryReader, at: float
) -> tuple[GpuSample, NvmlFailure | None]:
    """One sample, and the failure of its memory reading. Never raises."""
    if card.state is not CardState.PRESENT:
        return unreadable(card, at, _STATE_ABSENCE[card.state]), None
    held = memory.read(card.handle)
    if held.failure is not None and held.failure.code in LOST:
        return unreadable(card, at, Absence.LOST), held.failure
    # an instance has no thermometer and no clocks of its own
    values, absent = _read_optional(nvml, card.handle if card.parent is None else card.parent)
    sample = GpuSample(
        uuid=card.uuid,
        at=at,
        index=card.index,
        name=f"{card.name} ({UNIFIED})" if held.unified else card.name,
        absent={**held.absent, **absent},
        **held.values,
        **values,
    )
    return sample, held.failure


def unreadable(card: Card, at: float, why: Absence) -> GpuSample:
    """The sample of a card that cannot be asked."""
    absent = dict.fromkeys((*_BYTES, *_OPTIONAL), why)
    uuid = card.uuid or f"index:{card.index}"
    return GpuSample(
        uuid=uuid, at=at, index=card.index, name=card.name, lost=why is Absence.LOST, absent=absent
    )


def _read_optional(nvml: Nvml, handle: object) -> tuple[dict[str, Any], dict[str, Absence]]:
    """Readings that explain things, but that kvctl can do without."""
    values: dict[str, Any] = {}
    absent: dict[str, Absence] = {}
    for name, read in _OPTIONAL.items():
        try:
            value = read(nvml, handle)
        except NvmlFailure as failure:
            absent[name] = failure.absence
            continue
        if value is None:
            absent[name] = Absence.OUT_OF_RANGE
        else:
            values[name] = value
    return values, absent


def _temperature(nvml: Nvml, handle: object) -> float | None:
    """Degrees Celsius of the chip."""
    celsius = nvml.call("nvmlDeviceGetTemperature", handle, nvml.module.NVML_TEMPERATURE_GPU)
    return float(celsius) if 0 <= celsius <= _HOTTEST_C else None


def _throttle_reasons(nvml: Nvml, handle: object) -> tuple[str, ...]:
    """Why the card is throttled now, as words. Drivers before 535 have only the older name."""
    try:
        bits = int(nvml.call("nvmlDeviceGetCurrentClocksEventReasons", handle))
    except NvmlFailure as failure:
        if failure.code != Code.FUNCTION_NOT_FOUND:
            raise
        bits = int(nvml.call("nvmlDeviceGetCurrentClocksThrottleReasons", handle))
    words = tuple(word for bit, word in THROTTLE_WORDS.items() if bits & bit)
    unknown = bits & ~(_IDLE | sum(THROTTLE_WORDS))
    return (*words, THROTTLE_OTHER) if unknown else words


def _ecc_uncorrected(nvml: Nvml, handle: object) -> int | None:
    """Uncorrected memory errors since the driver was loaded."""
    module = nvml.module
    kind, span = module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, module.NVML_VOLATILE_ECC
    errors = int(nvml.call("nvmlDeviceGetTotalEccErrors", handle, kind, span))
    return errors if 0 <= errors < _MOST_BYTES else None


_OPTIONAL: Mapping[str, Callable[[Nvml, object], Any]] = {
    "temperature_c": _temperature,
    "throttle_reasons": _throttle_reasons,
    "ecc_uncorrected_total": _ecc_uncorrected,
}
