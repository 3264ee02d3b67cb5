"""The cards that NVML shows on this machine; a partitioned card is replaced by its MIG instances.

An error of one card stays with that card: its index is listed as lost or denied, the others as they are.
"""

from kvctl.gpu.binding import LOST, SESSION_LOST, Code, Nvml, NvmlFailure
from kvctl.gpu.select import Card, CardState, Kind, Selector, normal_pci

_MIG_ENABLED = 1


def enumerate_cards(nvml: Nvml) -> list[Card]:
    """All cards in NVML's (PCI) order. Raises NvmlFailure only where NVML itself fails."""
    cards: list[Card] = []
    for index in range(int(nvml.call("nvmlDeviceGetCount"))):
        cards += _at(nvml, index)
    return cards


def find_instance(nvml: Nvml, selector: Selector) -> tuple[Card, ...]:
    """A UUID asked for directly: in a container the instance may be open where its parent is not."""
    if selector.kind is not Kind.UUID:
        return ()
    try:
        handle = nvml.call("nvmlDeviceGetHandleByUUID", _cased(selector.text))
        uuid = str(nvml.call("nvmlDeviceGetUUID", handle))
    except NvmlFailure as failure:
        if failure.code in SESSION_LOST:
            raise
        return ()
    return (Card(index=None, uuid=uuid, name=_text(nvml, "nvmlDeviceGetName", handle), handle=handle),)


def _cased(text: str) -> str:
    """A selector's lower-case UUID with the capitals that NVML wants."""
    return text.replace("gpu-", "GPU-").replace("mig-", "MIG-")


def _at(nvml: Nvml, index: int) -> list[Card]:
    """The card at ``index``, or its instances."""
    try:
        handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
        uuid = str(nvml.call("nvmlDeviceGetUUID", handle))
    except NvmlFailure as failure:
        if failure.code in SESSION_LOST:
            raise
        state = CardState.LOST if failure.code in LOST else CardState.DENIED
        return [Card(index=index, uuid="", state=state)]
    card = Card(
        index=index,
        uuid=uuid,
        pci=_pci(nvml, handle),
        name=_text(nvml, "nvmlDeviceGetName", handle),
        handle=handle,
    )
    return _instances(nvml, card) if _partitioned(nvml, handle) else [card]


def _partitioned(nvml: Nvml, handle: object) -> bool:
    try:
        current, _pending = nvml.call("nvmlDeviceGetMigMode", handle)
    except NvmlFailure:  # most cards do not support the query
        return False
    return bool(current == _MIG_ENABLED)


def _instances(nvml: Nvml, parent: Card) -> list[Card]:
    """The instances of a partitioned card, or the card itself, marked, when none is visible."""
    found: list[Card] = []
    for number in range(_most_instances(nvml, parent.handle)):
        try:
            handle = nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", parent.handle, number)
            uuid = str(nvml.call("nvmlDeviceGetUUID", handle))
        except NvmlFailure:  # numbers of instances have gaps
            continue
        name = _text(nvml, "nvmlDeviceGetName", handle) or parent.name
        found.append(
            Card(
                index=parent.index,
                uuid=uuid,
                pci=parent.pci,
                name=name,
                handle=handle,
                parent=parent.handle,
                parent_uuid=parent.uuid,
            )
        )
    if found:
        return found
    marked = CardState.PARTITIONED
    return [Card(index=parent.index, uuid=parent.uuid, pci=parent.pci, name=parent.name, state=marked)]


def _most_instances(nvml: Nvml, handle: object) -> int:
    try:
        return int(nvml.call("nvmlDeviceGetMaxMigDeviceCount", handle))
    except NvmlFailure:
        return 0


def _pci(nvml: Nvml, handle: object) -> str:
    try:
        raw = nvml.call("nvmlDeviceGetPciInfo", handle).busId
    except NvmlFailure as failure:
        if failure.code == Code.UNINITIALIZED:
            raise
        return ""
    return normal_pci(raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw))


def _text(nvml: Nvml, call: str, handle: object) -> str:
    try:
        value = nvml.call(call, handle)
    except NvmlFailure:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
