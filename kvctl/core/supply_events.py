"""Events that move the supply side alone: each is taken in, then state and budget follow."""

from collections.abc import Callable
from typing import Any

from kvctl.core.events import (
    CapacityPlanned,
    CardsFailed,
    Command,
    ConnectFailed,
    GpuReadFailed,
    GpusRead,
    ScrapeFailed,
)
from kvctl.core.supply import Supply

_TAKEN: dict[type, Callable[[Supply, Any, float], list[Command] | None]] = {
    ScrapeFailed: lambda supply, event, now: supply.view.scrape_failed(event.fault, now),
    ConnectFailed: lambda supply, _, __: supply.view.connect_failed(),
    GpusRead: lambda supply, event, now: supply.cards(event.samples, now, named=event.named),
    GpuReadFailed: lambda supply, _, now: supply.cards_unknown(now),
    CardsFailed: lambda supply, event, now: supply.view.cards_failed(event.uuids, now),
    CapacityPlanned: lambda supply, event, _: supply.planned(event.tokens),
}


def supply_handlers(supply: Supply) -> dict[type, Callable[[Any, float], list[Command]]]:
    """A handler for each of them."""

    def handler(kind: type) -> Callable[[Any, float], list[Command]]:
        take = _TAKEN[kind]
        return lambda event, now: [*(take(supply, event, now) or ()), *supply.settle(now)]

    return {kind: handler(kind) for kind in _TAKEN}
