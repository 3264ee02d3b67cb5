"""A libnvidia-ml made of Python functions, put behind the real binding.

The binding looks functions up by name on ``pynvml.nvmlLib`` and calls them with ctypes arguments; this
stands in that one place, so the binding's own wrappers, structs and error classes are what is tested.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml  # type: ignore[import-untyped]

GIB = 1 << 30
_PARENTS = 1000  # handles are index + 1; instances are (parent handle) * 1000 + number + 1


@dataclass
class FakeCard:
    """One card, and what each call on it answers. ``errors`` maps a C function's name to a code."""

    uuid: str
    pci: str = "00000000:3B:00.0"
    name: str = "NVIDIA H200"
    total: int = 140 * GIB
    free: int = 100 * GIB
    reserved: int = GIB
    temperature: int = 40
    clocks: int = 0
    ecc: int = 0
    mig: int = 0
    instances: dict[int, "FakeCard"] = field(default_factory=dict)
    gpu_instance: int = 0
    processes: dict[int, int | None] = field(default_factory=dict)  # bytes by pid
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FakeEvent:
    """One message: of the card at ``index``, of an NVML event type; ``instance`` of a MIG instance."""

    index: int
    kind: int
    data: int
    instance: int = 0xFFFFFFFF


def cards(count: int) -> list[FakeCard]:
    return [
        FakeCard(f"GPU-{i}{i}{i}{i}{i}{i}{i}{i}-0000", f"00000000:{i + 1:02X}:00.0") for i in range(count)
    ]


class FakeLibrary:
    """The library. Attributes are looked up once by the binding, so the functions stay, their state moves."""

    def __init__(self, *found: FakeCard) -> None:
        self.cards = list(found)
        self.errors: dict[str, int] = {}  # of the whole library
        self.without: set[str] = set()  # functions that this driver does not have
        self.open = 0
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.events: list[FakeEvent] = []
        self.event_sets = 0
        self.registered: list[int] = []  # handles
        self.hang: dict[str, threading.Event] = {}  # calls that wait until the event is set

    @property
    def functions(self) -> list[str]:
        """Every function that it has."""
        return [name for name in _FUNCTIONS if name not in self.without]

    def __getattr__(self, name: str) -> Callable[..., int]:
        implementation = _FUNCTIONS.get(name)
        if implementation is None or name in self.without:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            return self._call(name, implementation, arguments)

        return call

    def _call(self, name: str, implementation: Callable[..., int | None], arguments: tuple[Any, ...]) -> int:
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        if name in self.hang:
            self.hang[name].wait()
        if name in self.errors:
            return int(self.errors[name])
        if name not in ("nvmlInitWithFlags", "nvmlInit_v2", "nvmlErrorString") and not self.open:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        return implementation(self, *arguments) or 0

    def card(self, handle: Any) -> FakeCard:
        number = int(ctypes.cast(handle, ctypes.c_void_p).value or 0)
        if number < _PARENTS:
            return self.cards[number - 1]
        parent, instance = divmod(number, _PARENTS)
        return self.cards[parent - 1].instances[instance - 1]


def _out(reference: Any) -> Any:
    """What a byref() points at."""
    return reference._obj


def _set_handle(reference: Any, number: int) -> None:
    ctypes.cast(ctypes.pointer(_out(reference)), ctypes.POINTER(ctypes.c_void_p))[0] = number


def _init(library: FakeLibrary, *_flags: Any) -> None:
    library.open += 1


def _shutdown(library: FakeLibrary) -> None:
    library.open -= 1


def _count(library: FakeLibrary, out: Any) -> None:
    _out(out).value = len(library.cards)


def _by_index(library: FakeLibrary, index: Any, out: Any) -> int:
    number = int(index.value)
    if number >= len(library.cards):
        return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    _set_handle(out, number + 1)
    return library.cards[number].errors.get("nvmlDeviceGetHandleByIndex_v2", 0)


def _by_uuid(library: FakeLibrary, uuid: Any, out: Any) -> int:
    wanted = uuid.value.decode()
    for index, card in enumerate(library.cards):
        if card.uuid == wanted:
            _set_handle(out, index + 1)
            return 0
        for number, instance in card.instances.items():
            if instance.uuid == wanted:
                _set_handle(out, (index + 1) * _PARENTS + number + 1)
                return 0
    return int(pynvml.NVML_ERROR_NOT_FOUND)


def _text(attribute: str, name: str) -> Callable[..., int]:
    def call(library: FakeLibrary, handle: Any, buffer: Any, _size: Any) -> int:
        card = library.card(handle)
        buffer.value = getattr(card, attribute).encode()
        return card.errors.get(name, 0)

    return call


def _number(attribute: str, name: str) -> Callable[..., int]:
    def call(library: FakeLibrary, handle: Any, *arguments: Any) -> int:
        card = library.card(handle)
        if name in card.errors:
            return card.errors[name]
        _out(arguments[-1]).value = getattr(card, attribute)
        return 0

    return call


def _pci(library: FakeLibrary, handle: Any, out: Any) -> int:
    card = library.card(handle)
    _out(out).busId = card.pci.encode()
    return card.errors.get("nvmlDeviceGetPciInfo_v3", 0)


def _memory_v1(library: FakeLibrary, handle: Any, out: Any) -> int:
    card = library.card(handle)
    info = _out(out)
    info.total, info.free, info.used = card.total, card.free, (card.total - card.free) % (1 << 64)
    return card.errors.get("nvmlDeviceGetMemoryInfo", 0)


def _memory_v2(library: FakeLibrary, handle: Any, out: Any) -> int:
    card = library.card(handle)
    info = _out(out)
    if info.version != pynvml.nvmlMemory_v2:
        return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
    info.total, info.free, info.reserved = card.total, card.free, card.reserved
    info.used = (card.total - card.free - card.reserved) % (1 << 64)
    return card.errors.get("nvmlDeviceGetMemoryInfo_v2", 0)


def _mig_mode(library: FakeLibrary, handle: Any, current: Any, pending: Any) -> int:
    card = library.card(handle)
    _out(current).value = _out(pending).value = card.mig
    return card.errors.get("nvmlDeviceGetMigMode", 0)


def _mig_count(library: FakeLibrary, handle: Any, out: Any) -> None:
    _out(out).value = 7 if library.card(handle).mig else 0


def _mig_handle(library: FakeLibrary, handle: Any, number: Any, out: Any) -> int:
    parent = int(ctypes.cast(handle, ctypes.c_void_p).value or 0)
    if number.value not in library.card(handle).instances:
        return int(pynvml.NVML_ERROR_NOT_FOUND)
    _set_handle(out, parent * _PARENTS + number.value + 1)
    return library.card(handle).errors.get("nvmlDeviceGetMigDeviceHandleByIndex", 0)


def _event_set(library: FakeLibrary, out: Any) -> None:
    library.event_sets += 1
    _set_handle(out, 77)


def _free_set(library: FakeLibrary, _set: Any) -> None:
    library.event_sets -= 1


def _register(library: FakeLibrary, handle: Any, _types: Any, _set: Any) -> int:
    library.registered.append(int(ctypes.cast(handle, ctypes.c_void_p).value or 0))
    return library.card(handle).errors.get("nvmlDeviceRegisterEvents", 0)


def _event_types(library: FakeLibrary, handle: Any, out: Any) -> int:
    _out(out).value = 0xFFFF
    return library.card(handle).errors.get("nvmlDeviceGetSupportedEventTypes", 0)


def _event_wait(library: FakeLibrary, _set: Any, out: Any, _timeout: Any) -> int:
    if not library.events:
        return int(pynvml.NVML_ERROR_TIMEOUT)
    event, data = library.events.pop(0), _out(out)
    data.device = ctypes.cast(event.index + 1, type(data.device))
    data.eventType, data.eventData = event.kind, event.data
    data.gpuInstanceId, data.computeInstanceId = event.instance, 0xFFFFFFFF
    return 0


def _processes(library: FakeLibrary, handle: Any, count: Any, out: Any) -> int:
    card = library.card(handle)
    if code := card.errors.get("nvmlDeviceGetComputeRunningProcesses_v3"):
        return code
    room, _out(count).value = _out(count).value, len(card.processes)
    if len(card.processes) > room:
        return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    for place, (pid, held) in zip(out or (), card.processes.items(), strict=False):
        place.pid, place.usedGpuMemory = pid, (1 << 64) - 1 if held is None else held
    return 0


def _driver(_library: FakeLibrary, buffer: Any, _size: Any) -> None:
    buffer.value = b"580.95.05"


def _error_string(_library: FakeLibrary, _code: Any) -> int:
    return 0


_FUNCTIONS: dict[str, Callable[..., int | None]] = {
    "nvmlInitWithFlags": _init,
    "nvmlInit_v2": _init,
    "nvmlShutdown": _shutdown,
    "nvmlDeviceGetCount_v2": _count,
    "nvmlDeviceGetHandleByIndex_v2": _by_index,
    "nvmlDeviceGetHandleByUUID": _by_uuid,
    "nvmlDeviceGetUUID": _text("uuid", "nvmlDeviceGetUUID"),
    "nvmlDeviceGetName": _text("name", "nvmlDeviceGetName"),
    "nvmlDeviceGetPciInfo_v3": _pci,
    "nvmlDeviceGetMemoryInfo": _memory_v1,
    "nvmlDeviceGetMemoryInfo_v2": _memory_v2,
    "nvmlDeviceGetMigMode": _mig_mode,
    "nvmlDeviceGetMaxMigDeviceCount": _mig_count,
    "nvmlDeviceGetMigDeviceHandleByIndex": _mig_handle,
    "nvmlDeviceGetTemperature": _number("temperature", "nvmlDeviceGetTemperature"),
    "nvmlDeviceGetCurrentClocksEventReasons": _number("clocks", "nvmlDeviceGetCurrentClocksEventReasons"),
    "nvmlDeviceGetCurrentClocksThrottleReasons": _number(
        "clocks", "nvmlDeviceGetCurrentClocksThrottleReasons"
    ),
    "nvmlDeviceGetTotalEccErrors": _number("ecc", "nvmlDeviceGetTotalEccErrors"),
    "nvmlEventSetCreate": _event_set,
    "nvmlEventSetFree": _free_set,
    "nvmlEventSetWait_v2": _event_wait,
    "nvmlDeviceRegisterEvents": _register,
    "nvmlDeviceGetSupportedEventTypes": _event_types,
    "nvmlDeviceGetGpuInstanceId": _number("gpu_instance", "nvmlDeviceGetGpuInstanceId"),
    "nvmlDeviceGetComputeRunningProcesses_v3": _processes,
    "nvmlSystemGetDriverVersion": _driver,
    "nvmlErrorString": _error_string,
}


@contextmanager
def installed(library: FakeLibrary | None) -> Iterator[None]:
    """Let the real binding use ``library``; None: none is found on this machine."""
    before = pynvml.nvmlLib
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield
    finally:
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()
