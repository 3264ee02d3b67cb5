"""NVML's event set: what the driver reports without being asked.

Events are registered on whole cards. An event that carries the number of a MIG instance concerns that
instance alone; without a number it concerns every instance of its card. Law 8: a card without events is
watched without them, and ``absent`` has the word for why.
"""

import contextlib
import ctypes
from collections.abc import Sequence

from kvctl.core.outcomes import Absence
from kvctl.gpu.binding import Code, Nvml, NvmlFailure
from kvctl.gpu.faults import CardEvent, EventKind, kind_of_xid
from kvctl.gpu.select import Card, CardState

# nvml.h, nvmlEventType*
_SINGLE_BIT = 0x1
_DOUBLE_BIT = 0x2
_XID = 0x8
_WANTED = _SINGLE_BIT | _DOUBLE_BIT | _XID
_ANY_INSTANCE = 0xFFFFFFFF
_MOST_AT_ONCE = 64


class EventWatch:
    """One event set over the given cards. Made and used in the thread that calls NVML."""

    def __init__(self, nvml: Nvml, cards: Sequence[Card]) -> None:
        """Registers the events that each card supports; ``absent`` has the others, by UUID. Never raises."""
        self._nvml = nvml
        self._cards = [card for card in cards if card.state is CardState.PRESENT]
        self.absent: dict[str, Absence] = {}
        self._set: object = None
        self.usable = False
        self.broken = False  # no longer usable
        try:
            self._set = nvml.call("nvmlEventSetCreate")
        except NvmlFailure as failure:
            self._all_absent(failure.absence)
            return
        for handle in {_address(_whole(card)): _whole(card) for card in self._cards}.values():
            self._register(handle)

    @property
    def lost(self) -> set[str]:
        """Cards that were lost when their events were asked for."""
        return {uuid for uuid, why in self.absent.items() if why is Absence.LOST}

    def _all_absent(self, why: Absence) -> None:
        self.absent = dict.fromkeys((card.uuid for card in self._cards), why)

    def _register(self, handle: object) -> None:
        try:
            kinds = int(self._nvml.call("nvmlDeviceGetSupportedEventTypes", handle)) & _WANTED
            if kinds:
                self._nvml.call("nvmlDeviceRegisterEvents", handle, kinds, self._set)
        except NvmlFailure as failure:
            why: Absence | None = failure.absence
        else:
            why = None if kinds else Absence.NOT_SUPPORTED
        if why is None:
            self.usable = True
        else:
            self.absent.update((card.uuid, why) for card in self._of(handle))

    def _of(self, handle: object) -> list[Card]:
        return [card for card in self._cards if _address(_whole(card)) == _address(handle)]

    def wait(self, timeout_ms: int) -> tuple[CardEvent, ...]:
        """The first event within ``timeout_ms``, and those queued behind it. After a failure it is broken."""
        found: list[CardEvent] = []
        while self.usable and len(found) < _MOST_AT_ONCE:
            try:
                raw = self._nvml.call("nvmlEventSetWait_v2", self._set, 0 if found else timeout_ms)
            except NvmlFailure as failure:
                if failure.code != Code.TIMEOUT:  # a lost card would answer so at once, again and again
                    self.usable, self.broken = False, True
                    self._all_absent(failure.absence)
                break
            found.append(self._event(raw))
        return tuple(found)

    def close(self) -> None:
        """Release the set."""
        self.usable = False
        if self._set is not None:
            with contextlib.suppress(NvmlFailure):  # if NVML went away there is nothing to release
                self._nvml.call("nvmlEventSetFree", self._set)
            self._set = None

    def _event(self, raw: object) -> CardEvent:
        kind, data = int(getattr(raw, "eventType", 0)), int(getattr(raw, "eventData", 0))
        uuids = tuple(card.uuid for card in self._concerned(raw))
        if kind & _XID:
            return CardEvent(uuids=uuids, kind=kind_of_xid(data), xid=data)
        ecc = EventKind.ECC_UNCORRECTED if kind & _DOUBLE_BIT else EventKind.ECC_CORRECTED
        return CardEvent(uuids=uuids, kind=ecc)

    def _concerned(self, raw: object) -> list[Card]:
        cards = self._of(getattr(raw, "device", None))
        instance = getattr(raw, "gpuInstanceId", _ANY_INSTANCE)
        if instance == _ANY_INSTANCE:
            return cards
        return [card for card in cards if self._instance(card) in (None, instance)]

    def _instance(self, card: Card) -> int | None:
        """The instance's number; None: it is a whole card, or does not tell."""
        if card.parent is None:
            return None
        try:
            return int(self._nvml.call("nvmlDeviceGetGpuInstanceId", card.handle))
        except NvmlFailure:
            return None


def _whole(card: Card) -> object:
    return card.handle if card.parent is None else card.parent


def _address(handle: object) -> int:
    """NVML's handles are pointers; the binding makes a new object of the same pointer each time."""
    if handle is None:
        return 0
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)  # type: ignore[arg-type]
